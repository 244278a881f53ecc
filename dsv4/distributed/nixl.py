"""`NixlTransport`: messages over NIXL, which writes to the receiver's memory.

The receiver tells where it wants a message; the sender then writes it there, with a note that it
is done. Notes are numbered, so both directions keep their order.
"""

import time
import uuid
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from dsv4.distributed.transport import MEMORY_BYTES, Pending
from dsv4.errors import PeerLostError

POLL_SECONDS = 50e-6


class NixlTransport:
    """Messages over two NIXL agents.

    Args:
        store: A store of torch.distributed, where ranks 0 and 1 meet.
        rank: This process's rank.
        memory_bytes: Bytes of `memory`; a few pieces of data share it.
        device: The device of `memory`, the CPU or a GPU.
        backends: NIXL's backends.
    """

    takes_any = False  # the peer writes, and may learn late that it should not

    def __init__(
        self,
        store: Any,
        rank: int,
        *,
        memory_bytes: int = MEMORY_BYTES,
        device: torch.device | str = "cpu",
        backends: tuple[str, ...] = ("UCX",),
    ) -> None:
        try:
            from nixl_cu13._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ImportError("NixlTransport needs nixl: pip install 'dsv4[nixl]'") from error
        self.memory = torch.empty(memory_bytes, dtype=torch.uint8, device=device)
        self._agent = nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=list(backends)))
        self._registered: dict[int, Any] = {}
        self.add_memory(self.memory)
        store.set(f"nixl/{rank}", self._agent.get_agent_metadata())
        peer = self._agent.add_remote_agent(store.get(f"nixl/{1 - rank}"))
        self._peer: str = peer.decode() if isinstance(peer, bytes) else peer
        self._num_sent = self._num_received = 0
        self._wanted: dict[int, bytes] = {}  # where the peer wants its next messages
        self._arrived: set[int] = set()
        self._sending: list[_Send] = []  # NIXL sends the note of one that is asked for

    def add_memory(self, memory: Tensor) -> None:
        if memory.numel() and memory.data_ptr() not in self._registered:
            known = self._call(self._agent.register_memory, [memory])
            self._registered[memory.data_ptr()] = known

    def send(self, data: Tensor) -> Pending:
        self._num_sent += 1
        message = _Send(self, self._num_sent, data)
        self._sending.append(message)
        self.read_notes()
        return message

    def receive(self, data: Tensor) -> Pending:
        self._num_received += 1
        place = self._agent.get_serialized_descs(self._agent.get_xfer_descs([data]))
        self._call(self._agent.send_notif, self._peer, b"want %d " % self._num_received + place)
        return _Receive(self, self._num_received)

    def read_notes(self) -> None:
        """Take the notes that have come, and go on with all that is sent."""
        notes: dict[str, list[bytes]] = self._call(self._agent.get_new_notifs)
        for note in notes.get(self._peer, ()):
            kind, number, place = (*note.split(b" ", 2), b"")[:3]
            if kind == b"want":
                self._wanted[int(number)] = place
            else:
                self._arrived.add(int(number))
        self._sending = [message for message in self._sending if not message.go_on()]

    def take_arrived(self, number: int) -> bool:
        """Whether a message has come; asked once more, it has not."""
        self.read_notes()
        is_here = number in self._arrived
        self._arrived.discard(number)
        return is_here

    def start_write(self, number: int, data: Tensor) -> Any:
        """Start to write a message once the peer wants it; return the transfer, or None."""
        place = self._wanted.pop(number, None)
        if place is None:
            return None
        there = self._agent.deserialize_descs(place)
        here = self._agent.get_xfer_descs([data])
        transfer = self._call(
            self._agent.initialize_xfer, "WRITE", here, there, self._peer, b"done %d" % number
        )
        if self._call(self._agent.transfer, transfer) == "ERR":
            raise PeerLostError("The peer is lost: NIXL could not start a transfer")
        return transfer

    def is_written(self, transfer: Any) -> bool:
        state = self._call(self._agent.check_xfer_state, transfer)
        if state == "ERR":
            raise PeerLostError("The peer is lost: a transfer of NIXL failed")
        if state == "DONE":
            self._agent.release_xfer_handle(transfer)
        return bool(state == "DONE")

    def close(self) -> None:
        with suppress(Exception):  # the peer may be dead
            self._agent.remove_remote_agent(self._peer)
            for known in self._registered.values():
                self._agent.deregister_memory(known)

    def _call(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            raise PeerLostError(f"The peer is lost: {error}") from error


class _Message:
    """Polls until a message is over; NIXL's own thread moves it."""

    def __init__(self, transport: NixlTransport, number: int) -> None:
        self._transport, self._number, self._is_over = transport, number, False

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._is_over:
            self._is_over = self._advance()
            if self._is_over or time.monotonic() >= end:
                break
            time.sleep(POLL_SECONDS)
        return self._is_over

    def _advance(self) -> bool:
        raise NotImplementedError


class _Receive(_Message):
    def _advance(self) -> bool:
        return self._transport.take_arrived(self._number)


class _Send(_Message):
    def __init__(self, transport: NixlTransport, number: int, data: Tensor) -> None:
        super().__init__(transport, number)
        self._data, self._transfer = data, None
        self._is_written = False

    def go_on(self) -> bool:
        """Start to write once the peer wants it; return whether all is written."""
        if self._transfer is None:
            self._transfer = self._transport.start_write(self._number, self._data)
        else:
            self._is_written = self._transport.is_written(self._transfer)
        return self._is_written

    def _advance(self) -> bool:
        self._transport.read_notes()
        return self._is_written
