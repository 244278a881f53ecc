"""`Transport`: messages between two processes, in order, over an engine that others wrote.

`TorchTransport` is torch.distributed with gloo or NCCL. `dsv4.distributed.pull` has the others.
"""

import threading
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dsv4.errors import PeerLostError

MEMORY_BYTES = 128 << 20
DEADLINE_SECONDS = 30.0
NO_LIMIT = timedelta(days=36500)  # deadlines are the caller's; in ns it fits 63 bits
AT_ONCE = timedelta(milliseconds=1)
CLOSING = 1 << 20  # a tag that no message has


class Pending(Protocol):
    """A message on its way."""

    def wait(self, seconds: float) -> bool:
        """Wait so long at most; return whether it has arrived.

        Raises:
            PeerLostError: It never will.
        """


class Transport(Protocol):
    """Sends and receives messages, each in the order of the calls.

    Attributes:
        memory: `[num_bytes]` uint8. Messages are views of it, which do not change on their way.
        takes_any: Messages may be views of any memory.
    """

    memory: Tensor
    takes_any: bool

    def add_memory(self, memory: Tensor) -> None:
        """Let messages be views of more memory; again does nothing more."""

    def send(self, data: Tensor) -> Pending:
        """Start to send a message."""

    def receive(self, data: Tensor) -> Pending:
        """Start to receive a message of this length."""

    def close(self) -> None:
        """End the connection; no message is written to this side's memory after it."""


class _Waiter:
    """A thread that waits for works in their order: gloo has no other way to learn of their end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._works: SimpleQueue[tuple[Any, Future[None]] | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, work: Any) -> "FuturePending":
        over: Future[None] = Future()
        self._works.put((work, over))
        return FuturePending(over)

    def close(self) -> None:
        self._works.put(None)

    def _run(self) -> None:
        while (started := self._works.get()) is not None:
            work, over = started
            try:
                work.wait(NO_LIMIT)
                if self._device.type == "cuda":  # NCCL's works wait on the device alone
                    torch.cuda.current_stream(self._device).synchronize()
            except Exception as error:
                over.set_exception(error)
            else:
                over.set_result(None)


class FuturePending(NamedTuple):
    over: Future[None]

    def wait(self, seconds: float) -> bool:
        if not self.over.done() and not wait([self.over], seconds).done:
            return False
        if (error := self.over.exception()) is not None:
            raise PeerLostError(f"The peer is lost: {error}") from error
        return True


def wait_for_key(store: Any, key: str, deadline: float) -> bytes:
    """Return what the peer puts into a store.

    Raises:
        PeerLostError: It has not done so before the deadline.
    """
    try:
        store.wait([key], timedelta(seconds=deadline))
        found: bytes = store.get(key)
    except RuntimeError as error:
        raise PeerLostError(f"The peer has not come for {deadline} s: {error}") from error
    return found


class TorchTransport:
    """Messages over a process group of torch.distributed.

    Args:
        group: A gloo or NCCL backend in which nobody else sends to the peer.
        peer: The other rank.
        memory_bytes: Bytes of `memory`; a few pieces of data share it.
        device: The device of `memory`: the CPU for gloo, a GPU for NCCL.
    """

    takes_any = True

    def __init__(
        self,
        group: Any,
        peer: int,
        *,
        memory_bytes: int = MEMORY_BYTES,
        device: torch.device | str = "cpu",
    ) -> None:
        is_pinned = torch.device(device).type == "cpu" and torch.cuda.is_available()
        self.memory = torch.empty(
            memory_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned
        )
        self._group, self._peer = group, peer
        self._sends, self._receives = (_Waiter(self.memory.device) for _ in range(2))

    @classmethod
    def connect(
        cls,
        store: Any,
        rank: int,
        *,
        host: str = "127.0.0.1",
        deadline: float = DEADLINE_SECONDS,
        **sizes: Any,
    ) -> "TorchTransport":
        """Connect ranks 0 and 1 over gloo; they meet at a store of torch.distributed.

        Args:
            host: This rank's address, on the network that the peer can reach.
            deadline: Seconds after which a peer that has not come is lost.

        Raises:
            PeerLostError: It has not come.
        """
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=deadline)
        try:
            group = dist.ProcessGroupGloo(store, rank, 2, options)
        except RuntimeError as error:
            raise PeerLostError(f"The peer has not come for {deadline} s: {error}") from error
        return cls(group, 1 - rank, **sizes)

    def add_memory(self, memory: Tensor) -> None:
        pass

    def send(self, data: Tensor, *, tag: int = 0) -> Pending:
        return self._sends.add(self._start(self._group.send, data, tag))

    def receive(self, data: Tensor, *, tag: int = 0) -> Pending:
        return self._receives.add(self._start(self._group.recv, data, tag))

    def _start(self, call: Any, data: Tensor, tag: int) -> Any:
        try:
            return call([data], self._peer, tag)
        except RuntimeError as error:
            raise PeerLostError(f"The peer is lost: {error}") from error

    def close(self) -> None:
        """End the connection. A wait that is too long is the one thing after which gloo does so."""
        if self.memory.is_cuda:
            self._group.abort()
        else:
            with suppress(RuntimeError):
                self._group.recv([self.memory[:1]], self._peer, CLOSING).wait(AT_ONCE)
        self._receives.close()
        self._sends.close()
