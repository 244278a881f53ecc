"""`dsv4 bench handover`: a request between two processes, beside a plain copy of its bytes."""

import hashlib
import importlib
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.config import CacheConfig
from dsv4.distributed.handover import Handover, Inbox, Receiver
from dsv4.distributed.mooncake import MooncakeTransport
from dsv4.distributed.nixl import NixlTransport
from dsv4.distributed.transport import MEMORY_BYTES, TorchTransport, Transport
from dsv4.tools.bench.requests import manager_for, open_requests
from dsv4.tools.bench.timing import time_call

ENGINES = {"nixl": "nixl_cu13", "mooncake": "mooncake.engine"}
TARGET = 0.7  # of a plain copy
CONNECT_SECONDS = 120.0  # another process starts meanwhile
NAMES = {"plain": "one message", "handover": "hand-over", "unchecked": "hand-over without xxh3"}


def bench_handover(*, num_tokens: int, num_rounds: int) -> dict[str, Any]:
    """Hand a request of V4-Flash over to a process on this machine, over each transport.

    A plain copy sends as many bytes as one message from memory that is sent in place. Both end
    with an answer of the receiver. They are run in turn.
    """
    rows = [row for kind in _kinds() for row in _bench_kind(kind, num_tokens, num_rounds)]
    errors = [f"{row['name']} over {row['transport']} changed bytes" for row in rows
              if not row.pop("is_equal")]  # fmt: skip
    sizes = {"num_tokens": num_tokens, "num_rounds": num_rounds, "num_bytes": rows[0]["num_bytes"]}
    return {**sizes, "rows": rows, "target": TARGET, "errors": errors}


def _kinds() -> list[str]:
    """List gloo, and the engines that are installed."""
    kinds = ["gloo"]
    for kind, module in ENGINES.items():
        with suppress(ImportError):
            importlib.import_module(module)
            kinds.append(kind)
    return kinds


def _bench_kind(kind: str, num_tokens: int, num_rounds: int) -> list[dict[str, Any]]:
    manager = _manager(num_tokens, max_requests=2)
    (slot,) = open_requests(manager, [num_tokens])
    manager.paged.storage.random_()
    manager.state.storage.random_()
    saved = manager.export_request(slot)
    parts = (saved.blocks.reshape(-1), saved.slot)
    num_bytes, digest = saved.blocks.nbytes + saved.slot.nbytes, _digest(*parts)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(
            target=_serve, args=(kind, folder, num_tokens, num_bytes, theirs), daemon=True
        )
        process.start()
        plain = _connect(kind, folder, "plain", 0, num_bytes)
        torch.cat(parts, out=plain.memory)
        transport = _connect(kind, folder, "handover", 0)
        for number in range(-1, num_rounds):  # the first does not count
            for name in NAMES:
                mine.send(name)
                if name == "plain":
                    elapsed = time_call(lambda: _copy(plain, is_sender=True))[1]
                else:
                    request = manager.fork(slot)
                    handover = Handover(
                        manager, request, transport, f"{name} {number}", num_tokens=num_tokens,
                        has_checks=name == "handover",
                    )  # fmt: skip
                    elapsed = time_call(lambda each=handover: _hand_over(each))[1]  # type: ignore[misc]
                if number >= 0:
                    seconds[name].append(elapsed / 1e6)
                if mine.recv() != digest:
                    seconds[name].append(float("nan"))
        mine.send(None)
        process.join()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return [
        {"transport": kind, "name": NAMES[name], "num_bytes": num_bytes, "seconds": values,
         "gb_per_s": num_bytes / medians[name] / 1e9, "ratio": medians["plain"] / medians[name],
         "is_equal": not np.isnan(values).any()}
        for name, values in seconds.items()
    ]  # fmt: skip


def _hand_over(handover: Handover) -> None:
    handover.finish()
    handover.wait()


def _serve(kind: str, folder: str, num_tokens: int, num_bytes: int, told: Any) -> None:
    """Receive what the other process says that it sends; tell the digest of its bytes."""
    manager = _manager(num_tokens, max_requests=1)
    plain = _connect(kind, folder, "plain", 1, num_bytes)
    receiver = Receiver(Inbox(manager), _connect(kind, folder, "handover", 1))
    while (name := told.recv()) is not None:
        if name == "plain":
            _copy(plain, is_sender=False)
            told.send(_digest(plain.memory))
        else:
            (arrived,) = receiver.wait()
            saved = manager.export_request(arrived.slot)
            manager.free_request(arrived.slot)
            told.send(_digest(saved.blocks.reshape(-1), saved.slot))


def _copy(transport: Transport, *, is_sender: bool) -> None:
    """Move the whole memory, and a byte back."""
    first, second = transport.send, transport.receive
    if not is_sender:
        first, second = second, first
    for start, data in ((first, transport.memory), (second, transport.memory[:1])):
        pending = start(data)
        while not pending.wait(1.0):
            pass


def _connect(
    kind: str, folder: str, name: str, rank: int, memory_bytes: int = MEMORY_BYTES
) -> Transport:
    store = dist.FileStore(str(Path(folder) / name), 2)  # type: ignore[attr-defined]
    connects: dict[str, Callable[..., Transport]] = {
        "gloo": TorchTransport.connect, "nixl": NixlTransport, "mooncake": MooncakeTransport,
    }  # fmt: skip
    return connects[kind](store, rank, memory_bytes=memory_bytes, deadline=CONNECT_SECONDS)


def _manager(num_tokens: int, *, max_requests: int) -> KVCacheManager:
    config = CacheConfig.v4_flash()
    num_blocks = num_tokens // config.block_tokens + 1 + max_requests
    return manager_for(
        config, max_requests, num_tokens, device="cpu", chunk=256, num_blocks=num_blocks
    )


def _digest(*parts: Tensor) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.numpy().data)
    return digest.hexdigest()
