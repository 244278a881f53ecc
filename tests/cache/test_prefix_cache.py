"""Prefix reuse: a hit is the bytes of a cold run, whatever the chunks, backend and policy."""

import hashlib

import numpy as np
import pytest
import torch

from dsv4 import CacheConfig, CheckpointPolicy, KVCacheManager, prepare_forward
from dsv4.cache.prefix.prefix_tree import hash_blocks, root_digest
from dsv4.errors import NoFreeSlotError, OutOfBlocksError
from dsv4.testing import (
    Row,
    model_projections,
    model_weights,
    move_to,
    poison,
    run_forward,
    take_rows,
)
from tests.cache.live import assert_same, live_bytes
from tests.marks import needs_interpreter

BLOCK = 128
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
BASE = {"block_tokens": BLOCK, "num_query_heads": 1, "head_dim": 80, "rope_dim": 16,
        "index_head_dim": 32}  # fmt: skip
PLAIN = CacheConfig.tiny(**BASE)
VERIFY = CacheConfig.tiny(**BASE, drafts_per_step=3)
MAX_TOKENS = 700
IDS = np.arange(MAX_TOKENS) * 7 % 1000
WEIGHTS = model_weights(PLAIN, seed=0)
TOKENS = model_projections(PLAIN, MAX_TOKENS, seed=10)


def make_manager(config=PLAIN, *, device="cpu", **sizes):
    defaults = {"max_requests": 3, "num_blocks": 16, "max_forward_tokens": 768,
                "max_request_tokens": MAX_TOKENS, "num_checkpoints": 4}  # fmt: skip
    manager = KVCacheManager(config, device=device, **{**defaults, **sizes})
    poison(manager)
    manager.device_memory.checkpoints.fill_(0xFF)
    return manager


def feed(manager, slot, after):
    """Run tokens up to a length, after which the request's ids are those of `IDS`."""
    device = str(manager.device)
    weights, tokens = ([move_to(device, layer) for layer in layers] for layers in (WEIGHTS, TOKENS))
    return run_forward(manager, weights, [Row(slot, tokens, int(manager.lengths[slot]), after)])


def run_prompt(manager, length):
    """Resume a prompt, run what was not found, and return its slot."""
    slot, *_ = manager.resume_request(IDS[:length])
    feed(manager, slot, length)
    return slot


def assert_like_a_cold_run(manager, slot, *, after):
    """The request holds, and goes on as, what a fresh one of its length would."""
    fresh = make_manager(manager.config, device=manager.device, backend=manager.backend)
    cold = fresh.open_request()
    feed(fresh, cold, int(manager.lengths[slot]))
    assert_same(live_bytes(manager, slot), live_bytes(fresh, cold))
    results, expected = feed(manager, slot, after), feed(fresh, cold, after)
    for got, want in zip(results, expected, strict=True):
        assert torch.equal(got.output, want.output)
    assert_same(live_bytes(manager, slot), live_bytes(fresh, cold))
    manager.check_integrity()


# Chunks that end before, at and after boundaries, and boundaries just after a chunk's start.
CHUNKS = {
    "one chunk": [400],
    "boundary inside": [100, 300, 400],
    "two in one": [126, 390, 400],
    "one past a start": [127, 300, 400],
    "at boundaries": [128, 256, 384, 400],
    "three past a start": [253, 400],
    "steps across": [120, *range(121, 137), 250, *range(251, 263), 400],
}


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("config", [PLAIN, VERIFY], ids=["plain", "verify"])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_every_boundary_resumes_as_a_cold_run(config, chunks, device):
    manager = make_manager(
        config, device=device, checkpoint_policy=CheckpointPolicy(every_blocks=1)
    )
    slot, num_tokens, *_ = manager.resume_request(IDS[:400])
    assert num_tokens == 0
    for after in chunks:
        feed(manager, slot, after)
    manager.free_request(slot)
    for boundary in (384, 256, 128):
        slot, num_tokens, *_ = manager.resume_request(IDS[: boundary + 1])
        assert num_tokens == boundary == manager.lengths[slot]
        assert_like_a_cold_run(manager, slot, after=boundary + 150)
        manager.free_request(slot)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=needs_interpreter), GPU])
@pytest.mark.parametrize("chunks", [[140], [126, 140]], ids=str)
def test_the_triton_backend_checkpoints_the_same(chunks, device):
    config = CacheConfig.tiny(**BASE, compress_ratios=(4, 128), drafts_per_step=3)
    weights, tokens = (
        [move_to(device, layer) for layer in layers]
        for layers in (model_weights(config, seed=0), model_projections(config, 140, seed=3))
    )
    stored = []
    for backend in ("reference", "triton"):
        manager = make_manager(config, device=device, backend=backend)
        slot, *_ = manager.resume_request(IDS[:140])
        for after in chunks:
            before = int(manager.lengths[slot])
            plan = prepare_forward(manager, [slot], [before], [after])
            for idx, layer in enumerate(tokens):
                handle = manager.acquire(idx, plan)
                handle.write(take(layer, before, after), weights[idx])
        manager.free_request(slot)
        slot, num_tokens, *_ = manager.resume_request(IDS[:140])
        assert num_tokens == 128
        stored.append(live_bytes(manager, slot))
    assert_same(*stored)


def take(layer, before, after):
    return take_rows(layer, slice(before, after))


def test_the_parts_of_a_layer_capture_as_the_whole():
    manager = make_manager(checkpoint_policy=CheckpointPolicy(every_blocks=1))
    slot, *_ = manager.resume_request(IDS[:300])
    plan = prepare_forward(manager, [slot], [0], [300])
    for idx, (layer, weights) in enumerate(zip(TOKENS, WEIGHTS, strict=True)):
        handle, inputs = manager.acquire(idx, plan), take(layer, 0, 300)
        if inputs.indexer is not None:
            handle.flush_compression(
                *inputs.compressor, weights.compressor,
                index_kv=inputs.indexer.kv, index_gate=inputs.indexer.gate,
                index_weights=weights.indexer,
            )  # fmt: skip
        elif inputs.compressor is not None:
            handle.flush_compression(*inputs.compressor, weights.compressor)
        handle.write_swa(inputs.kv, weights.kv_norm)
    manager.free_request(slot)
    slot, num_tokens, *_ = manager.resume_request(IDS[:300])
    assert num_tokens == 256
    assert_like_a_cold_run(manager, slot, after=400)


def test_a_compiled_layer_captures_too():
    manager = make_manager()
    slot, *_ = manager.resume_request(IDS[:140])
    plan = prepare_forward(manager, [slot], [0], [140])
    handles = [manager.acquire(idx, plan) for idx in range(len(WEIGHTS))]

    def write(inputs):
        for handle, layer, weights in zip(handles, inputs, WEIGHTS, strict=True):
            handle.write(layer, weights)

    torch._dynamo.reset()
    compiled = torch.compile(write, backend="aot_eager", fullgraph=True)
    compiled([take(layer, 0, 140) for layer in TOKENS])
    slot, num_tokens, *_ = manager.resume_request(IDS[:140])
    assert num_tokens == 128
    assert_like_a_cold_run(manager, slot, after=150)


def test_the_last_boundary_of_a_prompt_is_the_default():
    manager = make_manager()
    slot = run_prompt(manager, 300)
    manager.note_tokens(slot, IDS[300:400], start=300)
    feed(manager, slot, 400)
    manager.free_request(slot)
    assert manager.stats().num_prefix_checkpoints == 1
    assert manager.stats().num_prefix_blocks == 3
    assert manager.resume_request(IDS[:400]).num_tokens == 256


def test_a_whole_prompt_leaves_one_token_to_run():
    manager = make_manager()
    run_prompt(manager, 256)
    assert manager.resume_request(IDS[:256]).num_tokens == 0
    assert manager.resume_request(IDS[:257]).num_tokens == 256


def test_other_tokens_and_other_salts_never_share():
    manager = make_manager(max_requests=8, checkpoint_policy=CheckpointPolicy(every_blocks=1))
    slot, *_ = manager.resume_request(IDS[:300], salt=b"a")
    feed(manager, slot, 300)
    assert manager.resume_request(IDS[:300]).num_tokens == 0
    assert manager.resume_request(IDS[:300], salt=b"b").num_tokens == 0
    assert manager.resume_request(IDS[:300], salt=b"a").num_tokens == 256
    for position, num_tokens in ((0, 0), (127, 0), (128, 128), (255, 128), (256, 256)):
        other = IDS[:300].copy()
        other[position] += 1
        slot, found, *_ = manager.resume_request(other, salt=b"a")
        assert found == num_tokens
        manager.free_request(slot)


def test_hashes_are_a_chain_of_sha256():
    ids = np.arange(256, dtype=np.int32)
    root = root_digest("meaning", b"salt")
    first = hashlib.sha256(root + ids[:128].tobytes()).digest()
    second = hashlib.sha256(first + ids[128:].tobytes()).digest()
    raw = memoryview(ids).cast("B")
    assert list(hash_blocks(root, raw, 512)) == [first, second]
    assert list(hash_blocks(root, raw[:-1], 512)) == [first]
    assert root != root_digest("meaning", b"") != root_digest("meanin", b"g")


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint32, list])
def test_ids_of_any_integer_type_are_the_same(dtype):
    manager = make_manager()
    run_prompt(manager, 300)
    ids = IDS[:300].tolist() if dtype is list else IDS[:300].astype(dtype)
    assert manager.resume_request(ids).num_tokens == 256


def test_nothing_that_can_be_rejected_is_published():
    manager = make_manager(VERIFY, checkpoint_policy=CheckpointPolicy(every_blocks=1))
    slot, *_ = manager.resume_request(IDS[:100])
    feed(manager, slot, 126)
    manager.note_tokens(slot, IDS[100:400], start=100)
    for length in (128, 129, 130):
        feed(manager, slot, length)
        assert manager.resume_request(IDS[:200]).num_tokens == 0
        manager.free_request(1)
    feed(manager, slot, 131)
    assert manager.resume_request(IDS[:200]).num_tokens == 128


def test_rejected_tokens_are_not_in_a_checkpoint():
    wrong = model_projections(VERIFY, MAX_TOKENS, seed=99)
    manager = make_manager(VERIFY, checkpoint_policy=CheckpointPolicy(every_blocks=1))
    slot = run_prompt(manager, 126)
    manager.note_tokens(slot, [5, 5, 5, 5], start=126)
    run_forward(manager, WEIGHTS, [Row(slot, wrong, 126, 130)])
    manager.truncate(slot, 127)  # the token at 126 stays, three drafts go
    manager.truncate(slot, 127)
    manager.note_tokens(slot, IDS[127:200], start=127)
    rest = [mixed(a, b, 126) for a, b in zip(TOKENS, wrong, strict=True)]
    run_forward(manager, WEIGHTS, [Row(slot, rest, 127, 131)])
    assert manager.resume_request([*IDS[:126], 5, *IDS[127:200]]).num_tokens == 128
    fresh = make_manager(VERIFY)
    cold = fresh.open_request()
    run_forward(fresh, WEIGHTS, [Row(cold, rest, 0, 128)])
    assert_same(live_bytes(manager, 1), live_bytes(fresh, cold))


def mixed(layer, wrong, position):
    """A layer's projections with one token of another sequence."""
    if isinstance(layer, torch.Tensor):
        layer = layer.clone()
        layer[position] = wrong[position]
        return layer
    if layer is None:
        return None
    pairs = zip(layer, wrong, strict=True)
    return type(layer)(*(mixed(a, b, position) for a, b in pairs))


def test_a_request_that_was_resumed_publishes_more():
    manager = make_manager()
    run_prompt(manager, 300)
    second, num_tokens, *_ = manager.resume_request(IDS[:600])
    assert num_tokens == 256
    feed(manager, second, 600)
    third, num_tokens, *_ = manager.resume_request(IDS[:600])
    assert num_tokens == 512
    assert manager._books.allocator.num_owners[manager._books.requests.block_table[third, 0]] == 4
    assert_like_a_cold_run(manager, third, after=650)


def test_equal_requests_side_by_side_end_up_with_one_copy():
    manager = make_manager()
    slots = [manager.resume_request(IDS[:300]).slot for _ in range(2)]
    for slot in slots:
        feed(manager, slot, 300)
    assert manager.stats().num_prefix_blocks == 2
    assert manager.stats().num_free_blocks == 16 - 2 - 2
    first, second = (manager._books.requests.block_table[slot, :3].tolist() for slot in slots)
    assert first[:2] == second[:2] and first[2] != second[2]
    for slot in slots:
        assert_like_a_cold_run(manager, slot, after=400)


def test_memory_that_only_the_prefix_cache_holds_is_evicted_oldest_first():
    manager = make_manager(num_blocks=6, checkpoint_policy=CheckpointPolicy(every_blocks=1))
    for first in (0, 5000):
        slot, *_ = manager.resume_request(IDS[:257] + first)
        feed(manager, slot, 257)
        manager.free_request(slot)
    assert manager.stats().num_prefix_blocks == 4
    manager.free_request(manager.resume_request(IDS[:257]).slot)  # the older is now the newer
    slot = manager.open_request()
    feed(manager, slot, 400)  # 4 blocks: 2 free, 2 evicted
    stats = manager.stats()
    assert (stats.num_evicted_blocks, stats.num_lost_blocks, stats.num_prefix_blocks) == (2, 2, 2)
    assert manager.resume_request(IDS[:257] + 5000).num_tokens == 0
    assert manager.resume_request(IDS[:257]).num_tokens == 256
    manager.check_integrity()


def test_a_chain_is_evicted_from_its_end():
    manager = make_manager(num_blocks=4, checkpoint_policy=CheckpointPolicy(every_blocks=1))
    slot = run_prompt(manager, 400)
    manager.free_request(slot)
    slot = manager.open_request()
    feed(manager, slot, 140)  # 2 blocks, of which one is free
    assert manager.stats().num_prefix_blocks == 2
    manager.free_request(slot)
    assert manager.resume_request(IDS[:400]).num_tokens == 256


def test_a_block_in_use_is_never_evicted():
    manager = make_manager(num_blocks=4)
    slot = run_prompt(manager, 400)
    other = manager.open_request()
    before = manager.stats()
    with pytest.raises(OutOfBlocksError, match="1 needed, 0 of 4 free and 0 of the prefix cache"):
        feed(manager, other, 100)
    assert manager.stats() == before
    assert_like_a_cold_run(manager, slot, after=500)


def test_checkpoints_are_evicted_oldest_first():
    manager = make_manager(num_checkpoints=2)
    for first in (0, 5000, 6000):
        slot, *_ = manager.resume_request(IDS[:257] + first)
        feed(manager, slot, 257)
        manager.free_request(slot)
        if first == 5000:
            manager.free_request(manager.resume_request(IDS[:257]).slot)
    stats = manager.stats()
    assert (stats.num_evicted_checkpoints, stats.num_prefix_checkpoints) == (1, 2)
    found = [manager.resume_request(IDS[:257] + first).num_tokens for first in (0, 5000, 6000)]
    assert found == [256, 0, 256]


def test_a_checkpoint_that_does_not_fit_is_skipped():
    manager = make_manager(
        VERIFY, num_checkpoints=1, checkpoint_policy=CheckpointPolicy(every_blocks=1)
    )
    slot, *_ = manager.resume_request(IDS[:300])
    feed(manager, slot, 257)
    assert manager.stats().num_skipped_checkpoints == 1
    feed(manager, slot, 300)
    assert manager.resume_request(IDS[:300]).num_tokens == 256  # the later one was kept
    manager.check_integrity()


def test_evicted_blocks_come_back_from_the_host():
    manager = make_manager(num_blocks=4, host_blocks=8)
    slot = run_prompt(manager, 400)
    manager.free_request(slot)
    other = manager.open_request()
    feed(manager, other, 512)
    stats = manager.stats()
    assert (stats.num_evicted_blocks, stats.num_lost_blocks) == (3, 0)
    assert (stats.num_prefix_host_blocks, stats.num_prefix_blocks) == (3, 0)
    assert stats.prefix_host_bytes == 3 * manager.paged.storage.shape[1] == stats.bytes_to_host
    assert manager.resume_request(IDS[:400]).num_tokens == 0  # no room to come back
    manager.free_request(1)
    manager.free_request(other)
    slot, num_tokens, *_ = manager.resume_request(IDS[:400])
    assert num_tokens == 384
    assert manager.stats().num_prefix_host_blocks == 0
    assert_like_a_cold_run(manager, slot, after=500)


def test_the_host_keeps_what_was_used_last():
    manager = make_manager(num_blocks=6, host_blocks=2, num_checkpoints=8,
                           checkpoint_policy=CheckpointPolicy(every_blocks=1))  # fmt: skip
    for first in (0, 5000):
        slot, *_ = manager.resume_request(IDS[:257] + first)
        feed(manager, slot, 257)
        manager.free_request(slot)
    slot = manager.open_request()
    feed(manager, slot, 700)
    stats = manager.stats()
    assert (stats.num_evicted_blocks, stats.num_lost_blocks) == (4, 2)
    manager.free_request(slot)
    assert manager.resume_request(IDS[:257]).num_tokens == 0
    slot, num_tokens, *_ = manager.resume_request(IDS[:257] + 5000)
    assert num_tokens == 256
    assert_like_a_cold_run(manager, slot, after=300)


def test_a_live_or_cancelled_forward_publishes_nothing():
    manager = make_manager(checkpoint_policy=CheckpointPolicy(every_blocks=1))
    slot, *_ = manager.resume_request(IDS[:300])
    plan = prepare_forward(manager, [slot], [0], [300])
    manager.acquire(0, plan).write(take(TOKENS[0], 0, 300), WEIGHTS[0])
    assert manager.resume_request(IDS[:300]).num_tokens == 0
    assert manager.stats().num_prefix_blocks == 0
    manager.check_integrity()
    plan.cancel()
    assert manager.stats().num_prefix_blocks == 0
    manager.check_integrity()
    assert manager._books.checkpoints.num_free == 4


def test_a_forward_that_was_only_declared_complete_has_no_checkpoints():
    manager = make_manager()
    slot, *_ = manager.resume_request(IDS[:300])
    prepare_forward(manager, [slot], [0], [300]).complete()
    assert manager.stats().num_prefix_checkpoints == 0
    assert manager._books.checkpoints.num_free == 4
    manager.check_integrity()


def test_a_fork_shares_what_is_pending_and_is_checkpointed():
    manager = make_manager(VERIFY, checkpoint_policy=CheckpointPolicy(at_prompt_end=False))
    slot, *_ = manager.resume_request(IDS[:300])
    feed(manager, slot, 257)
    fork = manager.fork(slot)
    assert manager.stats().num_prefix_checkpoints == 0
    manager.check_integrity()
    for each in (slot, fork):
        feed(manager, each, 300)
        manager.check_integrity()
    assert manager.stats().num_prefix_checkpoints == 1
    manager.free_request(slot)
    manager.free_request(fork)
    slot, num_tokens, *_ = manager.resume_request(IDS[:300])
    assert num_tokens == 256
    assert_like_a_cold_run(manager, slot, after=300)


def test_a_fork_past_the_ring_has_no_checkpoint():
    manager = make_manager(checkpoint_policy=CheckpointPolicy(at_prompt_end=False))
    slot, *_ = manager.resume_request(IDS[:300])
    feed(manager, slot, 258)
    manager.fork(slot)
    assert manager._books.checkpoints.num_free == 4


def test_truncate_goes_back_to_a_checkpoint():
    manager = make_manager(checkpoint_policy=CheckpointPolicy(every_blocks=1))
    slot = run_prompt(manager, 400)
    with pytest.raises(ValueError, match=r"nearest possible lengths are 128 and 256$"):
        manager.truncate(slot, 200)
    with pytest.raises(ValueError, match=r"nearest possible lengths are 384 and 399$"):
        manager.truncate(slot, 390)
    with pytest.raises(ValueError, match=r"nearest possible lengths are 0 and 128$"):
        manager.truncate(slot, 127)
    manager.truncate(slot, 256)
    assert manager.rollback_floor[slot] == 256
    assert_like_a_cold_run(manager, slot, after=300)
    manager.truncate(slot, 128)
    assert_like_a_cold_run(manager, slot, after=500)
    assert manager._books.prefix.ids.num_known[slot] == 128


def test_after_going_back_other_tokens_are_other_blocks():
    manager = make_manager(checkpoint_policy=CheckpointPolicy(every_blocks=1))
    slot = run_prompt(manager, 300)
    manager.truncate(slot, 128)
    other = model_projections(PLAIN, 300, seed=77)
    manager.note_tokens(slot, IDS[128:300] + 1, start=128)
    run_forward(manager, WEIGHTS, [Row(slot, other, 128, 300)])
    assert manager.stats().num_prefix_blocks == 3
    found, num_tokens, *_ = manager.resume_request(IDS[:300])
    assert num_tokens == 256
    assert_like_a_cold_run(manager, found, after=300)


def test_stats_count_hits_in_tokens():
    manager = make_manager()
    run_prompt(manager, 300)
    manager.resume_request(IDS[:500])
    stats = manager.stats()
    assert (stats.num_lookups, stats.num_hits) == (2, 1)
    assert (stats.num_asked_tokens, stats.num_hit_tokens) == (800, 256)
    assert stats.hit_rate == 0.32
    checkpoint_bytes = manager.device_memory.checkpoints.shape[1]
    assert stats.prefix_bytes == 2 * manager.paged.storage.shape[1] + checkpoint_bytes
    assert KVCacheManager(PLAIN, max_requests=1, num_blocks=2).stats().hit_rate == 0.0


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda m: m.resume_request([[1]]), ValueError, r"expected one axis, got \[1, 1\]"),
        (lambda m: m.resume_request([0.5]), TypeError, "expected integers, got float64"),
        (lambda m: m.resume_request([2**31]), ValueError, "32-bit signed integers, got 2147483648"),
        (lambda m: m.resume_request([1], salt="a"), TypeError, "Invalid salt: expected bytes"),
        (lambda m: m.note_tokens(0, [1], start=3), ValueError, "expected 2, the number of ids"),
        (lambda m: m.note_tokens(1, [1], start=0), ValueError, "slot 1 is not open"),
        (lambda m: m.note_tokens(0, [0.5], start=2), TypeError, "expected integers, got float64"),
    ],
)
def test_bad_ids_are_refused(call, error, match):
    manager = make_manager()
    manager.resume_request([1, 2])
    assert manager.num_known_ids[:2].tolist() == [2, 0]
    before = manager.stats(), manager.num_free_slots
    with pytest.raises(error, match=match):
        call(manager)
    assert (manager.stats(), manager.num_free_slots) == before


def test_a_manager_without_checkpoints_has_no_prefix_cache():
    manager = make_manager(num_checkpoints=0)
    manager.open_request()
    for call in (lambda: manager.resume_request([1]),
                 lambda: manager.note_tokens(0, [1], start=0)):  # fmt: skip
        with pytest.raises(ValueError, match="expected prefix_bytes, or num_checkpoints >= 1"):
            call()


def test_a_resume_needs_a_slot():
    manager = make_manager(max_requests=1)
    manager.open_request()
    before = manager.stats()
    with pytest.raises(NoFreeSlotError):
        manager.resume_request(IDS[:300])
    assert manager.stats() == before


@pytest.mark.parametrize("fields", [{"every_blocks": -1}, {"every_blocks": True},
                                    {"at_forks": 1}, {"at_prompt_end": None}], ids=str)  # fmt: skip
def test_bad_policies_are_refused(fields):
    with pytest.raises(ValueError, match=f"Invalid {next(iter(fields))}: expected"):
        CheckpointPolicy(**fields)


def test_a_policy_chooses_boundaries():
    policy = CheckpointPolicy(every_blocks=3)
    assert policy.chosen(1, 10) == [3, 6, 9]
    assert policy.chosen(4, 5) == []
    assert CheckpointPolicy().chosen(1, 16) == [8, 16]
    assert CheckpointPolicy(every_blocks=0).chosen(1, 10) == []
