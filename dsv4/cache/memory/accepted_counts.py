"""`AcceptedCounts`: the accepted tokens of a step, on the device and on their way to the host."""

import torch
from torch import Tensor

from dsv4.cache.memory.arrays import IntArray


class AcceptedCounts:
    """The accepted tokens of one step, by its rows.

    Args:
        counts: `[max_requests]` int32 on the device; the next step reads it there.
        others: The same on the other devices.
    """

    def __init__(self, counts: Tensor, *others: Tensor) -> None:
        self.counts, self._others = counts, others
        self._host = counts
        self._arrived: torch.cuda.Event | None = None
        if counts.is_cuda:
            self._host = torch.zeros(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._arrived = torch.cuda.Event()

    def send(self, accepted: Tensor) -> None:
        """Keep counts for the next step, and queue their copy to the host."""
        rows = slice(len(accepted))
        for counts in (self.counts, *self._others):
            counts[rows].copy_(accepted)
        if self._arrived is not None:
            self._host[rows].copy_(self.counts[rows], non_blocking=True)
            self._arrived.record(torch.cuda.current_stream(self.counts.device))

    def wait(self) -> IntArray:
        """Return the host's counts once they have arrived; all else that is queued runs on."""
        if self._arrived is not None:
            self._arrived.synchronize()
        counts: IntArray = self._host.cpu().numpy()
        return counts
