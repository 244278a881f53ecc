"""DeepSeek-V4.1's rows against packers written here from their specification, in numpy."""

import numpy as np
import pytest
import torch

from dsv4.formats import index_row, kv_row
from dsv4.kernels.reference import codec
from tests.kernels.test_codec import (
    E2M1,
    E2M1_TIES,
    E4M3,
    KINDS,
    SENTINEL,
    hostile_rows,
    np_amax,
    np_ceil_log2,
    np_e2m1,
    np_e4m3,
)

WIDTHS = {"head_dim": 512, "rope_dim": 64}


def np_fp8_32(row, scale_floor):
    """512 E4M3, then a UE8M0 byte per 32 channels."""
    groups = row.astype(np.float64).reshape(-1, 32)
    amax = np_amax(groups)
    ratio = np.maximum(amax, 1e-4) / 448 if scale_floor == "amax" else np.maximum(amax / 448, 1e-4)
    exponent = np_ceil_log2(ratio)
    codes = np_e4m3(groups / np.ldexp(1.0, exponent)[:, None])
    return codes.reshape(-1), (exponent + 127).astype(np.uint8)


def np_nvfp4_16(row):
    """256 bytes of code pairs, then an E4M3 byte per 16 channels; a NaN takes its group along."""
    groups = row.astype(np.float32).reshape(-1, 16)
    amax = np.maximum(np_amax(groups.astype(np.float64)).astype(np.float32), np.float32(6 * 2**-9))
    scales = np_e4m3((amax / np.float32(6)).astype(np.float64))
    values = np.array(E4M3, np.float32)[scales][:, None]
    with np.errstate(over="ignore"):
        codes = np_e2m1((groups / values).astype(np.float64))
    is_nan = np.isnan(groups).any(axis=1)
    scales = np.where(is_nan, 0x7F, scales).astype(np.uint8)
    codes = np.where(is_nan[:, None], 7, codes).reshape(-1, 2).astype(np.uint8)
    return codes[:, 0] + 16 * codes[:, 1], scales


def np_mxfp4(row):
    """64 bytes of code pairs, then a UE8M0 byte per 32 channels, from values that stay fp32."""
    groups = row.astype(np.float64).reshape(-1, 32)
    exponent = np_ceil_log2(np.maximum(np_amax(groups), 6 * 2.0**-126) / 6)
    codes = np_e2m1(groups / np.ldexp(1.0, exponent)[:, None]).reshape(-1, 2)
    return codes[:, 0] + 16 * codes[:, 1], (exponent + 127).astype(np.uint8)


def check_pages(fmt, values, pack_row, *, num_pages=2, rows_per_page=5, offset=64):
    """Write rows into sentinel-filled pages and compare every byte of the storage."""
    run_bytes = offset + fmt.page_bytes(rows_per_page, align=256) + 80
    storage = torch.full((num_pages, run_bytes), SENTINEL, dtype=torch.uint8)
    pages = fmt.pages(storage, offset=offset, rows_per_page=rows_per_page)
    rows = torch.tensor([7, -1, 0, 4, -1, 9, 2])
    codec.write_rows(pages, rows, codec.encode(fmt, values))
    expected = np.full((num_pages, run_bytes), SENTINEL, np.uint8)
    for row, value in zip(rows.tolist(), values.numpy(), strict=True):
        if row < 0:
            continue
        data, scales = pack_row(value)
        run, idx = expected[row // rows_per_page], row % rows_per_page
        if fmt.is_joined:
            first = offset + idx * (len(data) + len(scales))
            run[first : first + len(data) + len(scales)] = np.concatenate((data, scales))
        else:
            first, behind = offset + idx * len(data), offset + rows_per_page * len(data)
            run[first : first + len(data)] = data
            run[behind + idx * len(scales) : behind + (idx + 1) * len(scales)] = scales
    np.testing.assert_array_equal(storage.numpy(), expected)


@pytest.mark.parametrize("arrangement", ["split", "joined"])
@pytest.mark.parametrize("scale_floor", ["amax", "scale"])
@pytest.mark.parametrize("kind", KINDS)
def test_window_row_bytes(kind, scale_floor, arrangement):
    fmt = kv_row("fp8_32", **WIDTHS, arrangement=arrangement, scale_floor=scale_floor)
    check_pages(fmt, hostile_rows(kind, 7, 512), lambda row: np_fp8_32(row, scale_floor))


@pytest.mark.parametrize("arrangement", ["split", "joined"])
@pytest.mark.parametrize("kind", KINDS)
def test_entry_row_bytes(kind, arrangement):
    fmt = kv_row("nvfp4_16", **WIDTHS, arrangement=arrangement)
    check_pages(fmt, hostile_rows(kind, 7, 512), np_nvfp4_16)


@pytest.mark.parametrize("kind", KINDS)
def test_index_key_bytes(kind):
    fmt = index_row("mxfp4", head_dim=128, rounds_first=False)
    check_pages(fmt, hostile_rows(kind, 7, 128), np_mxfp4)


@pytest.mark.parametrize(
    ("amax", "by_amax", "by_scale"),
    [
        (0.0, -22, -13), (1e-5, -22, -13), (1e-4, -22, -13), (0.001, -18, -13), (0.027, -14, -13),
        (0.0448, -13, -13), (0.0449, -13, -13), (0.0546875, -13, -13), (0.055, -12, -12),
        (448.0, 0, 0), (449.0, 1, 1),
    ],
)  # fmt: skip
def test_floor_rules(amax, by_amax, by_scale):
    values = torch.zeros(1, 512)
    values[0, 5] = amax
    for scale_floor, exponent in (("amax", by_amax), ("scale", by_scale)):
        fmt = kv_row("fp8_32", **WIDTHS, scale_floor=scale_floor)
        assert int(codec.encode(fmt, values).scales[0, 0]) - 127 == exponent


def test_entry_codes_and_midpoints():
    """With 6 in each group the scale is 1, and a value is its own code."""
    values = [*E2M1, *(-value for value in E2M1)]
    ties = [sign * tie for sign in (1, -1) for tie in E2M1_TIES]
    rows = torch.full((1, 512), 6.0)
    rows[0, :15], rows[0, 16:30] = torch.tensor(values[:15]), torch.tensor(ties)
    rows[0, 15], rows[0, 32] = 6.0, -6.0
    fmt = kv_row("nvfp4_16", **WIDTHS)
    encoded = codec.encode(fmt, rows)
    codes = torch.stack((encoded.data[0] & 15, encoded.data[0] >> 4), dim=-1).flatten().tolist()
    assert codes[:15] == list(range(15)) and codes[32] == 15
    assert codes[16:30] == [*E2M1_TIES.values(), *(8 + code for code in E2M1_TIES.values())]
    assert set(encoded.scales[0].tolist()) == {0x38}
    decoded = codec.decode(fmt, encoded)[0]
    assert decoded[:15].tolist() == values[:15] and decoded[32] == -6.0
    assert torch.equal(torch.signbit(decoded[:15]), torch.signbit(torch.tensor(values[:15])))


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 0x01), (6 * 2.0**-9, 0x01), (6 * 2.0**-9 * 1.5, 0x02), (6.0, 0x38),
        (6 * 1.0625, 0x38), (6 * 1.0626, 0x39), (6 * 448.0, 0x7E), (1e30, 0x7E),
    ],
)  # fmt: skip
def test_entry_scale(amax, byte):
    values = torch.zeros(1, 512)
    values[0, 17] = amax
    assert codec.encode(kv_row("nvfp4_16", **WIDTHS), values).scales[0, :3].tolist() == [1, byte, 1]


def test_a_nan_poisons_its_group_alone():
    fmt, values = kv_row("nvfp4_16", **WIDTHS), hostile_rows("random", 3, 512)
    values[1, 40] = torch.nan
    is_nan = codec.decode(fmt, codec.encode(fmt, values)).isnan()
    assert is_nan[1, 32:48].all() and is_nan.sum() == 16


def test_decoded_rows_are_bf16_numbers():
    """Every product of an E2M1 and an E4M3 number, and every E4M3 times a power of two."""
    scales = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    products = codec.decode_e2m1(torch.arange(16))[:, None] * scales
    assert torch.equal(products.to(torch.bfloat16).float(), products)
    assert torch.equal(scales.to(torch.bfloat16).float(), scales)


@pytest.mark.parametrize(
    ("name", "percent"), [("fp8_32", 2.7), ("nvfp4_16", 9.6)], ids=["fp8_32", "nvfp4_16"]
)
def test_error_on_normed_vectors(name, percent):
    rows = hostile_rows("random", 200, 512)
    fmt = kv_row(name, **WIDTHS)
    decoded = codec.decode(fmt, codec.encode(fmt, rows))
    error = 100 * float((decoded - rows).norm() / rows.norm())
    assert 0.9 * percent < error < percent


def test_v4_rows_round_entries_a_second_time():
    fmt, v4 = kv_row("nvfp4_16", **WIDTHS), kv_row("fp8", **WIDTHS)
    once = codec.decode(fmt, codec.encode(fmt, hostile_rows("random", 61, 512)))
    again = codec.decode(v4, codec.encode(v4, once))
    assert 0.005 < float((again - once).norm() / once.norm()) < 0.03


def test_window_values_on_the_models_own_grid_are_stored_exactly():
    fmt = kv_row("fp8_32", **WIDTHS)
    once = codec.decode(fmt, codec.encode(fmt, hostile_rows("wide", 61, 512)))
    assert torch.equal(once, codec.decode(fmt, codec.encode(fmt, once)))
