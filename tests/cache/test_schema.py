"""What one layer stores: logical sizes, rings, tails, bytes, and where they lie in a run."""

import pytest
import torch

from dsv4.cache.memory.layout import block_layout, checkpoint_bytes, slot_layout
from dsv4.cache.memory.schema import LayerCacheSchema, build_schema, build_schemas
from dsv4.config import CacheConfig
from dsv4.layer_schedule import AttentionType, LayerSpec

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA


def schema_of(kind: AttentionType, **choices: object) -> LayerCacheSchema:
    return build_schema(CacheConfig.v4_flash(**choices), LayerSpec(0, kind))


@pytest.mark.parametrize(
    ("kind", "rows_a", "rows_b", "num_series"),
    [(SWA, 0, 0, 0), (CSA, 4, 4, 2), (HCA, 128, 0, 1)],
    ids=["swa", "csa", "hca"],
)
@pytest.mark.parametrize("drafts", [0, 3])
def test_logical_tail_sizes(kind, rows_a, rows_b, num_series, drafts):
    schema = schema_of(kind, drafts_per_step=drafts)
    assert (schema.tail_buffer_size_a, schema.tail_buffer_size_b) == (rows_a, rows_b)
    assert schema.num_series == num_series
    assert schema.ratio == kind.ratio


@pytest.mark.parametrize(
    ("kind", "tail_rows"), [(SWA, 0), (CSA, 8), (HCA, 16)], ids=["swa", "csa", "hca"]
)
@pytest.mark.parametrize("drafts", [0, 1, 7])
def test_rings_grow_with_the_drafts_of_a_step(kind, tail_rows, drafts):
    schema = schema_of(kind, drafts_per_step=drafts)
    assert schema.ring_rows == 128 + drafts
    assert schema.tail_rows == (tail_rows + drafts if tail_rows else 0)


@pytest.mark.parametrize(
    ("drafts", "sum_rows"), [(0, 7), (1, 7), (15, 7), (16, 9), (31, 9), (32, 10), (256, 24)]
)
def test_sums_of_closed_groups(drafts, sum_rows):
    assert schema_of(HCA, drafts_per_step=drafts).sum_rows == sum_rows
    assert schema_of(CSA, drafts_per_step=drafts).sum_rows == 0


@pytest.mark.parametrize("drafts", [0, 1, 7, 15, 16, 20, 31, 32, 33, 127, 128, 256])
def test_no_sums_are_replaced_that_a_length_may_need(drafts):
    ring = max(8, schema_of(HCA, drafts_per_step=drafts).sum_rows)
    for longest in range(1, 700):
        stored = {}  # the group in each row, once `longest` tokens were written
        for group in range(longest // 16):
            if group % 8 != 7:
                stored[group % ring] = group
        for length in range(max(0, longest - drafts - 1), longest + 1):
            needed = set(range(length // 128 * 8, length // 16))
            assert needed <= set(stored.values()), (longest, length)


def test_ring_follows_the_window():
    assert schema_of(SWA, sliding_window=61, drafts_per_step=2).ring_rows == 63


@pytest.mark.parametrize(
    ("kind", "block_tokens", "entries"),
    [(SWA, 256, 0), (CSA, 256, 64), (HCA, 256, 2), (CSA, 128, 32), (HCA, 128, 1), (HCA, 512, 4)],
    ids=lambda value: getattr(value, "name", value),
)
def test_entries_per_block(kind, block_tokens, entries):
    assert schema_of(kind, block_tokens=block_tokens).entries_per_block == entries


@pytest.mark.parametrize(
    ("kind", "indexer_dim"), [(SWA, 0), (CSA, 128), (HCA, 0)], ids=["swa", "csa", "hca"]
)
def test_widths(kind, indexer_dim):
    schema = schema_of(kind)
    assert (schema.entry_head_dim, schema.rope_dim) == (512, 64)
    assert schema.indexer_head_dim == indexer_dim
    assert schema.kv_row.row_bytes == 584 and schema.index_row.row_bytes == 68


@pytest.mark.parametrize(
    ("kind", "page", "index_page", "tail", "index_tail", "sums"),
    [
        (SWA, 0, 0, 0, 0, 0),
        (CSA, 37440, 64 * 68, 64 * 1024, 16 * 1024, 0),
        (HCA, 1728, 0, 64 * 1024, 0, 42 * 1024),
    ],
    ids=["swa", "csa", "hca"],
)
def test_bytes_of_flash(kind, page, index_page, tail, index_tail, sums):
    schema = schema_of(kind)
    assert schema.page_bytes == page
    assert schema.index_page_bytes == index_page
    assert (schema.tail_bytes, schema.index_tail_bytes) == (tail, index_tail)
    assert schema.sum_bytes == sums
    assert schema.ring_bytes == 130 * 576


def test_page_align_is_for_kv_pages_only():
    narrow, wide = schema_of(CSA, page_align=16), schema_of(CSA, page_align=4096)
    assert (narrow.page_bytes, wide.page_bytes) == (64 * 584, 40960)
    assert narrow.index_page_bytes == wide.index_page_bytes == 64 * 68
    assert (narrow.ring_bytes, wide.ring_bytes) == (128 * 584, 77824)


def test_tail_dtype_halves_the_tails():
    narrow, wide = schema_of(CSA, tail_dtype="bfloat16"), schema_of(CSA)
    assert narrow.tail_dtype is torch.bfloat16 and wide.tail_dtype is torch.float32
    assert narrow.tail_bytes * 2 == wide.tail_bytes
    assert narrow.index_tail_bytes * 2 == wide.index_tail_bytes


def test_build_schemas_follows_the_schedule():
    config = CacheConfig.v4_pro(include_mtp=True)
    kinds = [schema.attention_type for schema in build_schemas(config)]
    assert kinds == [layer.attention_type for layer in config.schedule]


@pytest.mark.parametrize("page_align", [16, 576])
def test_block_parts_follow_each_other(page_align):
    config = CacheConfig.tiny(page_align=page_align)
    schemas = build_schemas(config)
    layout = block_layout(schemas, page_align=page_align)
    parts = [
        *((idx, "entries", schemas[idx].page_bytes) for idx in (1, 2, 3)),
        *((idx, "index_keys", schemas[idx].index_page_bytes) for idx in (1, 3)),
    ]
    check_run(layout, parts, page_align)


@pytest.mark.parametrize("page_align", [16, 576])
def test_slot_parts_follow_each_other(page_align):
    config = CacheConfig.tiny(page_align=page_align, drafts_per_step=1)
    schemas = build_schemas(config)
    layout = slot_layout(schemas, page_align=page_align)
    parts = [
        *((idx, "ring", schemas[idx].ring_bytes) for idx in range(4)),
        *((idx, "tail", schemas[idx].tail_bytes) for idx in (1, 3)),
        *((idx, "index_tail", schemas[idx].index_tail_bytes) for idx in (1, 3)),
        (2, "tail", schemas[2].tail_bytes),
        (2, "sums", schemas[2].sum_bytes),
    ]
    check_run(layout, parts, page_align)
    assert checkpoint_bytes(schemas) == layout.offsets[2]["tail"]


def check_run(layout, parts, page_align):
    expected: list[dict[str, int]] = [{} for _ in layout.offsets]
    end = 0
    for layer_idx, name, size in parts:
        expected[layer_idx][name] = end
        assert end % 16 == 0
        end += size
    assert list(layout.offsets) == expected
    assert layout.num_bytes == end + layout.padding
    assert layout.num_bytes % page_align == 0 and 0 <= layout.padding < page_align


def test_window_layers_take_no_room_in_a_block():
    schemas = build_schemas(CacheConfig(compress_ratios=(0, 0)))
    layout = block_layout(schemas, page_align=576)
    assert (layout.num_bytes, layout.padding, layout.offsets) == (0, 0, ({}, {}))
