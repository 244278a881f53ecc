"""`Staging`: carries a plan to a device with memory of its own, without waiting for it."""

import torch
from torch import Tensor

from dsv4.cache.memory.arrays import IntArray

NUM_BUFFERS = 4


class Staging:
    """Fills a device tensor from the host and returns when the values have been read."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def send(self, values: IntArray) -> None:
        """Copy `values` to the target, after all work queued before."""
        self.target.copy_(torch.from_numpy(values))


class PinnedStaging(Staging):
    """Fills a CUDA tensor from pinned buffers in rotation and does not wait.

    A buffer is written again only when the copy out of it is done. The host waits only for a
    device that is `NUM_BUFFERS` plans behind.
    """

    def __init__(self, target: Tensor) -> None:
        super().__init__(target)
        self._buffers = [self._allocate() for _ in range(NUM_BUFFERS)]
        self._copied = [self._new_event() for _ in range(NUM_BUFFERS)]
        self._next = 0

    def send(self, values: IntArray) -> None:
        buffer, copied = self._buffers[self._next], self._copied[self._next]
        if not copied.query():
            copied.synchronize()
        buffer.numpy()[:] = values
        self._start_copy(buffer, copied)
        self._next = (self._next + 1) % NUM_BUFFERS

    def _allocate(self) -> Tensor:
        return torch.empty(self.target.shape, dtype=self.target.dtype, pin_memory=True)

    def _new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def _start_copy(self, buffer: Tensor, copied: torch.cuda.Event) -> None:
        self.target.copy_(buffer, non_blocking=True)
        # Another device may be the current one.
        copied.record(torch.cuda.current_stream(self.target.device))


def staging_for(device: torch.device) -> type[Staging] | None:
    """Return the staging of a device; None where host and device are the same memory."""
    if device.type == "cpu":
        return None
    return PinnedStaging if device.type == "cuda" else Staging
