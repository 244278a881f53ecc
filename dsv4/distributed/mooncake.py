"""`MooncakeTransport`: messages over Mooncake's transfer engine."""

from typing import Any

from torch import Tensor

from dsv4.distributed.pull import Place, PullTransport
from dsv4.distributed.transport import wait_for_key


class MooncakeTransport(PullTransport):
    """Messages over two engines, each message one transfer.

    Args:
        store, rank, host: As of `PullTransport`.
        protocol, devices: Mooncake's protocol, and the names of its devices.
        sizes: Further arguments of `PullTransport`.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        *,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        devices: str = "",
        **sizes: Any,
    ) -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise ImportError(
                "MooncakeTransport needs Mooncake's engine and the libraries that it loads: "
                f"pip install 'dsv4[mooncake]' ({error})"
            ) from error
        self._engine = TransferEngine()
        _check(self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices), "start")
        store.set(f"mooncake/{rank}", f"{host}:{self._engine.get_rpc_port()}")
        super().__init__(store, rank, host=host, **sizes)
        self._peer = wait_for_key(store, f"mooncake/{1 - rank}", self._deadline).decode()

    def register(self, memory: Tensor) -> None:
        _check(self._engine.register_memory(memory.data_ptr(), memory.nbytes), "register memory")

    def start_read(self, place: Place, data: Tensor) -> Any:
        transfer = self._engine.batch_transfer_async_read(
            self._peer, [data.data_ptr()], [place.address], [data.nbytes]
        )
        _check(not transfer, "start a transfer")
        return transfer

    def is_read(self, transfer: Any) -> bool:
        state = self._engine.transfer_check_status(transfer)
        _check(state < 0, "read a message")
        return bool(state)

    def stop(self) -> None:
        del self._engine


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"Mooncake's engine could not {what}")
