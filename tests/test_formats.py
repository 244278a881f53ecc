"""Byte layouts: row sizes, page strides, field offsets, typed views, refusals."""

import dataclasses

import pytest
import torch

from dsv4.formats import INDEX_FORMATS, KV_FORMATS, V41_FORMATS, index_row, kv_row, round_up

BF16, FP8, UE8M0, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32
KV_WIDTHS = {"head_dim": 512, "rope_dim": 64}

# name: (row bytes, value dtype, group, scale rule), fields as (name, section, offset, dtype, count)
KV_ROWS = {
    "fp8": ((584, BF16, 64, "ue8m0"), [
        ("nope", "data", 0, FP8, 448), ("rope", "data", 448, BF16, 64),
        ("scale", "scale", 0, UE8M0, 7),
    ]),
    "fp8_entry_scale": ((580, BF16, 448, "amax_fp32"), [
        ("nope", "data", 0, FP8, 448), ("rope", "data", 448, BF16, 64),
        ("scale", "scale", 0, FP32, 1),
    ]),
    "bf16": ((1024, BF16, 0, "none"), [
        ("nope", "data", 0, BF16, 448), ("rope", "data", 896, BF16, 64),
    ]),
    "fp32": ((2048, FP32, 0, "none"), [
        ("nope", "data", 0, FP32, 448), ("rope", "data", 1792, FP32, 64),
    ]),
    "fp8_32": ((528, BF16, 32, "ue8m0"), [
        ("kv", "data", 0, FP8, 512), ("scale", "scale", 0, UE8M0, 16),
    ]),
    "nvfp4_16": ((288, BF16, 16, "e4m3_poison"), [
        ("kv", "data", 0, torch.uint8, 256), ("scale", "scale", 0, FP8, 32),
    ]),
}  # fmt: skip
INDEX_ROWS = {
    "mxfp4": ((68, FP32, 32, "ue8m0"), [
        ("key", "data", 0, torch.uint8, 64), ("scale", "scale", 0, UE8M0, 4),
    ]),
    "nvfp4": ((72, FP32, 16, "e4m3"), [
        ("key", "data", 0, torch.uint8, 64), ("scale", "scale", 0, FP8, 8),
    ]),
    "fp8": ((132, FP32, 128, "pow2_fp32"), [
        ("key", "data", 0, FP8, 128), ("scale", "scale", 0, FP32, 1),
    ]),
    "bf16": ((256, BF16, 0, "none"), [("key", "data", 0, BF16, 128)]),
    "fp32": ((512, FP32, 0, "none"), [("key", "data", 0, FP32, 128)]),
}  # fmt: skip
ROWS = {
    **{f"kv_{name}": kv_row(name, **KV_WIDTHS) for name in KV_ROWS},
    **{f"index_{name}": index_row(name, head_dim=128) for name in INDEX_ROWS},
}
for_every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def test_every_format_is_in_the_tables():
    assert tuple(KV_ROWS) == (*KV_FORMATS, *V41_FORMATS)
    assert tuple(INDEX_ROWS) == INDEX_FORMATS


@pytest.mark.parametrize(
    ("row", "expected"),
    list(zip(ROWS.values(), [*KV_ROWS.values(), *INDEX_ROWS.values()], strict=True)),
    ids=ROWS,
)
def test_row_layout(row, expected):
    properties, fields = expected
    assert (row.row_bytes, row.value_dtype, row.group, row.scale_rule) == properties
    assert [dataclasses.astuple(field) for field in row.fields] == fields


@for_every_row
def test_fields_fill_the_data_record(row):
    end = 0
    for field in row.fields:
        if field.section == "data":
            assert field.offset == end
            end += field.count * field.dtype.itemsize
    assert end == row.data_bytes
    assert row.row_bytes - row.data_bytes == row.scale_bytes


def test_records_of_the_default_row():
    row = kv_row("fp8", **KV_WIDTHS)
    assert (row.data_bytes, row.scale_bytes, row.num_groups) == (576, 8, 7)


@pytest.mark.parametrize(
    ("row", "num_groups"),
    [
        (kv_row("fp8_entry_scale", **KV_WIDTHS), 1),
        (kv_row("bf16", **KV_WIDTHS), 0),
        (index_row("mxfp4", head_dim=128), 4),
        (index_row("nvfp4", head_dim=128), 8),
        (index_row("fp8", head_dim=128), 1),
    ],
    ids=["fp8_entry_scale", "bf16", "mxfp4", "nvfp4", "index_fp8"],
)
def test_num_groups(row, num_groups):
    assert row.num_groups == num_groups


@pytest.mark.parametrize(
    ("num_rows", "align", "stride"),
    [
        (64, 576, 37440), (2, 576, 1728), (2, 16, 1168), (64, 16, 37376), (1, 16, 592),
        (132, 16, 77088), (0, 576, 0),
    ],
)  # fmt: skip
def test_page_stride_of_the_default_row(num_rows, align, stride):
    assert kv_row("fp8", **KV_WIDTHS).page_bytes(num_rows, align=align) == stride


@pytest.mark.parametrize(
    ("size", "align", "expected"), [(0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 16, 32)]
)
def test_round_up(size, align, expected):
    assert round_up(size, align) == expected


@for_every_row
def test_pages_lie_where_the_table_says(row):
    rows_per_page, offset = 3, 32
    run_bytes = offset + row.page_bytes(rows_per_page, align=16) + 48
    storage = torch.zeros(2, run_bytes, dtype=torch.uint8)
    pages = row.pages(storage, offset=offset, rows_per_page=rows_per_page)
    assert pages.rows_per_page == rows_per_page
    pages.data.fill_(1)
    pages.scales.fill_(2)
    data_end = offset + rows_per_page * row.data_bytes
    scale_end = data_end + rows_per_page * row.scale_bytes
    expected_run = torch.zeros(run_bytes, dtype=torch.uint8)
    expected_run[offset:data_end] = 1
    expected_run[data_end:scale_end] = 2
    assert torch.equal(storage, expected_run.expand(2, -1))


@for_every_row
def test_field_is_a_typed_view(row):
    rows_per_page, offset = 3, 16
    run_bytes = offset + row.page_bytes(rows_per_page, align=16)
    storage = torch.zeros(2, run_bytes, dtype=torch.uint8)
    pages = row.pages(storage, offset=offset, rows_per_page=rows_per_page)
    for field in row.fields:
        view = pages.field(field.name)
        assert view.dtype is field.dtype
        assert view.shape == (2, rows_per_page, field.count)
        storage.zero_()
        view[1, 2].view(torch.uint8).fill_(0x3C)
        section_start, record_bytes = (
            (offset, row.data_bytes)
            if field.section == "data"
            else (offset + rows_per_page * row.data_bytes, row.scale_bytes)
        )
        start = section_start + 2 * record_bytes + field.offset
        changed = torch.zeros_like(storage)
        changed[1, start : start + field.count * field.dtype.itemsize] = 0x3C
        assert torch.equal(storage, changed)


def test_field_reads_through_the_view():
    row = kv_row("fp8", **KV_WIDTHS)
    storage = torch.zeros(1, row.page_bytes(2, align=16), dtype=torch.uint8)
    pages = row.pages(storage, offset=0, rows_per_page=2)
    pages.field("rope")[0, 1, 63] = 1.5
    # The last BF16 of row 1: 1.5 is 0x3FC0, low byte first.
    assert storage[0, 2 * 576 - 2 : 2 * 576].tolist() == [0xC0, 0x3F]
    storage[0, 2 * 576 + 8] = 127 + 3
    assert pages.field("scale")[0, 1, 0].float().item() == 8.0


@pytest.mark.parametrize(
    ("head_dim", "row_bytes"),
    [(96, 64 + 64 + 8), (160, 128 + 64 + 8), (544, 512 + 64 + 8), (608, 576 + 64 + 16)],
)
def test_scale_record_is_a_multiple_of_eight_bytes(head_dim, row_bytes):
    row = kv_row("fp8", head_dim=head_dim, rope_dim=32)
    assert row.scale_bytes % 8 == 0
    assert row.row_bytes == row_bytes


def test_pages_of_a_part_of_a_larger_storage():
    row = index_row("mxfp4", head_dim=128)
    storage = torch.zeros(4, row.page_bytes(2, align=16), dtype=torch.uint8)
    row.pages(storage[2:], offset=0, rows_per_page=2).data.fill_(1)
    assert storage.sum(dim=1).tolist() == [0, 0, 128, 128]


def test_unknown_formats_list_the_valid_ones():
    with pytest.raises(
        ValueError,
        match="Unknown KV format: expected one of fp8, fp8_entry_scale, bf16, fp32, fp8_32, "
        "nvfp4_16, got 'mxfp4'",
    ):
        kv_row("mxfp4", **KV_WIDTHS)
    with pytest.raises(
        ValueError,
        match="Unknown index format: expected one of mxfp4, nvfp4, fp8, bf16, fp32, got 'fp4'",
    ):
        index_row("fp4", head_dim=128)


def test_unknown_field_lists_the_fields():
    with pytest.raises(ValueError, match="fp8 has no field 'key'; it has nope, rope, scale"):
        kv_row("fp8", **KV_WIDTHS).field("key")
    pages = index_row("bf16", head_dim=128).pages(
        torch.zeros(1, 256, dtype=torch.uint8), offset=0, rows_per_page=1
    )
    with pytest.raises(ValueError, match="bf16 has no field 'scale'; it has key"):
        pages.field("scale")


@pytest.mark.parametrize("name", ["fp8_32", "nvfp4_16", "fp8"])
def test_joined_pages_have_each_rows_scales_behind_its_data(name):
    row = kv_row(name, **KV_WIDTHS, arrangement="joined")
    storage = torch.zeros(2, 32 + row.page_bytes(3, align=16), dtype=torch.uint8)
    pages = row.pages(storage, offset=32, rows_per_page=3)
    pages.data.fill_(1)
    pages.scales.fill_(2)
    run = torch.tensor([1] * row.data_bytes + [2] * row.scale_bytes, dtype=torch.uint8).repeat(3)
    assert torch.equal(storage[:, 32 : 32 + len(run)], run.expand(2, -1))
    assert not storage[:, :32].any() and not storage[:, 32 + len(run) :].any()
    assert pages.field("scale").shape == (2, 3, row.num_groups)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"arrangement": "tiled"}, "Unknown page_arrangement: expected one of split, joined, got"),
        ({"scale_floor": "none"}, "Unknown scale_floor: expected one of amax, scale, got 'none'"),
    ],
)
def test_unknown_choices_of_rows_list_the_valid_ones(choice, message):
    with pytest.raises(ValueError, match=message):
        kv_row("fp8_32", **KV_WIDTHS, **choice)


def test_rows_of_v41_are_quantised_from_fp32():
    assert [kv_row(name, **KV_WIDTHS).rounds_first for name in V41_FORMATS] == [False, False]
    assert kv_row("fp8", **KV_WIDTHS).rounds_first and index_row("mxfp4", head_dim=128).rounds_first
    assert not index_row("mxfp4", head_dim=128, rounds_first=False).rounds_first
    assert index_row("bf16", head_dim=128, rounds_first=False).rounds_first  # its code is BF16


def test_groups_must_divide_the_row():
    for name, dim, group in (("fp8_32", 80, 32), ("nvfp4_16", 72, 16)):
        message = f"Format {name} needs head_dim divisible by {group}, got {dim}"
        with pytest.raises(ValueError, match=message):
            kv_row(name, head_dim=dim, rope_dim=8)
    with pytest.raises(
        ValueError, match="Format fp8 needs head_dim - rope_dim divisible by 64, got 416"
    ):
        kv_row("fp8", head_dim=480, rope_dim=64)
    with pytest.raises(
        ValueError, match="Format mxfp4 needs index_head_dim divisible by 32, got 80"
    ):
        index_row("mxfp4", head_dim=80)
    with pytest.raises(
        ValueError, match="Format nvfp4 needs index_head_dim divisible by 16, got 72"
    ):
        index_row("nvfp4", head_dim=72)
