"""A second process for the tests of hand-over: it sends or receives, and may be killed."""

import contextlib
import functools
import hashlib
import importlib
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dsv4 import CacheConfig, KVCacheManager
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.distributed.handover import Handover, Inbox, Receiver
from dsv4.distributed.mooncake import MooncakeTransport
from dsv4.distributed.nixl import NixlTransport
from dsv4.distributed.transport import TorchTransport
from dsv4.errors import PeerLostError
from dsv4.model.attention import forward_layer
from dsv4.testing import Row, model_projections, model_weights, move_to, run_forward, take_rows
from tests.cache.live import live_bytes
from tests.v41 import tiny_v41

CONFIG = CacheConfig.tiny(
    compress_ratios=(0, 4, 128), num_query_heads=1, head_dim=80, rope_dim=16, index_num_heads=16,
    index_head_dim=32, block_tokens=128, drafts_per_step=3, max_position=1 << 17,
)  # fmt: skip
LATENT = tiny_v41(
    num_query_heads=1, head_dim=64, rope_dim=16, index_head_dim=32, block_tokens=64,
    drafts_per_step=3, candidate_block_size=4,
)  # fmt: skip
MAX_TOKENS = 900
INPUTS = {
    each.compress_ratios: (
        model_weights(each, seed=0), model_projections(each, MAX_TOKENS, seed=10)
    )
    for each in (CONFIG, LATENT)
}  # fmt: skip
LENGTH = 650
IDS = np.arange(700)
LONG = 100_000
LONG_MEMORY = 1 << 20
LONG_SIZES = {"num_blocks": 790, "max_forward_tokens": 4096}
MEMORY_BYTES = 32 << 10  # pieces of one block, so that there are many
MANY = 1 << 30  # messages, of which none is the last
DEADLINE = 60.0  # two slow cores must be in time

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__])


def start_method(options):
    """How processes start; one that was forked may not have the GPU."""
    on_gpu = options.get("device") == "cuda"
    return multiprocessing.get_context("spawn") if on_gpu else context


def share_kernels():
    """Let a process find the kernels that others have compiled."""
    from tests import kernel_keys

    kernel_keys.install()


PACKAGES = {
    "nixl": ("nixl_cu13._api", "nixl-cu13"),
    "mooncake": ("mooncake.engine", "mooncake-transfer-engine-non-cuda"),
}


def loads(module):
    """Whether a module and the libraries that it needs are installed."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


MISSING = {kind: name for kind, (module, name) in PACKAGES.items() if not loads(module)}
HAS_CHECKS = loads("xxhash")
ENGINES = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(kind in MISSING, reason=f"{MISSING.get(kind)} is not installed"),
    )
    for kind in PACKAGES
]
KINDS = ["gloo", *ENGINES]


def connect(kind, folder, rank, memory_bytes=MEMORY_BYTES, deadline=DEADLINE, **options):
    """Connect to the other rank; the folder is where they meet."""
    store = dist.FileStore(str(folder / "store"), 2)
    classes = {
        "gloo": TorchTransport.connect, "nixl": NixlTransport, "mooncake": MooncakeTransport,
    }  # fmt: skip
    return classes[kind](store, rank, memory_bytes=memory_bytes, deadline=deadline, **options)


def memory_of(kind, device):
    """Where a transport of a manager on this device has its memory; gloo's is on the CPU."""
    return {"device": device} if kind == "nixl" else {}


def new_manager(config=CONFIG, **sizes):
    defaults = {
        "max_requests": 3, "num_blocks": 1536 // config.block_tokens, "max_forward_tokens": 512,
        "num_checkpoints": 2, "host_blocks": 4,
    }  # fmt: skip
    return KVCacheManager(config, **{**defaults, **sizes})


@functools.cache
def inputs_on(device, ratios=CONFIG.compress_ratios):
    """Weights and projections of all layers on a device."""
    return tuple([move_to(device, layer) for layer in layers] for layers in INPUTS[ratios])


def feed(manager, slot, after):
    """Run a request to a length; return each layer's output."""
    weights, tokens = inputs_on(str(manager.device), manager.config.compress_ratios)
    rows = [Row(slot, tokens, int(manager.lengths[slot]), after)]
    return [result.output for result in run_forward(manager, weights, rows)]


def write_long(manager):
    """A request of 100,000 tokens, whose layers are written and not attended."""
    slot = manager.resume_request(IDS, salt=b"mine").slot
    while (before := int(manager.lengths[slot])) < LONG:
        for handle, inputs, weights in _long_layers(manager, slot, min(LONG, before + 4096)):
            handle.write(inputs, weights)
    return slot


def feed_long(manager, slot, count):
    """Decode so many tokens of a long request; return each layer's output."""
    outputs = []
    for after in range(LONG + 1, LONG + count + 1):
        chosen = {}
        for handle, inputs, weights in _long_layers(manager, slot, after):
            outputs.append(forward_layer(handle, inputs, weights, chosen).output)
    return outputs


def _long_layers(manager, slot, after):
    """Each layer of a forward with its inputs; the inputs repeat, out of step with blocks."""
    before, (weights, tokens) = int(manager.lengths[slot]), inputs_on(str(manager.device))
    rows = torch.arange(before, after, device=manager.device) % 887
    plan = prepare_forward(manager, [slot], [before], [after])
    for idx, layer in enumerate(weights):
        yield manager.acquire(idx, plan), take_rows(tokens[idx], rows), layer


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
        self._transport, self.left, self.memory = transport, number, transport.memory
        self.takes_any, self.add_memory = transport.takes_any, transport.add_memory

    def _count(self):
        self.left -= 1
        if self.left < 0:
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


def send(kind, folder, told, killed_at=None, request_id="one", config=CONFIG):
    """Hand a request over while it is prefilled."""
    manager = new_manager(config)
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


WIDE = CacheConfig.v4_flash(compress_ratios=(0, 4, 128, 4, 128, 4))
WIDE_TOKENS, WIDE_MEMORY = 96 * 256 + 40, 96 << 20


def wide_manager():
    return KVCacheManager(WIDE, max_requests=1, num_blocks=97, max_forward_tokens=2048)


def wide_request(manager):
    """A request of 50 MB, whose rows are random; its blocks are two pieces in place."""
    slot = manager.open_request()
    for before in range(0, WIDE_TOKENS, 2048):
        manager.prepare_forward([slot], [before], [min(WIDE_TOKENS, before + 2048)]).complete()
    for storage in (manager.paged.storage, manager.state.storage):
        rows = np.frombuffer(np.random.default_rng(5).bytes(storage.numel()), dtype=np.uint8)
        storage.view(-1).copy_(torch.tensor(rows))
    return slot


def send_wide(folder, told):
    """Send a request of large pieces, and stay."""
    manager = wide_manager()
    slot, transport = wide_request(manager), connect("gloo", folder, 0, WIDE_MEMORY)
    handover = Handover(manager, slot, transport, "one", num_tokens=WIDE_TOKENS, deadline=DEADLINE)
    handover.finish()
    handover.wait()
    told.recv()


def send_late(folder, seconds, told):
    """Send one message a while after it is told to, and stay."""
    told.send("up")
    transport = connect("gloo", folder, 0)
    told.recv()
    time.sleep(seconds)
    transport.send(transport.memory)
    told.recv()


def receive_wide(folder, told):
    """Receive a request of large pieces, and stay."""
    manager = wide_manager()
    receiver = Receiver(Inbox(manager), connect("gloo", folder, 1, WIDE_MEMORY), deadline=DEADLINE)
    arrived = []
    while not (arrived or manager._requests.incoming):
        arrived = receiver.poll(0.001)
    told.send("begun")
    if not arrived:
        receiver.wait()
    told.recv()


def send_one(kind, folder, num_bytes, told):
    """Send one message, and stay."""
    transport = connect(kind, folder, 0, memory_bytes=num_bytes)
    transport.memory.fill_(1)
    transport.send(transport.memory)
    told.recv()


def receive_long(kind, folder, told, device="cpu"):
    """Receive a long request to blocks that lie in many places; tell its life."""
    torch.set_num_threads(1)
    if device == "cuda":
        share_kernels()
    manager = new_manager(**LONG_SIZES, device=device)
    others = [manager.open_request() for _ in range(2)]
    for tokens in range(128, 128 * 60, 128):
        for slot in others:
            manager.prepare_forward([slot], [tokens - 128], [tokens]).complete()
    for slot in others:
        manager.free_request(slot)
    transport = connect(kind, folder, 1, memory_bytes=LONG_MEMORY, **memory_of(kind, device))
    receiver = Receiver(Inbox(manager), transport, deadline=DEADLINE)
    ((_, slot),) = receiver.wait()
    told.send(life_of_long(manager, slot))
    told.recv()


def life_of_long(manager, slot):
    """Digests of a long request's bytes, of the outputs of 200 steps, and of the bytes then."""
    before = digest(live_bytes(manager, slot))
    outputs = feed_long(manager, slot, 200)
    assert len(outputs) == 200 * CONFIG.num_layers
    return before, digest(outputs), digest(live_bytes(manager, slot))


def digest(parts):
    """A hash of the bytes of some tensors."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return whole.hexdigest()


@contextlib.contextmanager
def other_process(target, *args, **options):
    """Run a function in another process; give the pipe to it, and the process."""
    start = start_method(options)
    mine, theirs = start.Pipe()
    process = start.Process(target=target, args=(*args, theirs), kwargs=options, daemon=True)
    process.start()
    theirs.close()
    try:
        yield mine, process
    finally:
        process.kill()
        process.join()
