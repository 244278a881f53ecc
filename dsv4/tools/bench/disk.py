"""`dsv4 bench disk`: reads of a prefix store beside those of `dd iflag=direct`, in turn."""

import os
import secrets
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.prefix.store import BoundStore, PrefixStore
from dsv4.config import CacheConfig
from dsv4.tools.bench.timing import time_call
from dsv4.tools.bench.trace import block_sizes

TARGET = 0.7  # of what dd reads


def bench_disk(*, folder: Path, num_records: int, num_rounds: int) -> dict[str, Any]:
    """Read blocks of V4-Flash from two stores below a folder, and a file of as many bytes.

    All are read past the page cache, one after the other in every round. The CPU's seconds are
    those of this process, which dd's are not.
    """
    num_bytes, _ = block_sizes(CacheConfig.v4_flash())
    records = torch.randint(256, (num_records, num_bytes), dtype=torch.uint8)
    into = torch.zeros_like(records)
    with ExitStack() as stack:
        path = stack.enter_context(TemporaryDirectory(dir=folder))
        records.numpy().tofile(f"{path}/file")
        reads: dict[str, Callable[[], object]] = {"dd": partial(_run_dd, f"{path}/file")}
        for name, key in ("xxh3-128", None), ("HMAC-SHA-256", secrets.token_bytes(32)):
            store = PrefixStore(
                f"{path}/{name}", 2 * records.nbytes, queue_bytes=records.nbytes, key=key
            )
            bound = stack.enter_context(store).bind("")
            for i, record in enumerate(records):
                bound.put("block", _hash(i), record, copy=False)
            store.flush()
            reads[name] = partial(_read, bound, into)
            reads[name]()
            if not into.equal(records):
                raise RuntimeError("The store has other bytes than were put")
            into.zero_()
        os.sync()
        speeds: dict[str, list[float]] = {name: [] for name in reads}
        busy = dict.fromkeys(reads, 0.0)
        for _ in range(num_rounds):
            for name, read in reads.items():
                before = time.process_time()
                speeds[name].append(records.nbytes / time_call(read)[1] / 1e3)
                busy[name] += time.process_time() - before
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    num_gb = num_rounds * records.nbytes / 1e9
    rows = [
        {"name": name, "gb_per_s": values, "median": medians[name],
         "ratio": medians[name] / medians["dd"], "cpu_s_per_gb": busy[name] / num_gb}
        for name, values in speeds.items()
    ]  # fmt: skip
    sizes = {"num_records": num_records, "record_bytes": num_bytes, "num_rounds": num_rounds}
    return {**sizes, "rows": rows, "target": TARGET}


def _hash(number: int) -> bytes:
    return number.to_bytes(32, "little")


def _run_dd(path: str) -> None:
    command = ["dd", f"if={path}", f"of={os.devnull}", "bs=1M", "iflag=direct", "status=none"]
    subprocess.run(command, check=True)


def _read(store: BoundStore, into: Tensor) -> None:
    if not all(store.read("block", list(map(_hash, range(len(into)))), into).found):
        raise RuntimeError("The store has lost a record")
