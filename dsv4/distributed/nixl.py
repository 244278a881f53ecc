"""`NixlTransport`: messages over NIXL."""

import uuid
from typing import Any

from torch import Tensor

from dsv4.distributed.pull import Place, PullTransport
from dsv4.distributed.transport import wait_for_key


class NixlTransport(PullTransport):
    """Messages over two NIXL agents.

    Args:
        store, rank: As of `PullTransport`.
        backends: NIXL's backends.
        sizes: Further arguments of `PullTransport`.
    """

    def __init__(
        self, store: Any, rank: int, *, backends: tuple[str, ...] = ("UCX",), **sizes: Any
    ) -> None:
        try:
            from nixl_cu13._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ImportError("NixlTransport needs nixl: pip install 'dsv4[nixl]'") from error
        # Its own thread would keep a core busy as long as the agent lives.
        choices = nixl_agent_config(enable_prog_thread=False, backends=list(backends))
        self._agent = nixl_agent(uuid.uuid4().hex, choices)
        self._store, self._rank, self._known, self._peer = store, rank, 0, ""
        super().__init__(store, rank, **sizes)

    def register(self, memory: Tensor) -> Any:
        known = self._agent.register_memory([memory])
        version = len(self._registered) + 1
        self._store.set(f"nixl/{self._rank}/{version}", self._agent.get_agent_metadata())
        return known

    def start_read(self, place: Place, data: Tensor) -> Any:
        if place.version != self._known:
            key = f"nixl/{1 - self._rank}/{place.version}"
            peer = self._agent.add_remote_agent(wait_for_key(self._store, key, self._deadline))
            self._peer = peer.decode() if isinstance(peer, bytes) else peer
            self._known = place.version
        kind = "DRAM" if place.device < 0 else "VRAM"
        there = [(place.address, len(data), max(0, place.device))]
        transfer = self._agent.initialize_xfer(
            "READ", self._agent.get_xfer_descs([data]),
            self._agent.get_xfer_descs(there, kind), self._peer,
        )  # fmt: skip
        if self._agent.transfer(transfer) == "ERR":
            raise RuntimeError("NIXL could not start a transfer")
        return transfer

    def is_read(self, transfer: Any) -> bool:
        state = self._agent.check_xfer_state(transfer)
        if state == "ERR":
            raise RuntimeError("a transfer of NIXL failed")
        if state == "DONE":
            self._agent.release_xfer_handle(transfer)
        return bool(state == "DONE")

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def stop(self) -> None:
        self._registered.clear()
        del self._agent
