"""Bytes before anything is allocated: against the model's published sizes, and real tensors."""

import random
from fractions import Fraction
from itertools import combinations_with_replacement

import pytest

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.memory.capacity import Capacity
from dsv4.config import CacheConfig, YarnScaling
from dsv4.formats import INDEX_FORMATS, KV_FORMATS, round_up
from dsv4.kernels.index_scratch import DENSE_LIMIT

MIB = 2**20
PRESETS = {"flash": CacheConfig.v4_flash, "pro": CacheConfig.v4_pro}
COMPRESSED = ("csa_entries", "index_keys", "hca_entries")
COMPONENTS = [
    "csa_entries", "index_keys", "hca_entries", "block_padding",
    "window", "csa_tails", "index_tails", "hca_tails", "slot_padding", "undo_slots",
    "block_table", "plan_buffers", "pooling_scratch", "index_scratch", "attention_partials",
    "window_workspace", "rope_rows", "index_global_scale", "checkpoints",
]  # fmt: skip


def capacity_of(config: CacheConfig, **sizes: int) -> Capacity:
    defaults = {
        "max_requests": 1,
        "num_blocks": 8,
        "max_forward_tokens": 1,
        "max_request_tokens": 1024,
    }
    return Capacity(config, **(defaults | sizes))


def per_token(capacity: Capacity, column: str) -> Fraction:
    """Bytes of the compressed layers per token that the blocks can hold."""
    memory = capacity.memory()
    total = sum(getattr(memory[name], column) for name in COMPRESSED)
    return Fraction(total, capacity.num_blocks * capacity.config.block_tokens)


@pytest.mark.parametrize(
    ("preset", "kv_format", "index_format", "expected"),
    [
        ("flash", "fp8", "mxfp4", Fraction(21 * (584 + 68), 4) + Fraction(20 * 584, 128)),
        ("pro", "fp8", "mxfp4", Fraction(30 * (584 + 68), 4) + Fraction(31 * 584, 128)),
        ("flash", "fp8", "fp8", Fraction(385025, 100)),
        ("pro", "fp8", "fp8", Fraction(30 * (584 + 132), 4) + Fraction(31 * 584, 128)),
        ("flash", "bf16", "bf16", Fraction(6880)),
        ("pro", "bf16", "bf16", Fraction(9848)),
    ],
)
def test_payload_per_token(preset, kv_format, index_format, expected):
    config = PRESETS[preset](kv_format=kv_format, index_format=index_format)
    assert per_token(capacity_of(config), "payload") == expected


def test_payload_per_token_as_published():
    assert float(per_token(capacity_of(CacheConfig.v4_flash()), "payload")) == 3514.25
    assert float(per_token(capacity_of(CacheConfig.v4_pro()), "payload")) == 5031.4375


@pytest.mark.parametrize(
    ("preset", "csa", "index", "hca"),
    [("flash", 3066, 357, 91.25), ("pro", 4380, 510, 141.4375)],
)
def test_payload_per_token_by_component(preset, csa, index, hca):
    memory = capacity_of(PRESETS[preset]()).memory()
    assert [memory[name].payload / (8 * 256) for name in COMPRESSED] == [csa, index, hca]


@pytest.mark.parametrize(("preset", "expected"), [("flash", 3563.25), ("pro", 5106.75)])
def test_pages_allocated_per_token(preset, expected):
    assert float(per_token(capacity_of(PRESETS[preset]()), "allocated")) == expected


@pytest.mark.parametrize("page_align", [16, 576, 4096])
@pytest.mark.parametrize("preset", PRESETS)
def test_block_padding_is_shown_on_its_own(preset, page_align):
    capacity = capacity_of(PRESETS[preset](page_align=page_align), num_blocks=3)
    memory = capacity.memory()
    padding = memory["block_padding"]
    assert padding.payload == 0
    assert 0 <= padding.allocated < 3 * page_align
    blocks = sum(memory[name].allocated for name in COMPRESSED) + padding.allocated
    assert blocks % 3 == 0 and blocks // 3 % page_align == 0


def test_block_padding_of_flash():
    # 21 × 37440 + 21 × 4352 + 20 × 1728 = 912192 is 1583.67 × 576.
    assert capacity_of(CacheConfig.v4_flash(), num_blocks=1).memory()["block_padding"] == (0, 192)


@pytest.mark.parametrize(
    ("preset", "kv_format", "component", "mib"),
    [
        ("flash", "fp8", "window", 3.14),
        ("pro", "fp8", "window", 4.42),
        ("flash", "bf16", "window", 5.50),
        ("pro", "bf16", "window", 7.75),
        ("flash", "fp8", "csa_tails", 1.31),
        ("pro", "fp8", "csa_tails", 1.88),
        ("flash", "fp8", "index_tails", 0.33),
        ("pro", "fp8", "index_tails", 0.47),
        ("flash", "fp8", "hca_tails", 2.07),
        ("pro", "fp8", "hca_tails", 3.21),
    ],
)
def test_fixed_mib_with_mtp(preset, kv_format, component, mib):
    config = PRESETS[preset](include_mtp=True, kv_format=kv_format)
    payload = capacity_of(config).memory()[component].payload
    assert payload / MIB == pytest.approx(mib, abs=0.0051)


def test_drafts_lengthen_every_ring():
    memory = capacity_of(CacheConfig.v4_flash(drafts_per_step=3)).memory()
    assert memory["window"].payload == 43 * 131 * 584
    assert memory["csa_tails"].payload == 21 * 11 * 2 * 1024 * 4
    assert memory["index_tails"].payload == 21 * 11 * 2 * 256 * 4
    assert memory["hca_tails"].payload == 20 * (19 * 2 + 7 * 3) * 512 * 4


@pytest.mark.parametrize("preset", PRESETS)
def test_fixed_part_scales_with_requests_and_blocks_do_not(preset):
    one = capacity_of(PRESETS[preset](), max_requests=1).memory()
    three = capacity_of(PRESETS[preset](), max_requests=3).memory()
    for name in ("window", "csa_tails", "index_tails", "hca_tails", "slot_padding"):
        assert three[name] == tuple(3 * size for size in one[name])
    for name in (*COMPRESSED, "block_padding", "rope_rows"):
        assert three[name] == one[name]


def test_components_and_their_order():
    assert list(capacity_of(CacheConfig.tiny()).memory()) == COMPONENTS


def test_payload_is_at_most_what_is_allocated():
    for components in (capacity_of(PRESETS[name]()).memory() for name in PRESETS):
        assert all(part.payload <= part.allocated for part in components.values())


def test_shared_components():
    capacity = capacity_of(
        CacheConfig.v4_flash(), max_requests=3, max_forward_tokens=200, max_request_tokens=1000
    )
    memory = capacity.memory()
    assert capacity.max_request_blocks == 4
    assert memory["block_table"].allocated == 3 * 4 * 4
    assert capacity.max_table_updates == 3 + 0 + 1
    assert memory["plan_buffers"].allocated == (14 * 3 + 5 + 2 * 200 + 3 * 4) * 4
    assert memory["rope_rows"].allocated == 4 * (200 * 64 + 32) * 4
    assert memory["index_global_scale"].allocated == 4
    assert capacity.pooling_windows == 3 + 200 // 128
    assert memory["pooling_scratch"].allocated == 4 * (512 * 4 + 4)
    assert memory["window_workspace"].payload == (200 + 3 * 127) * 584


def index_scratch(config: CacheConfig, **sizes: int) -> int:
    return capacity_of(config, **sizes).index_bytes


def test_index_scratch_of_a_million_tokens():
    sizes = {"max_request_tokens": 2**20, "max_forward_tokens": 8192}
    for preset in ("flash", "pro"):
        # 4 groups of channels; the largest of 8 entries, and of 64
        row = 64 * 128 + 64 * 4 * (1 + 4) + 262144 * 4 + (32768 + 4096) * 4
        expected = 192 * MIB // row * row
        assert index_scratch(PRESETS[preset](), **sizes) == expected < 256 * MIB
    for name in INDEX_FORMATS:
        assert index_scratch(CacheConfig.v4_flash(index_format=name), **sizes) <= 192 * MIB


def test_index_scratch_holds_no_more_than_a_forward():
    config = CacheConfig.v4_flash(index_format="fp8")
    row = 64 * 128 + 64 * 4 + 1000 * 4
    for tokens in (1, 7):
        sizes = {"max_request_tokens": 4003, "max_forward_tokens": tokens}
        assert index_scratch(config, **sizes) == tokens * row


def test_scratch_of_a_rank():
    """A rank scores its own entries, also if they are fewer than are selected of all."""
    config = CacheConfig.v4_flash().split_context(1, 2)
    row = 64 * 128 + 64 * 4 * (1 + 4)
    for tokens, own in ((2**20, 131072 * 4 + (16384 + 2048) * 4), (4 * 600, 320 * 4)):
        sizes = {"max_request_tokens": tokens, "max_forward_tokens": 32}
        assert index_scratch(config, **sizes) == 32 * (row + own)
    chunks = Capacity(config, 1, 4096, 8192, 2**20)
    assert chunks.dense_bytes < DENSE_LIMIT / 2
    assert chunks.memory()["context_rows"].allocated == 8192 * 4096 * 4


def test_no_index_scratch_where_nothing_is_scored():
    config = CacheConfig.v4_flash()
    assert index_scratch(config, max_request_tokens=4 * 512 + 3) == 0
    assert index_scratch(config, max_request_tokens=4 * 513) > 0
    for ratios in ((0, 0), (128, 0)):
        assert index_scratch(CacheConfig(compress_ratios=ratios), max_request_tokens=2**16) == 0


def test_dense_rows_share_the_scratch_of_the_index():
    sizes = {"max_request_tokens": 2**17, "max_forward_tokens": 8192, "max_requests": 2}
    for preset, works in (("flash", 8192), ("pro", 16384)):
        capacity = capacity_of(PRESETS[preset](), num_blocks=600, **sizes)
        rows = 8192 + 127 + 2**15  # of windows, and of entries
        assert capacity.dense_bytes == rows * 1024 + 600 * 4 + round_up(4 * (1 + works), 16)
        longest = max(capacity.dense_bytes, capacity.index_bytes)
        assert capacity.memory()["index_scratch"].allocated == longest
    hca = capacity_of(CacheConfig(compress_ratios=(128, 0)), num_blocks=600, **sizes)
    assert hca.dense_bytes == (8319 + 2**10) * 1024 + 600 * 4 + round_up(4 * 8193, 16)


def test_scratch_of_a_million_tokens_has_a_limit():
    sizes = {"max_request_tokens": 2**20, "max_forward_tokens": 8192}
    for preset in ("flash", "pro"):
        capacity = capacity_of(PRESETS[preset](), num_blocks=4096, **sizes)
        assert capacity.index_scratch_bytes == capacity.dense_bytes < DENSE_LIMIT
        parts = ("index_scratch", "attention_partials", "window_workspace", "pooling_scratch")
        scratch = sum(capacity.memory()[name].allocated for name in parts)
        assert scratch <= (416 if preset == "flash" else 640) * MIB
    many = capacity_of(CacheConfig.v4_flash(), **sizes | {"max_forward_tokens": 65536})
    assert many.dense_bytes > DENSE_LIMIT == many.index_scratch_bytes


@pytest.mark.parametrize(
    ("choices", "tokens"),
    [({"kv_format": "bf16"}, 8192), ({"num_query_heads": 32}, 8192), ({}, 1), ({}, 127)],
)
def test_no_dense_rows_that_no_kernel_makes(choices, tokens):
    capacity = capacity_of(CacheConfig.v4_flash(**choices), max_forward_tokens=tokens)
    assert capacity.dense_bytes == 0


@pytest.mark.parametrize("batch", [1, 32])
def test_shared_bytes_of_decoding_at_1m_tokens(batch):
    sizes = {"max_requests": batch, "max_forward_tokens": batch, "max_request_tokens": 2**20}
    capacity = capacity_of(CacheConfig.v4_flash(), **sizes)
    shared = COMPONENTS[COMPONENTS.index("undo_slots") :]
    assert sum(capacity.memory()[name].allocated for name in shared) <= 110 * MIB


@pytest.mark.parametrize(
    ("max_request_tokens", "blocks"), [(1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (513, 3)]
)
def test_block_table_columns(max_request_tokens, blocks):
    config = CacheConfig.tiny()
    capacity = capacity_of(config, max_request_tokens=max_request_tokens)
    assert capacity.max_request_blocks == blocks
    window_only = CacheConfig(compress_ratios=(0,))
    assert capacity_of(window_only, max_request_tokens=max_request_tokens).max_request_blocks == 0


@pytest.mark.parametrize("max_requests", [1, 2, 3])
@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 9])
def test_workspace_holds_the_worst_split_of_a_forward(tokens, drafts, max_requests):
    config = CacheConfig.tiny(sliding_window=5, drafts_per_step=drafts)
    capacity = capacity_of(config, max_requests=max_requests, max_forward_tokens=tokens)
    assert capacity.max_step_tokens == drafts + 1
    splits = (
        counts
        for counts in combinations_with_replacement(range(tokens + 1), max_requests)
        if sum(counts) <= tokens
    )
    # A chunk of more tokens than a step reads 4 older rows and its own from the workspace.
    worst = max(sum(count + 4 for count in counts if count > drafts + 1) for counts in splits)
    assert capacity.workspace_rows == worst


@pytest.mark.parametrize("value", [-1, 1.5, "3", None], ids=repr)
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("max_requests", 1),
        ("num_blocks", 0),
        ("max_forward_tokens", 1),
        ("max_request_tokens", 1),
        ("num_checkpoints", 0),
        ("host_blocks", 0),
        ("host_slots", 0),
    ],
)
def test_refuses_bad_sizes(name, least, value):
    with pytest.raises(ValueError, match=f"Invalid {name}: expected an integer >= {least}, got"):
        capacity_of(CacheConfig.tiny(), **{name: value})


@pytest.mark.parametrize("name", ["max_requests", "max_forward_tokens", "max_request_tokens"])
def test_refuses_zero(name):
    with pytest.raises(ValueError, match=f"Invalid {name}: expected an integer >= 1, got 0"):
        capacity_of(CacheConfig.tiny(), **{name: 0})


def test_no_blocks_are_legal():
    memory = capacity_of(CacheConfig.tiny(), num_blocks=0).memory()
    assert all(memory[name] == (0, 0) for name in (*COMPRESSED, "block_padding"))


def test_refuses_requests_longer_than_the_model():
    config = CacheConfig.tiny(max_position=100)
    assert capacity_of(config, max_request_tokens=100).max_request_tokens == 100
    with pytest.raises(
        ValueError, match=r"Invalid max_request_tokens: expected at most 100 .*, got 101"
    ):
        capacity_of(config, max_request_tokens=101)


def random_case(seed: int) -> tuple[CacheConfig, dict[str, int]]:
    choose = random.Random(seed)
    rope_dim = choose.choice([16, 32, 64])
    index_format = choose.choice(INDEX_FORMATS)
    ratios = tuple(choose.choices([0, 4, 128], k=choose.randint(1, 6)))
    config = CacheConfig(
        compress_ratios=ratios,
        num_mtp_layers=choose.randint(0, 1),
        num_query_heads=choose.choice([1, 4]),
        head_dim=rope_dim + 64 * choose.randint(1, 3),
        rope_dim=rope_dim,
        sliding_window=choose.choice([8, 61, 128]),
        index_head_dim=choose.choice([64, 128]),
        yarn=choose.choice([None, YarnScaling()]),
        kv_format=choose.choice(KV_FORMATS),
        index_format=index_format,
        index_global_scale=0.5 if index_format == "nvfp4" and choose.random() < 0.5 else None,
        tail_dtype=choose.choice(["float32", "bfloat16"]),
        block_tokens=choose.choice([128, 256, 384]),
        page_align=choose.choice([16, 48, 576]),
        drafts_per_step=choose.choice([0, 1, 5]),
    )
    sizes = {
        "max_requests": choose.randint(1, 4),
        "num_blocks": choose.randint(1, 5),
        "max_forward_tokens": choose.choice([1, 2, 61, 200]),
        "max_request_tokens": choose.choice([1, 61, 300, 1000]),
        "num_checkpoints": choose.randint(0, 3) if any(ratios) else 0,
        "host_blocks": choose.randint(0, 3),
        "host_slots": choose.randint(0, 3),
    }
    return config, sizes


@pytest.mark.parametrize("seed", range(24))
def test_allocated_bytes_are_those_of_the_tensors(seed):
    config, sizes = random_case(seed)
    memory, manager = Capacity(config, **sizes).memory(), KVCacheManager(config, **sizes)
    host = manager.host_memory()
    assert host["host_blocks"].allocated == manager._books.host.blocks.nbytes
    assert host["host_slots"].allocated == manager._books.host.slots.nbytes
    tensors = manager.tensors()
    assert sum(part.allocated for part in memory.values()) == sum(
        tensor.nbytes for tensor in tensors.values()
    )

    def allocated(*names: str) -> int:
        return sum(memory[name].allocated for name in names)

    assert tensors["blocks"].nbytes == allocated(*COMPRESSED, "block_padding")
    assert tensors["slots"].nbytes == allocated(
        "window", "csa_tails", "index_tails", "hca_tails", "slot_padding"
    )
    for name in (
        "block_table", "plan_buffers", "index_scratch", "index_global_scale", "checkpoints"
    ):  # fmt: skip
        assert tensors[name].nbytes == allocated(name)
    assert tensors["partials"].nbytes == allocated("attention_partials")
    rope = tensors["frequencies"].nbytes + tensors["rope_rows"].nbytes
    assert rope == allocated("rope_rows")


def test_a_checkpoint_of_flash():
    memory = capacity_of(CacheConfig.v4_flash(), num_checkpoints=1).memory()["checkpoints"]
    assert memory.payload == 43 * 128 * 584 + 21 * 4 * 2 * (1024 + 256) * 4
    assert memory.allocated == 43 * 74880 + 21 * 8 * 2 * (1024 + 256) * 4


def test_captures_of_a_forward_are_bounded():
    config = CacheConfig.tiny(block_tokens=128)
    sizes = {"max_requests": 3, "max_forward_tokens": 300}
    assert capacity_of(config, **sizes, num_checkpoints=9).max_forward_checkpoints == 3 + 300 // 128
    assert capacity_of(config, **sizes, num_checkpoints=2).max_forward_checkpoints == 2
    plain, some = (capacity_of(config, **sizes, num_checkpoints=n) for n in (0, 2))
    assert some.plan_elements == plain.plan_elements + 3 * 2


def test_checkpoints_need_compressed_layers():
    with pytest.raises(ValueError, match="without compressed layers, got 1"):
        capacity_of(CacheConfig(compress_ratios=(0, 0)), num_checkpoints=1)


def test_random_cases_cover_every_choice():
    cases = [random_case(seed)[0] for seed in range(24)]
    assert {config.kv_format for config in cases} == set(KV_FORMATS)
    assert {config.index_format for config in cases} == set(INDEX_FORMATS)
    assert {ratio for config in cases for ratio in config.compress_ratios} == {0, 4, 128}
    assert any(not config.smallest_ratio for config in cases)
