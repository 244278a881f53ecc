"""`PullTransport`: messages over an engine by which the receiver reads the sender's memory.

    sender                                   receiver
    place of the message            →        starts to read it
                                    ←        has read it

Both notes go over gloo, and so do short messages. It tells at once that a peer is gone. Only the
receiver's own engine writes to its memory, and ends with the connection.
"""

import time
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.distributed.transport import MEMORY_BYTES, Pending, TorchTransport
from dsv4.errors import PeerLostError

SHORT_BYTES = 4096
READ_TAG = 1  # of the notes that a message was read
POLL_SECONDS = 50e-6


class Place(NamedTuple):
    """Where a message lies in the sender's memory; `device` is -1 for the CPU.

    `version` counts what the sender has registered: a reader may have to learn of it first.
    """

    address: int
    device: int
    version: int


class PullTransport:
    """Messages that the receiver reads.

    Args:
        store: A store of torch.distributed, where ranks 0 and 1 meet.
        rank: This process's rank.
        host: This rank's address, on the network that the peer can reach.
        memory_bytes: Bytes of `memory`; a few pieces of data share it.
        device: The device of `memory`, the CPU or a GPU.
    """

    takes_any = False

    def __init__(
        self,
        store: Any,
        rank: int,
        *,
        host: str = "127.0.0.1",
        memory_bytes: int = MEMORY_BYTES,
        device: torch.device | str = "cpu",
    ) -> None:
        self.memory = torch.empty(memory_bytes, dtype=torch.uint8, device=device)
        self._notes = TorchTransport.connect(store, rank, host=host, memory_bytes=0)
        self._registered: dict[int, Any] = {}
        self._coming: deque[_Pull] = deque()
        self.is_closed = False
        self.add_memory(self.memory)

    def add_memory(self, memory: Tensor) -> None:
        if memory.numel() and memory.data_ptr() not in self._registered:
            self._registered[memory.data_ptr()] = self.register(memory)

    def send(self, data: Tensor) -> Pending:
        if len(data) <= SHORT_BYTES:
            return self._notes.send(data.cpu())
        place = Place(data.data_ptr(), data.get_device(), len(self._registered))
        self._notes.send(torch.tensor(place))
        return self._notes.receive(torch.empty(1, dtype=torch.uint8), tag=READ_TAG)

    def receive(self, data: Tensor) -> Pending:
        pull = _Pull(self, self._notes, data)
        self._coming.append(pull)
        return pull

    def go_on(self) -> None:
        """Go on with all that is received: messages that follow are read meanwhile."""
        while self._coming and self._coming[0].is_over:
            self._coming.popleft()
        for pull in self._coming:
            if not pull.go_on():
                break

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._notes.close()
            for pull in self._coming:
                pull.transfer = None  # it may keep the engine alive
            with suppress(Exception):  # the peer may be dead
                self.stop()

    def register(self, memory: Tensor) -> Any:
        """Let the peer read more memory."""
        raise NotImplementedError

    def start_read(self, place: Place, data: Tensor) -> Any:
        """Start to read a message of the peer."""
        raise NotImplementedError

    def is_read(self, transfer: Any) -> bool:
        """Whether a message has been read.

        Raises:
            Exception: It never will.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """End the engine: nothing of it writes to this side's memory any more."""
        raise NotImplementedError


class _Pull:
    """A message that comes."""

    def __init__(self, transport: PullTransport, notes: TorchTransport, data: Tensor) -> None:
        self._transport, self._notes, self._data = transport, notes, data
        self._is_short = len(data) <= SHORT_BYTES
        if self._is_short:
            self._note = data if data.is_cpu else torch.empty_like(data, device="cpu")
        else:
            self._note = torch.empty(len(Place._fields), dtype=torch.int64)
        self._coming = notes.receive(self._note)
        self.transfer: Any = None
        self.is_over = False

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self.is_over and self._coming.wait(max(0.0, end - time.monotonic())):
            self._transport.go_on()
            if self.is_over or time.monotonic() >= end:
                break
            time.sleep(POLL_SECONDS)
        return self.is_over

    def go_on(self) -> bool:
        """Start to read what has been announced; return whether it was."""
        if self._transport.is_closed:
            raise PeerLostError("The connection is over")
        if self.is_over or not self._coming.wait(0):
            return self.is_over
        if self._is_short:
            if self._note is not self._data:
                self._data.copy_(self._note)
            self.is_over = True
            return True
        try:
            if self.transfer is None:
                self.transfer = self._transport.start_read(Place(*self._note.tolist()), self._data)
            elif self._transport.is_read(self.transfer):
                self._notes.send(torch.zeros(1, dtype=torch.uint8), tag=READ_TAG)
                self.is_over, self.transfer = True, None
        except Exception as error:
            raise PeerLostError(f"The peer is lost: {error}") from error
        return True
