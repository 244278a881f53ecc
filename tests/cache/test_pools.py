"""Where every byte of the pools lies, and that the typed views are those bytes."""

import pytest
import torch

from dsv4.cache.memory.layout import cache_layout
from dsv4.cache.memory.paged_cache import PagedKVPool
from dsv4.cache.memory.schema import build_schemas
from dsv4.cache.memory.state_cache import StateCachePool
from dsv4.config import CacheConfig

NUM_BLOCKS, MAX_REQUESTS = 3, 3
SWA, CSA, HCA, CSA_2 = range(4)
SCHEDULE = (0, 4, 128, 4)
KV, GATE = range(2)
SERIES = ("ka", "za", "kb", "zb")

BF16, FP32 = torch.bfloat16, torch.float32
E4M3, UE8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu

CONFIGS = {
    "v4": CacheConfig(SCHEDULE),
    "v4-align-16": CacheConfig(SCHEDULE, page_align=16),
    "v4-drafts": CacheConfig(SCHEDULE, drafts_per_step=7, tail_dtype="bfloat16"),
    "v4-one-scale": CacheConfig(SCHEDULE, kv_format="fp8_entry_scale", index_format="nvfp4"),
    "v4-bf16": CacheConfig(SCHEDULE, kv_format="bf16", index_format="bf16", page_align=16),
    "tiny": CacheConfig.tiny(),
    "tiny-fp32": CacheConfig.tiny(kv_format="fp32", index_format="fp8", block_tokens=384),
    "tiny-csa": CacheConfig.tiny(compress_ratios=(4, 4), block_tokens=4),
    "tiny-hca": CacheConfig.tiny(compress_ratios=(128,), drafts_per_step=2),
    "tiny-swa": CacheConfig.tiny(compress_ratios=(0, 0)),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def paged_pool(config):
    return PagedKVPool(
        cache_layout(config, build_schemas(config)), num_blocks=NUM_BLOCKS,
        index_global_scale=config.index_global_scale, device=torch.device("cpu"),
    )  # fmt: skip


def state_pool(config):
    layout = cache_layout(config, build_schemas(config))
    return StateCachePool(layout, max_requests=MAX_REQUESTS, device=torch.device("cpu"))


def spec(view):
    return tuple(view.shape), view.dtype


def page_groups(pool, config):
    """Byte views `[num_blocks, ...]` of each page of a block, and the page's alignment."""
    layers = [pages for idx in range(config.num_layers) if (pages := pool.layer(idx))]
    entries = [((p.entries.data, p.entries.scales), config.page_align) for p in layers]
    keys = [((p.index_keys.data, p.index_keys.scales), 16) for p in layers if p.index_keys]
    return entries + keys


def state_groups(pool, config):
    """Byte views `[max_requests, ...]` of each ring and tail of a slot, and its alignment."""
    states = [pool.layer(idx) for idx in range(config.num_layers)]
    rings = [((s.ring.data, s.ring.scales), config.page_align) for s in states]
    tails = [tail for s in states for tail in (s.tail, s.index_tail, s.sums) if tail is not None]
    return rings + [((tail.view(torch.uint8),), 16) for tail in tails]


POOLS = {"blocks": (paged_pool, page_groups), "slots": (state_pool, state_groups)}
every_pool = pytest.mark.parametrize("build, groups_of", POOLS.values(), ids=POOLS)


@every_config
@every_pool
def test_parts_do_not_overlap_and_leave_only_padding(config, build, groups_of):
    pool = build(config)
    groups = groups_of(pool, config)
    padding = pool.layout.padding
    for views, align in groups:
        padding += -sum(view[0].numel() for view in views) % align
        for view in views:
            view += 1
    for run in pool.storage:
        times_covered = torch.bincount(run, minlength=2).tolist()
        assert times_covered == [padding, len(run) - padding]


@every_config
@every_pool
def test_a_run_holds_all_layers_of_one_block_or_slot(config, build, groups_of):
    pool = build(config)
    views = [view for views, _ in groups_of(pool, config) for view in views]
    payload = sum(view[0].numel() for view in views)
    for run in range(3):
        pool.storage.zero_()
        for view in views:
            view[run] += 1
        per_run = pool.storage.long().sum(dim=1).tolist()
        assert per_run == [payload if idx == run else 0 for idx in range(3)]


@every_config
@every_pool
def test_runs_are_aligned_and_padded_no_more_than_they_must(config, build, groups_of):
    pool = build(config)
    layout, align = pool.layout, config.page_align
    assert pool.storage.shape[1] == layout.num_bytes
    assert layout.num_bytes % align == 0
    assert 0 <= layout.padding < align
    for views, _ in groups_of(pool, config):
        assert {view.stride(0) for view in views} == {layout.num_bytes}


@every_config
def test_pages_and_rings_start_on_their_alignment(config):
    pages, slots = paged_pool(config), state_pool(config)
    for offsets in (*pages.layout.offsets, *slots.layout.offsets):
        for name, offset in offsets.items():
            assert offset % (config.page_align if name in ("entries", "ring") else 16) == 0


# A block of the V4 schedule, by hand: 64 CSA entries are 64 × 584 = 37376 bytes, rounded up to
# 65 × 576; 2 HCA entries are 1168, rounded up to 3 × 576; 64 MXFP4 keys are 64 × 68 = 4352.
BLOCK_OFFSETS = [
    {},
    {"entries": 0, "index_keys": 37440 + 1728 + 37440},
    {"entries": 37440},
    {"entries": 37440 + 1728, "index_keys": 37440 + 1728 + 37440 + 4352},
]
BLOCK_BYTES, BLOCK_PADDING = 149 * 576, 149 * 576 - (2 * (37440 + 4352) + 1728)

# A slot: a ring of 128 rows is 128 × 584 = 74752, rounded up to 130 × 576. A tail row is kv and
# gate in fp32: 8 rows of 2 × 1024 for CSA, 16 of 2 × 512 for HCA, 8 of 2 × 256 for the indexer.
# 7 rows of 3 × 512 sums are behind those of HCA.
RING = 74880
TAILS = 4 * RING
INDEX_TAILS = TAILS + 2 * 65536
HCA_TAILS = INDEX_TAILS + 2 * 16384
SLOT_OFFSETS = [
    {"ring": 0},
    {"ring": RING, "tail": TAILS, "index_tail": INDEX_TAILS},
    {"ring": 2 * RING, "tail": HCA_TAILS, "sums": HCA_TAILS + 65536},
    {"ring": 3 * RING, "tail": TAILS + 65536, "index_tail": INDEX_TAILS + 16384},
]
SLOT_BYTES, SLOT_PADDING = 993 * 576, 993 * 576 - (HCA_TAILS + 65536 + 43008)


def test_the_v4_runs_by_hand():
    pages, slots = paged_pool(CONFIGS["v4"]).layout, state_pool(CONFIGS["v4"]).layout
    assert list(pages.offsets) == BLOCK_OFFSETS
    assert (pages.num_bytes, pages.padding) == (BLOCK_BYTES, BLOCK_PADDING)
    assert list(slots.offsets) == SLOT_OFFSETS
    assert (slots.num_bytes, slots.padding) == (SLOT_BYTES, SLOT_PADDING)


def entry_byte(layer, block, row, byte):
    return block * BLOCK_BYTES + BLOCK_OFFSETS[layer]["entries"] + row * 576 + byte


def entry_scale_byte(layer, block, row, byte):
    num_rows = 2 if layer == HCA else 64
    return entry_byte(layer, block, num_rows, 0) + row * 8 + byte


def key_byte(layer, block, row, byte):
    return block * BLOCK_BYTES + BLOCK_OFFSETS[layer]["index_keys"] + row * 64 + byte


def key_scale_byte(layer, block, row, byte):
    return key_byte(layer, block, 64, 0) + row * 4 + byte


def ring_byte(layer, slot, row, byte):
    return slot * SLOT_BYTES + layer * RING + row * 576 + byte


def ring_scale_byte(layer, slot, row, byte):
    return ring_byte(layer, slot, 128, 0) + row * 8 + byte


def tail_byte(name, layer, slot, row, part, column):
    width = 256 if name == "index_tail" else 512 if layer == HCA else 1024
    start = slot * SLOT_BYTES + SLOT_OFFSETS[layer][name]
    return start + 4 * ((row * 2 + part) * width + column)


PAGE_BYTES = [
    ("entries_fp8", CSA, (0, 0, 0), entry_byte(CSA, 0, 0, 0), 1),
    ("entries_fp8", CSA_2, (2, 63, 447), entry_byte(CSA_2, 2, 63, 447), 1),
    ("entries_fp8", HCA, (1, 1, 5), entry_byte(HCA, 1, 1, 5), 1),
    ("entries_rope", CSA, (1, 7, 0), entry_byte(CSA, 1, 7, 448), 2),
    ("entries_rope", CSA_2, (2, 63, 63), entry_byte(CSA_2, 2, 63, 574), 2),
    ("entries_rope", HCA, (2, 1, 3), entry_byte(HCA, 2, 1, 454), 2),
    ("inv_scale", CSA, (1, 0, 0), entry_scale_byte(CSA, 1, 0, 0), 1),
    ("inv_scale", CSA_2, (0, 63, 6), entry_scale_byte(CSA_2, 0, 63, 6), 1),
    ("inv_scale", HCA, (2, 1, 6), entry_scale_byte(HCA, 2, 1, 6), 1),
    ("indexer_keys_fp4", CSA, (0, 0, 0), key_byte(CSA, 0, 0, 0), 1),
    ("indexer_keys_fp4", CSA_2, (2, 63, 63), key_byte(CSA_2, 2, 63, 63), 1),
    ("indexer_scale", CSA, (1, 2, 0), key_scale_byte(CSA, 1, 2, 0), 1),
    ("indexer_scale", CSA_2, (2, 63, 3), key_scale_byte(CSA_2, 2, 63, 3), 1),
]

SLOT_VIEW_BYTES = [
    ("swa_fp8", SWA, (0, 0, 0), ring_byte(SWA, 0, 0, 0), 1),
    ("swa_fp8", CSA_2, (2, 127, 447), ring_byte(CSA_2, 2, 127, 447), 1),
    ("swa_rope", SWA, (1, 1, 0), ring_byte(SWA, 1, 1, 448), 2),
    ("swa_rope", HCA, (2, 127, 63), ring_byte(HCA, 2, 127, 574), 2),
    ("swa_inv", CSA, (1, 0, 0), ring_scale_byte(CSA, 1, 0, 0), 1),
    ("swa_inv", SWA, (2, 127, 6), ring_scale_byte(SWA, 2, 127, 6), 1),
    ("tail_ka", CSA, (0, 0, 0), tail_byte("tail", CSA, 0, 0, KV, 512), 4),
    ("tail_ka", CSA_2, (2, 7, 511), tail_byte("tail", CSA_2, 2, 7, KV, 1023), 4),
    ("tail_za", CSA, (1, 3, 4), tail_byte("tail", CSA, 1, 3, GATE, 516), 4),
    ("tail_kb", CSA, (1, 3, 4), tail_byte("tail", CSA, 1, 3, KV, 4), 4),
    ("tail_zb", CSA_2, (2, 7, 511), tail_byte("tail", CSA_2, 2, 7, GATE, 511), 4),
    ("tail_ka", HCA, (1, 15, 511), tail_byte("tail", HCA, 1, 15, KV, 511), 4),
    ("tail_za", HCA, (2, 5, 0), tail_byte("tail", HCA, 2, 5, GATE, 0), 4),
    ("sums", HCA, (0, 0, 0, 0), tail_byte("tail", HCA, 0, 16, KV, 0), 4),
    ("sums", HCA, (2, 6, 2, 511), SLOT_OFFSETS[HCA]["sums"] + 2 * SLOT_BYTES + 43008 - 4, 4),
    ("index_tail_ka", CSA, (1, 2, 3), tail_byte("index_tail", CSA, 1, 2, KV, 131), 4),
    ("index_tail_za", CSA_2, (0, 7, 0), tail_byte("index_tail", CSA_2, 0, 7, GATE, 128), 4),
    ("index_tail_kb", CSA, (1, 2, 3), tail_byte("index_tail", CSA, 1, 2, KV, 3), 4),
    ("index_tail_zb", CSA_2, (2, 7, 127), tail_byte("index_tail", CSA_2, 2, 7, GATE, 127), 4),
]


@pytest.mark.parametrize(
    "build, view, layer, index, first_byte, num_bytes",
    [
        *((paged_pool, *case) for case in PAGE_BYTES),
        *((state_pool, *case) for case in SLOT_VIEW_BYTES),
    ],
    ids=[f"{view}-L{layer}-{index}" for view, layer, index, *_ in PAGE_BYTES + SLOT_VIEW_BYTES],
)
def test_a_view_writes_the_bytes_the_format_names(build, view, layer, index, first_byte, num_bytes):
    pool = build(CONFIGS["v4"])
    typed = getattr(pool.layer(layer), view)
    value = torch.tensor(1.1).to(typed.dtype) if typed.is_floating_point() else 0xA5
    typed[index] = value
    written = torch.nonzero(pool.storage.flatten()).flatten().tolist()
    assert written == list(range(first_byte, first_byte + num_bytes))


@pytest.mark.parametrize(
    "kv_format, nope, rope, scales",
    [
        ("fp8", E4M3, BF16, (UE8M0, 7)),
        ("fp8_entry_scale", E4M3, BF16, (FP32, 1)),
        ("bf16", BF16, BF16, None),
        ("fp32", FP32, FP32, None),
    ],
)
def test_kv_views_have_the_documented_shapes(kv_format, nope, rope, scales):
    config = CacheConfig(SCHEDULE, kv_format=kv_format, drafts_per_step=3)
    pages, slots = paged_pool(config), state_pool(config)
    entries = [
        (pages.layer(CSA), (NUM_BLOCKS, 64), ("entries_fp8", "entries_rope", "inv_scale")),
        (pages.layer(HCA), (NUM_BLOCKS, 2), ("entries_fp8", "entries_rope", "inv_scale")),
    ]
    rings = [
        (slots.layer(idx), (MAX_REQUESTS, 131), ("swa_fp8", "swa_rope", "swa_inv"))
        for idx in range(4)
    ]
    for owner, shape, (nope_view, rope_view, scale_view) in entries + rings:
        assert spec(getattr(owner, nope_view)) == ((*shape, 448), nope)
        assert spec(getattr(owner, rope_view)) == ((*shape, 64), rope)
        if scales is None:
            with pytest.raises(ValueError, match=f"{kv_format} has no field 'scale'"):
                getattr(owner, scale_view)
        else:
            assert spec(getattr(owner, scale_view)) == ((*shape, scales[1]), scales[0])


@pytest.mark.parametrize(
    "index_format, key, scales",
    [
        ("mxfp4", (torch.uint8, 64), (UE8M0, 4)),
        ("nvfp4", (torch.uint8, 64), (E4M3, 8)),
        ("fp8", (E4M3, 128), (FP32, 1)),
        ("bf16", (BF16, 128), None),
        ("fp32", (FP32, 128), None),
    ],
)
def test_key_views_have_the_documented_shapes(index_format, key, scales):
    pages = paged_pool(CacheConfig(SCHEDULE, index_format=index_format)).layer(CSA)
    assert spec(pages.indexer_keys_fp4) == ((NUM_BLOCKS, 64, key[1]), key[0])
    assert spec(pages.indexer_global_scale) == ((), FP32)
    if scales is None:
        with pytest.raises(ValueError, match=f"{index_format} has no field 'scale'"):
            _ = pages.indexer_scale
    else:
        assert spec(pages.indexer_scale) == ((NUM_BLOCKS, 64, scales[1]), scales[0])


@pytest.mark.parametrize("tail_dtype, dtype", [("float32", FP32), ("bfloat16", BF16)])
@pytest.mark.parametrize("drafts", [0, 5])
def test_tail_views_have_the_documented_shapes(tail_dtype, dtype, drafts):
    config = CacheConfig(SCHEDULE, tail_dtype=tail_dtype, drafts_per_step=drafts)
    slots = state_pool(config)
    for name in SERIES:
        main, index = f"tail_{name}", f"index_tail_{name}"
        rows = (MAX_REQUESTS, 8 + drafts)
        assert spec(getattr(slots.layer(CSA), main)) == ((*rows, 512), dtype)
        assert spec(getattr(slots.layer(CSA), index)) == ((*rows, 128), dtype)
    for name in ("ka", "za"):
        view = getattr(slots.layer(HCA), f"tail_{name}")
        assert spec(view) == ((MAX_REQUESTS, 16 + drafts, 512), dtype)
    assert spec(slots.layer(HCA).sums) == ((MAX_REQUESTS, 7, 3, 512), FP32)
    assert slots.layer(CSA).sums is slots.layer(SWA).sums is None


def test_series_a_and_b_are_the_halves_of_a_csa_tail():
    state = state_pool(CONFIGS["v4"]).layer(CSA)
    for tail, prefix, dim in ((state.tail, "tail", 512), (state.index_tail, "index_tail", 128)):
        tail.copy_(torch.arange(tail.numel(), dtype=FP32).view(tail.shape))
        for part, letter in enumerate("kz"):
            assert getattr(state, f"{prefix}_{letter}a").equal(tail[:, :, part, dim:])
            assert getattr(state, f"{prefix}_{letter}b").equal(tail[:, :, part, :dim])


def test_an_hca_tail_is_series_a_alone():
    state = state_pool(CONFIGS["v4"]).layer(HCA)
    state.tail.copy_(torch.arange(state.tail.numel(), dtype=FP32).view(state.tail.shape))
    assert state.tail_ka.equal(state.tail[:, :, 0]) and state.tail_za.equal(state.tail[:, :, 1])


@pytest.mark.parametrize(
    "layer, names, match",
    [
        (HCA, ["tail_kb", "tail_zb"], "Only a CSA layer has a series the next window reads"),
        (HCA, [f"index_tail_{name}" for name in SERIES], "This layer has no index_tail"),
        (SWA, [f"tail_{name}" for name in SERIES], "This layer has no tail"),
        (SWA, [f"index_tail_{name}" for name in SERIES], "This layer has no index_tail"),
    ],
    ids=["hca-b", "hca-index", "swa", "swa-index"],
)
def test_state_that_a_layer_lacks_is_refused(layer, names, match):
    state = state_pool(CONFIGS["v4"]).layer(layer)
    for name in names:
        with pytest.raises(ValueError, match=match):
            getattr(state, name)


def test_an_swa_layer_has_no_pages():
    pool = paged_pool(CONFIGS["v4"])
    assert pool.layer(SWA) is None
    assert [pool.layer(idx) is None for idx in range(4)] == [True, False, False, False]


def test_a_model_of_swa_layers_has_empty_blocks():
    pool = paged_pool(CONFIGS["tiny-swa"])
    assert pool.storage.shape == (NUM_BLOCKS, 0)


@pytest.mark.parametrize("name", ["indexer_keys_fp4", "indexer_scale"])
def test_an_hca_layer_has_no_keys(name):
    with pytest.raises(ValueError, match="Only a CSA layer has index keys"):
        getattr(paged_pool(CONFIGS["v4"]).layer(HCA), name)


@pytest.mark.parametrize("scale, stored", [(None, 1.0), (0.25, 0.25)])
def test_the_global_scale_is_one_tensor_of_all_layers(scale, stored):
    config = CacheConfig(SCHEDULE, index_format="nvfp4", index_global_scale=scale)
    pool = paged_pool(config)
    assert pool.indexer_global_scale.item() == stored
    pool.indexer_global_scale.fill_(3.0)
    for layer in (CSA, HCA, CSA_2):
        assert pool.layer(layer).indexer_global_scale.item() == 3.0


@pytest.mark.parametrize("slot", range(MAX_REQUESTS))
def test_reset_slot_zeroes_one_slot(slot):
    pool = state_pool(CONFIGS["tiny"])
    pool.storage.fill_(0xFF)
    pool.reset_slot(slot)
    assert pool.storage.amin(dim=1).tolist() == pool.storage.amax(dim=1).tolist()
    assert pool.storage[:, 0].tolist() == [0 if idx == slot else 0xFF for idx in range(3)]
    assert pool.layer(CSA).tail_ka[slot].eq(0).all()
