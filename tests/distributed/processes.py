"""A second process for the tests of hand-over: it sends or receives, and may be killed."""

import contextlib
import importlib.util
import multiprocessing
import os
import signal

import numpy as np
import torch
import torch.distributed as dist

from dsv4 import CacheConfig, KVCacheManager
from dsv4.distributed.handover import Handover, Inbox, Receiver
from dsv4.distributed.nixl import NixlTransport
from dsv4.distributed.transport import TorchTransport
from dsv4.errors import PeerLostError
from dsv4.testing import Row, model_projections, model_weights, run_forward
from tests.cache.live import live_bytes

CONFIG = CacheConfig.tiny(
    compress_ratios=(0, 4, 128), num_query_heads=1, head_dim=80, rope_dim=16, index_num_heads=16,
    index_head_dim=32, block_tokens=128, drafts_per_step=3,
)  # fmt: skip
WEIGHTS = model_weights(CONFIG, seed=0)
MAX_TOKENS = 900
TOKENS = model_projections(CONFIG, MAX_TOKENS, seed=10)
LENGTH = 650
IDS = np.arange(700)
MEMORY_BYTES = 32 << 10  # pieces of one block, so that there are many
DEADLINE = 60.0  # two slow cores must be in time

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__])

TRANSPORTS = ["gloo"] + ["nixl"] * (importlib.util.find_spec("nixl_cu13") is not None)


def connect(kind, folder, rank, memory_bytes=MEMORY_BYTES):
    """Connect to the other rank; the folder is where they meet."""
    store = dist.FileStore(str(folder / "store"), 2)
    if kind == "nixl":
        return NixlTransport(store, rank, memory_bytes=memory_bytes)
    return TorchTransport.connect(store, rank, memory_bytes=memory_bytes)


def new_manager(**sizes):
    defaults = {
        "max_requests": 3, "num_blocks": 12, "max_forward_tokens": 512, "num_checkpoints": 2,
        "host_blocks": 4,
    }  # fmt: skip
    return KVCacheManager(CONFIG, **{**defaults, **sizes})


def feed(manager, slot, after):
    """Run a request to a length; return each layer's output."""
    before = int(manager.lengths[slot])
    return [
        result.output
        for result in run_forward(manager, WEIGHTS, [Row(slot, TOKENS, before, after)])
    ]


def grown(manager, length=LENGTH, on_chunk=lambda slot: None):
    """A request of some length, in chunks of 150 tokens."""
    slot = manager.resume_request(IDS, salt=b"mine").slot
    while manager.lengths[slot] < length:
        feed(manager, slot, min(length, int(manager.lengths[slot]) + 150))
        on_chunk(slot)
    return slot


def expected_bytes(length=LENGTH):
    """All that a request of this length can read."""
    manager = new_manager()
    return live_bytes(manager, grown(manager, length))


class KilledAt:
    """A transport whose process is killed at one of its messages, before or after it."""

    def __init__(self, transport, number):
        self._transport, self._left, self.memory = transport, number, transport.memory
        self.takes_any, self.add_memory = transport.takes_any, transport.add_memory

    def _count(self):
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def send(self, data):
        self._count()
        pending = self._transport.send(data)
        self._count()
        return pending

    def receive(self, data):
        self._count()
        return self._transport.receive(data)

    def close(self):
        self._transport.close()


def _set_up(kind, folder, rank, killed_at):
    torch.set_num_threads(1)
    transport = connect(kind, folder, rank)
    return transport if killed_at is None else KilledAt(transport, killed_at)


def send(kind, folder, told, killed_at=None, request_id="one"):
    """Hand a request over while it is prefilled."""
    manager = new_manager()
    transport = _set_up(kind, folder, 0, killed_at)
    handovers = []

    def on_chunk(slot):
        if not handovers:
            handovers.append(
                Handover(manager, slot, transport, request_id, num_tokens=LENGTH, deadline=DEADLINE)
            )
        handovers[0].poll()

    grown(manager, on_chunk=on_chunk)
    handovers[0].finish()
    handovers[0].wait()
    told.send(manager.open_slots)
    told.recv()


def send_saved(kind, folder, told, killed_at, saved):
    """Hand over a request that is given as tensors."""
    manager = new_manager()
    slot = manager.import_request(saved)
    transport = _set_up(kind, folder, 0, killed_at)
    handover = Handover(manager, slot, transport, "one", num_tokens=LENGTH, deadline=DEADLINE)
    handover.finish()
    handover.wait()
    told.recv()


def receive(kind, folder, told, killed_at=None, sizes=None):
    """Receive requests until the connection ends; tell of each, then run it 200 tokens on."""
    manager = new_manager(**(sizes or {}))
    receiver = Receiver(Inbox(manager), _set_up(kind, folder, 1, killed_at), deadline=DEADLINE)
    with contextlib.suppress(PeerLostError, EOFError):
        while True:
            (arrived,) = receiver.wait()
            held = [part.clone() for part in live_bytes(manager, arrived.slot)]
            outputs = [feed(manager, arrived.slot, LENGTH + n) for n in (1, 4, 200)]
            manager.free_request(arrived.slot)
            told.send((arrived, held, outputs))
            told.recv()
            receiver.poll()


@contextlib.contextmanager
def other_process(target, *args, **options):
    """Run a function in another process; give the pipe to it, and the process."""
    mine, theirs = context.Pipe()
    process = context.Process(target=target, args=(*args, theirs), kwargs=options, daemon=True)
    process.start()
    theirs.close()
    try:
        yield mine, process
    finally:
        process.kill()
        process.join()
