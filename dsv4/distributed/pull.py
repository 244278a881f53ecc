"""`PullTransport`: messages over an engine by which the receiver reads the sender's memory.

    sender                                   receiver
    place of the message            →        reads it
                                    ←        has read it

Both notes go over gloo, and so do short messages. It tells at once that a peer is gone. Only the
receiver's own engine writes to its memory, and ends with the connection. A thread reads: some
engines copy in the call that starts a transfer. It also lets the sender's engine go on while there
is something to read.
"""

import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.distributed.transport import (
    DEADLINE_SECONDS,
    MEMORY_BYTES,
    FuturePending,
    Pending,
    TorchTransport,
)
from dsv4.errors import PeerLostError

SHORT_BYTES = 4096
READ_TAG = 1  # of the notes that a message was read
POLL_SECONDS = 50e-6
NOTE_SECONDS = 0.05


class Place(NamedTuple):
    """Where a message lies in the sender's memory; `device` is -1 for the CPU.

    `version` counts what the sender has registered: a reader may have to learn of it first.
    """

    address: int
    device: int
    version: int


class _Pull(NamedTuple):
    """A message that comes: its place or, if it is short, its bytes are in `note`."""

    data: Tensor
    note: Tensor
    noted: Pending
    over: Future[None]


class PullTransport:
    """Messages that the receiver reads.

    Args:
        store: A store of torch.distributed, where ranks 0 and 1 meet.
        rank: This process's rank.
        host: This rank's address, on the network that the peer can reach.
        memory_bytes: Bytes of `memory`; a few pieces of data share it.
        device: The device of `memory`, the CPU or a GPU.
        deadline: Seconds after which a peer that has not come is lost: a `PeerLostError`.
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
        deadline: float = DEADLINE_SECONDS,
    ) -> None:
        self._deadline = deadline
        self.memory = torch.empty(memory_bytes, dtype=torch.uint8, device=device)
        self._notes = TorchTransport.connect(
            store, rank, host=host, deadline=deadline, memory_bytes=0
        )
        self._registered: dict[int, Any] = {}
        self._lock = threading.Lock()  # of the engine
        self._pulls: SimpleQueue[_Pull | Pending | None] = SimpleQueue()
        self._coming: deque[_Pull] = deque()
        self._started: deque[tuple[_Pull, Any]] = deque()
        self._unread: deque[Pending] = deque()  # of messages that the peer has not read
        self._is_closed = False
        self.add_memory(self.memory)
        self._reader = threading.Thread(target=self._run, daemon=True)
        self._reader.start()

    def add_memory(self, memory: Tensor) -> None:
        if memory.numel() and memory.data_ptr() not in self._registered:
            with self._lock:
                self._registered[memory.data_ptr()] = self.register(memory)

    def send(self, data: Tensor) -> Pending:
        if len(data) <= SHORT_BYTES:
            return self._notes.send(data.cpu())
        place = Place(data.data_ptr(), data.get_device(), len(self._registered))
        self._notes.send(torch.tensor(place))
        over = self._notes.receive(torch.empty(1, dtype=torch.uint8), tag=READ_TAG)
        self._pulls.put(over)
        return over

    def receive(self, data: Tensor) -> Pending:
        is_short = len(data) <= SHORT_BYTES
        if is_short and data.is_cpu:
            return self._notes.receive(data)
        size, dtype = (len(data), data.dtype) if is_short else (len(Place._fields), torch.int64)
        note = torch.empty(size, dtype=dtype)
        pull = _Pull(data, note, self._notes.receive(note), Future())
        self._pulls.put(pull)
        return FuturePending(pull.over)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._pulls.put(None)
            self._notes.close()
            self._reader.join()
            with suppress(Exception):  # the peer may be dead
                self.stop()

    def _run(self) -> None:
        """Read messages until one fails; then none comes any more."""
        try:
            while not self._is_closed:
                self._go_on()
            failure = PeerLostError("the connection is over")
        except Exception as error:
            failure = error if isinstance(error, PeerLostError) else PeerLostError(str(error))
        left = [pull for pull, _ in self._started] + list(self._coming)
        self._started.clear()  # transfers may keep the engine alive
        for pull in left:
            pull.over.set_exception(failure)
        while (late := self._pulls.get()) is not None:
            if isinstance(late, _Pull):
                late.over.set_exception(failure)

    def _go_on(self) -> None:
        """End what has been read, or start to read what was announced, or wait."""
        is_idle = not self._started and not self._unread
        while not self._pulls.empty() or (is_idle and not self._coming):
            pull = self._pulls.get()
            if pull is None:
                self._pulls.put(None)
                return
            if isinstance(pull, _Pull):
                self._coming.append(pull)
            else:
                self._unread.append(pull)
            is_idle = not self._started and not self._unread
        if self._started and self._has_read(self._started[0][1]):
            self._notes.send(torch.zeros(1, dtype=torch.uint8), tag=READ_TAG)
            self._started.popleft()[0].over.set_result(None)
        elif self._coming and self._coming[0].noted.wait(NOTE_SECONDS if is_idle else 0):
            self._start(self._coming[0])
        elif not is_idle:
            self._serve()
            time.sleep(POLL_SECONDS)

    def _serve(self) -> None:
        """Let the engine do its part of what the peer reads."""
        while self._unread and self._unread[0].wait(0):
            self._unread.popleft()
        with self._lock:
            self.progress()

    def _has_read(self, transfer: Any) -> bool:
        with self._lock:
            return self.is_read(transfer)

    def _start(self, pull: _Pull) -> None:
        if pull.note.dtype == pull.data.dtype:
            pull.data.copy_(pull.note)
            pull.over.set_result(None)
        else:
            with self._lock:
                transfer = self.start_read(Place(*pull.note.tolist()), pull.data)
            self._started.append((pull, transfer))
        self._coming.popleft()

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

    def progress(self) -> None:
        """Let the engine go on, if it has no thread that does."""

    def stop(self) -> None:
        """End the engine: nothing of it writes to this side's memory any more."""
        raise NotImplementedError
