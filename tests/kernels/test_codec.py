"""The codec against packers written here from the formats' specification, in numpy fp64."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from dsv4.formats import index_row, kv_row
from dsv4.kernels.reference import codec

SENTINEL = 0xA5
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# midpoint: the code it rounds to
E2M1_TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
E4M3 = [
    math.ldexp(code & 7, -9) if code < 8 else math.ldexp(8 + (code & 7), (code >> 3) - 10)
    for code in range(0x7F)
]
BF16_MAX = float(torch.finfo(torch.bfloat16).max)
INF, NAN = math.inf, math.nan

KV_ROWS = {
    name: kv_row(name, head_dim=512, rope_dim=64)
    for name in ("fp8", "fp8_entry_scale", "bf16", "fp32")
}
INDEX_ROWS = {
    name: index_row(name, head_dim=128) for name in ("mxfp4", "nvfp4", "fp8", "bf16", "fp32")
}
ALL_ROWS = {
    **{f"kv_{name}": row for name, row in KV_ROWS.items()},
    **{f"index_{name}": row for name, row in INDEX_ROWS.items()},
}
E4M3_ROWS = ["kv_fp8", "kv_fp8_entry_scale", "index_fp8"]
E2M1_ROWS = ["index_mxfp4", "index_nvfp4"]
PLAIN_ROWS = ["kv_bf16", "kv_fp32", "index_bf16", "index_fp32"]


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def random_rows(num_rows: int, dim: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(seed))


def normed_rows(num_rows: int, dim: int) -> torch.Tensor:
    rows = random_rows(num_rows, dim)
    return rows / rows.pow(2).mean(dim=1, keepdim=True).sqrt()


# The independent packers. Everything is fp64, in which all the quantities below are exact or
# too far from a rounding boundary to matter.


def np_nearest(magnitudes: np.ndarray, table: list[float]) -> np.ndarray:
    """Codes of the nearest table values, ties to the even code, saturating."""
    values = np.array(table)
    above = np.searchsorted(values, magnitudes).clip(1, len(values) - 1)
    to_low, to_high = magnitudes - values[above - 1], values[above] - magnitudes
    is_high = (to_high < to_low) | ((to_high == to_low) & (above % 2 == 0))
    return np.where(is_high, above, above - 1)


def np_e4m3(x: np.ndarray) -> np.ndarray:
    codes = np_nearest(np.abs(np.nan_to_num(x, posinf=1e300, neginf=-1e300)), E4M3)
    return np.where(np.isnan(x), 0x7F, codes | (np.signbit(x) << 7)).astype(np.uint8)


def np_e2m1(x: np.ndarray) -> np.ndarray:
    codes = np_nearest(np.abs(np.nan_to_num(x, posinf=1e300, neginf=-1e300)), E2M1)
    return np.where(np.isnan(x), 7, codes | (np.signbit(x) << 3)).astype(np.uint8)


def np_bf16(x: np.ndarray) -> np.ndarray:
    """Nearest BF16 values, ties to even, as fp64."""
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))
    step = np.ldexp(1.0, np.maximum(exponent - 8, -133))
    with np.errstate(invalid="ignore"):
        rounded = np.rint(x / step) * step
    rounded = np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, x), rounded)
    return np.copysign(rounded, x)


def np_bf16_bytes(values: np.ndarray) -> np.ndarray:
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), 0x7FFF, bits).astype("<u2").view(np.uint8)


def np_amax(groups: np.ndarray) -> np.ndarray:
    return np.minimum(np.abs(np.nan_to_num(groups, posinf=np.inf, neginf=-np.inf)), BF16_MAX).max(
        axis=-1
    )


def np_ceil_log2(ratio: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(ratio)
    return exponent - (mantissa == 0.5)


def np_fp8_row(row: np.ndarray, rope_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 | BF16, then one UE8M0 byte per 64 channels and zeros up to 8 bytes."""
    values = np_bf16(row.astype(np.float64))
    nope, rope = values[: len(row) - rope_dim], values[len(row) - rope_dim :]
    groups = nope.reshape(-1, 64)
    exponent = np_ceil_log2(np.maximum(np_amax(groups), 1e-4) / 448)
    codes = np_e4m3(groups / np.ldexp(1.0, exponent)[:, None])
    scales = np.zeros(-(-len(exponent) // 8) * 8, np.uint8)
    scales[: len(exponent)] = exponent + 127
    return np.concatenate((codes.reshape(-1), np_bf16_bytes(rope))), scales


def np_mxfp4_row(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = np_bf16(row.astype(np.float64)).reshape(-1, 32)
    exponent = np_ceil_log2(np.maximum(np_amax(groups), 6 * 2.0**-126) / 6)
    codes = np_e2m1(groups / np.ldexp(1.0, exponent)[:, None]).reshape(-1, 2)
    return codes[:, 0] + 16 * codes[:, 1], (exponent + 127).astype(np.uint8)


def np_index_fp8_row(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values = np_bf16(row.astype(np.float64))
    scale = np.ldexp(1.0, np_ceil_log2(np.maximum(np_amax(values), 1e-4) / 448))
    return np_e4m3(values / scale), np.array([scale], "<f4").view(np.uint8)


def np_nvfp4_row(row: np.ndarray, global_scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Unlike the others in fp32, operation by operation: the global scale is any number."""
    groups = np_bf16(row.astype(np.float64)).astype(np.float32).reshape(-1, 16)
    amax = np_amax(groups.astype(np.float64)).astype(np.float32)
    with np.errstate(over="ignore"):
        target = amax / (np.float32(6) * np.float32(global_scale))
    stored = np_e4m3(np.clip(target, 2.0**-9, 448).astype(np.float64))
    scale = np.array(E4M3, np.float32)[stored] * np.float32(global_scale)
    codes = np_e2m1((groups / scale[:, None]).astype(np.float64)).reshape(-1, 2)
    return codes[:, 0] + 16 * codes[:, 1], stored


def hostile_rows(kind: str, num_rows: int, dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    normal = torch.randn(num_rows, dim, generator=generator)
    if kind == "random":
        return normal
    if kind == "wide":
        exponents = torch.randint(-40, 40, (num_rows, dim), generator=generator)
        return normal * torch.exp2(exponents.float())
    if kind == "tiny":
        return normal * 1e-6
    if kind == "floor":
        return normal.clamp(-1, 1) * 1e-4
    if kind == "huge":
        return normal * 3e37
    if kind == "overflow":
        return normal.sign() * 3.4e38
    if kind == "zero":
        return torch.zeros(num_rows, dim) * normal.sign()
    if kind == "denormal":
        return normal * 1e-39
    if kind == "coarse":
        # Multiples of 1/8 meet the midpoints of both codes.
        return (normal * 32).round() / 8
    special = torch.tensor([NAN, INF, -INF, 0.0, -0.0, BF16_MAX, -3.4e38, 1e-45, -NAN])
    picks = torch.randint(len(special), (num_rows, dim), generator=generator)
    is_special = torch.rand(num_rows, dim, generator=generator) < 0.02
    return torch.where(is_special, special[picks], normal)


KINDS = [
    "random", "wide", "tiny", "floor", "huge", "overflow", "zero", "denormal", "coarse", "special",
]  # fmt: skip


def check_pages(fmt, values, pack_row, *, num_pages=2, rows_per_page=5, offset=64, **scale):
    """Write rows into sentinel-filled pages and compare every byte of the storage."""
    run_bytes = offset + fmt.page_bytes(rows_per_page, align=576) + 80
    storage = torch.full((num_pages, run_bytes), SENTINEL, dtype=torch.uint8)
    pages = fmt.pages(storage, offset=offset, rows_per_page=rows_per_page)
    rows = torch.tensor([7, -1, 0, 4, -1, 9, 2])
    codec.write_rows(pages, rows, codec.encode(fmt, values, **scale))

    expected = np.full((num_pages, run_bytes), SENTINEL, np.uint8)
    for row, value in zip(rows.tolist(), values.numpy(), strict=True):
        if row < 0:
            continue
        data, scales = pack_row(value)
        run, idx = expected[row // rows_per_page], row % rows_per_page
        start = offset + idx * fmt.data_bytes
        run[start : start + fmt.data_bytes] = data
        start = offset + rows_per_page * fmt.data_bytes + idx * fmt.scale_bytes
        run[start : start + fmt.scale_bytes] = scales
    np.testing.assert_array_equal(storage.numpy(), expected)

    is_real = rows >= 0
    again = codec.read_rows(pages, rows[is_real])
    encoded = codec.encode(fmt, values[is_real], **scale)
    assert torch.equal(again.data, encoded.data) and torch.equal(again.scales, encoded.scales)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_dim", "rope_dim"), [(512, 64), (160, 32)], ids=["v4", "small"])
def test_fp8_page_bytes(kind, head_dim, rope_dim):
    fmt = kv_row("fp8", head_dim=head_dim, rope_dim=rope_dim)
    check_pages(fmt, hostile_rows(kind, 7, head_dim), lambda row: np_fp8_row(row, rope_dim))


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp4_page_bytes(kind):
    check_pages(INDEX_ROWS["mxfp4"], hostile_rows(kind, 7, 128), np_mxfp4_row)


@pytest.mark.parametrize("kind", KINDS)
def test_index_fp8_page_bytes(kind):
    check_pages(INDEX_ROWS["fp8"], hostile_rows(kind, 7, 128), np_index_fp8_row)


@pytest.mark.parametrize("global_scale", [None, 0.25, 0.0123], ids=["no_global", "0.25", "0.0123"])
@pytest.mark.parametrize("kind", KINDS)
def test_nvfp4_page_bytes(kind, global_scale):
    scale = None if global_scale is None else torch.tensor(global_scale)
    check_pages(
        INDEX_ROWS["nvfp4"],
        hostile_rows(kind, 7, 128),
        lambda row: np_nvfp4_row(row, 1.0 if global_scale is None else global_scale),
        global_scale=scale,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_page_bytes(kind):
    def pack(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np_bf16_bytes(np_bf16(row.astype(np.float64))), np.zeros(0, np.uint8)

    check_pages(KV_ROWS["bf16"], hostile_rows(kind, 7, 512), pack)


def test_fp32_page_bytes():
    def pack(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bits = np.where(np.isnan(row), 0x7FC00000, row.view(np.uint32)).astype("<u4")
        return bits.view(np.uint8), np.zeros(0, np.uint8)

    check_pages(KV_ROWS["fp32"], hostile_rows("special", 7, 512), pack)


@pytest.mark.parametrize("kind", ["random", "wide", "tiny", "zero", "denormal", "coarse"])
def test_fp8_rows_decode_to_code_times_scale(kind):
    fmt, values = KV_ROWS["fp8"], hostile_rows(kind, 9, 512)
    decoded = codec.decode(fmt, codec.encode(fmt, values))
    for row, actual in zip(values.numpy(), decoded.numpy(), strict=True):
        data, scales = np_fp8_row(row, 64)
        signs = np.where(data[:448] & 0x80, -1.0, 1.0)
        magnitudes = np.array(E4M3)[data[:448] & 0x7F]
        nope = signs * magnitudes * np.ldexp(1.0, scales[:7].astype(int) - 127).repeat(64)
        expected = np.concatenate((nope, np_bf16(row[448:].astype(np.float64))))
        np.testing.assert_array_equal(actual.astype(np.float64), expected)
        np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


@pytest.mark.parametrize("name", ALL_ROWS)
def test_zero_rows(name):
    fmt = ALL_ROWS[name]
    encoded = codec.encode(fmt, torch.zeros(0, fmt.dim))
    assert encoded.data.shape == (0, fmt.data_bytes)
    assert encoded.scales.shape == (0, fmt.scale_bytes)
    assert codec.decode(fmt, encoded).shape == (0, fmt.dim)
    storage = torch.full((1, fmt.page_bytes(2, align=16)), SENTINEL, dtype=torch.uint8)
    pages = fmt.pages(storage, offset=0, rows_per_page=2)
    codec.write_rows(pages, torch.zeros(0, dtype=torch.int64), encoded)
    assert bool((storage == SENTINEL).all())
    assert codec.read_rows(pages, torch.zeros(0, dtype=torch.int64)).data.shape[0] == 0


@pytest.mark.parametrize("name", ALL_ROWS)
def test_skipped_rows_write_nothing(name):
    fmt = ALL_ROWS[name]
    storage = torch.full((2, fmt.page_bytes(3, align=16)), SENTINEL, dtype=torch.uint8)
    pages = fmt.pages(storage, offset=0, rows_per_page=3)
    codec.write_rows(pages, torch.tensor([-1, -1]), codec.encode(fmt, random_rows(2, fmt.dim)))
    assert bool((storage == SENTINEL).all())


@pytest.mark.parametrize("name", ALL_ROWS)
def test_rows_do_not_depend_on_each_other(name):
    fmt = ALL_ROWS[name]
    values = hostile_rows("wide", 61, fmt.dim)
    together = codec.encode(fmt, values)
    for idx in (0, 30, 60):
        alone = codec.encode(fmt, values[idx : idx + 1])
        assert torch.equal(alone.data[0], together.data[idx])
        assert torch.equal(alone.scales[0], together.scales[idx])


@pytest.mark.parametrize("name", ALL_ROWS)
def test_inputs_need_not_be_contiguous(name):
    fmt = ALL_ROWS[name]
    values = random_rows(fmt.dim, 5).T
    strided, packed = codec.encode(fmt, values), codec.encode(fmt, values.contiguous())
    assert torch.equal(strided.data, packed.data) and torch.equal(strided.scales, packed.scales)


def test_e2m1_codes():
    codes = torch.arange(16, dtype=torch.uint8)
    values = codec.decode_e2m1(codes)
    expected = f32(*E2M1, *(-v for v in E2M1))
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(codec.encode_e2m1(values), codes)


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("midpoint", E2M1_TIES)
def test_e2m1_midpoints(midpoint, sign):
    tie, below = E2M1_TIES[midpoint], sum(v < midpoint for v in E2M1) - 1
    x = f32(midpoint)
    x = torch.cat((torch.nextafter(x, f32(0)), x, torch.nextafter(x, f32(INF))))
    sign_bit = 8 if sign < 0 else 0
    expected = [sign_bit + below, sign_bit + tie, sign_bit + below + 1]
    assert codec.encode_e2m1(sign * x).tolist() == expected


def test_e2m1_ties_as_values():
    ties = codec.decode_e2m1(codec.encode_e2m1(f32(*E2M1_TIES)))
    assert ties.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (6.0, 7), (6.5, 7), (1e30, 7), (INF, 7), (-6.0, 15), (-7.0, 15), (-INF, 15),
        (0.0, 0), (-0.0, 8), (1e-45, 0), (-1e-45, 8), (NAN, 7),
    ],
)  # fmt: skip
def test_e2m1_special_values(value, code):
    assert codec.encode_e2m1(f32(value)).tolist() == [code]


def test_e2m1_negative_nan_is_plus_six():
    negative_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    assert codec.encode_e2m1(negative_nan).tolist() == [7]


@pytest.mark.parametrize("name", E2M1_ROWS)
def test_nibble_order(name):
    fmt = ALL_ROWS[name]
    values = torch.zeros(1, 128)
    values[0, :16] = f32(6, 0.5, 1, -1.5, 2, -3, 4, -6, *([0.0] * 8))
    data = codec.encode(fmt, values).data[0]
    assert data[:8].tolist() == [0x17, 0xB2, 0xD4, 0xF6, 0, 0, 0, 0]
    assert torch.equal(codec.decode(fmt, codec.encode(fmt, values)), values)


def test_e4m3_codes_round_trip():
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    is_nan = (codes & 0x7F) == 0x7F
    assert torch.equal(torch.isnan(values), is_nan)
    table = f32(*E4M3)
    assert torch.equal(values[:0x7F], table) and torch.equal(values[0x80:0xFF], -table)
    expected = torch.where(is_nan, torch.full_like(codes, 0x7F), codes)
    assert torch.equal(codec.encode_e4m3(values), expected)


def test_e4m3_midpoints_go_to_the_even_code():
    low, high = np.array(E4M3[:-1]), np.array(E4M3[1:])
    middle = torch.from_numpy((low + high) / 2).float()
    assert torch.equal(middle.double(), torch.from_numpy((low + high) / 2))
    codes = np.arange(0x7E)
    even = torch.from_numpy(np.where(codes % 2, codes + 1, codes).astype(np.uint8))
    below = torch.from_numpy(codes.astype(np.uint8))
    for sign, bit in ((1, 0), (-1, 0x80)):
        assert torch.equal(codec.encode_e4m3(sign * middle), even | bit)
        down = torch.nextafter(middle, f32(0))
        up = torch.nextafter(middle, f32(INF))
        assert torch.equal(codec.encode_e4m3(sign * down), below | bit)
        assert torch.equal(codec.encode_e4m3(sign * up), (below + 1) | bit)


def test_e4m3_against_fp64():
    x = hostile_rows("wide", 40, 512).flatten()
    x = torch.cat((x, torch.linspace(-500, 500, 20001), torch.linspace(-0.03, 0.03, 20001)))
    expected = torch.from_numpy(np_e4m3(x.double().numpy()))
    assert torch.equal(codec.encode_e4m3(x), expected)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (448.0, 0x7E), (449.0, 0x7E), (464.0, 0x7E), (480.0, 0x7E), (1e30, 0x7E), (INF, 0x7E),
        (-448.0, 0xFE), (-1e30, 0xFE), (-INF, 0xFE), (0.0, 0x00), (-0.0, 0x80),
        (2.0**-9, 0x01), (2.0**-10, 0x00), (3 * 2.0**-10, 0x02), (7 * 2.0**-9, 0x07),
        (2.0**-6, 0x08), (-(2.0**-9), 0x81), (1e-45, 0x00), (-1e-45, 0x80), (NAN, 0x7F),
    ],
)  # fmt: skip
def test_e4m3_special_values(value, code):
    assert codec.encode_e4m3(f32(value)).tolist() == [code]


def test_e4m3_negative_nan():
    negative_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    assert codec.encode_e4m3(negative_nan).tolist() == [0x7F]


@pytest.mark.parametrize("largest", [448, 6])
def test_ceil_log2_ratio_is_exact(largest):
    powers = torch.exp2(torch.arange(-110, 119, dtype=torch.float64))
    edges = torch.cat([(powers * factor).float() for factor in (1, largest, 1.5, 1.75, 1.1)])
    edges = edges[torch.isfinite(edges)]
    up, down = torch.nextafter(edges, f32(INF)), torch.nextafter(edges, f32(0))
    random = hostile_rows("wide", 1, 500)[0].abs()
    amax = torch.cat((edges, up, down, random))
    amax = amax[torch.isfinite(amax)]
    for value, exponent in zip(
        amax.tolist(), codec.ceil_log2_ratio(amax, float(largest)).tolist(), strict=True
    ):
        ratio = Fraction(value) / largest
        assert Fraction(2) ** (exponent - 1) < ratio <= Fraction(2) ** exponent


def test_power_of_two():
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    expected = [math.ldexp(1.0, e) for e in exponents.tolist()]
    assert codec.power_of_two(exponents).tolist() == expected


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 127 - 22), (1e-6, 127 - 22), (1e-4, 127 - 22), (448 * 2.0**-22, 127 - 22),
        (450 * 2.0**-22, 127 - 21), (448.0, 127), (450.0, 128), (224.0, 126), (1.0, 127 - 8),
    ],
)  # fmt: skip
def test_fp8_group_scale(amax, byte):
    values = torch.zeros(1, 512)
    values[0, 64 + 13] = -amax
    scales = codec.encode(KV_ROWS["fp8"], values).scales[0].tolist()
    assert scales == [105, byte, 105, 105, 105, 105, 105, 0]


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 1), (6 * 2.0**-126, 1), (2.0**-120, 127 - 122), (6.0, 127), (6.0625, 128),
        (3.0, 126), (4.0, 127), (1.0, 127 - 2), (6 * 2.0**125, 127 + 125),
    ],
)  # fmt: skip
def test_mxfp4_group_scale(amax, byte):
    values = torch.zeros(1, 128)
    values[0, 32 + 5] = amax
    assert codec.encode(INDEX_ROWS["mxfp4"], values).scales[0].tolist() == [1, byte, 1, 1]


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 0x01), (6 * 2.0**-9, 0x01), (1.5 * 2.0**-9, 0x01), (6.0, 0x38), (6.375, 0x38),
        (6.4375, 0x39), (12.0, 0x40), (2688.0, 0x7E), (1e30, 0x7E),
    ],
)  # fmt: skip
def test_nvfp4_group_scale(amax, byte):
    values = torch.zeros(1, 128)
    values[0, 16 + 3] = amax
    scales = codec.encode(INDEX_ROWS["nvfp4"], values).scales[0].tolist()
    assert scales == [0x01, byte, *([0x01] * 6)]


def test_nvfp4_divides_by_the_rounded_scale():
    values = torch.zeros(1, 128)
    # 6.375 / 6 = 1.0625 is a tie and goes to 1: 2.52 / 1 is 3, but 2.52 / 1.0625 would be 2.
    values[0, :2] = f32(6.375, 2.515625)
    decoded = codec.decode(INDEX_ROWS["nvfp4"], codec.encode(INDEX_ROWS["nvfp4"], values))
    assert decoded[0, :2].tolist() == [6.0, 3.0]


@pytest.mark.parametrize("global_scale", [0.5, 2.0**-7, 0.011])
def test_nvfp4_global_scale(global_scale):
    fmt, scale = INDEX_ROWS["nvfp4"], torch.tensor(global_scale)
    values = random_rows(20, 128) * global_scale * 100
    encoded = codec.encode(fmt, values, global_scale=scale)
    decoded = codec.decode(fmt, encoded, global_scale=scale)
    without = codec.decode(fmt, encoded)
    torch.testing.assert_close(decoded, without * scale, rtol=2e-7, atol=0)
    error = (decoded - values).norm() / values.norm()
    assert 0.085 < float(error) < 0.105


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(0.0, 2.0**-22), (1e-4, 2.0**-22), (448.0, 1.0), (450.0, 2.0), (1.0, 2.0**-8)],
)
def test_index_fp8_scale_is_a_power_of_two(amax, scale):
    values = torch.zeros(1, 128)
    values[0, 100] = amax
    stored = codec.encode(INDEX_ROWS["fp8"], values).scales
    assert stored.view(torch.float32).tolist() == [[scale]]


@pytest.mark.parametrize("amax", [0.0, 1e-6, 1e-4, 1.0, 3.140625, 448.0, 1e30])
def test_entry_scale_is_amax_over_448(amax):
    values = torch.zeros(1, 512)
    values[0, 300] = -amax
    values[0, 500] = 1e35
    stored = codec.encode(KV_ROWS["fp8_entry_scale"], values).scales.view(torch.float32)
    rounded = torch.tensor(amax).bfloat16().float()
    assert torch.equal(stored, (torch.maximum(rounded, torch.tensor(1e-4)) / 448).view(1, 1))


@pytest.mark.parametrize("kind", ["random", "wide", "tiny", "zero", "denormal", "coarse"])
@pytest.mark.parametrize("name", [name for name in ALL_ROWS if name != "index_nvfp4"])
def test_decoded_values_are_stored_exactly(name, kind):
    fmt = ALL_ROWS[name]
    values = hostile_rows(kind, 61, fmt.dim)
    once = codec.decode(fmt, codec.encode(fmt, values))
    twice = codec.decode(fmt, codec.encode(fmt, once))
    assert torch.equal(once.view(torch.int32), twice.view(torch.int32))


def test_decoded_nvfp4_values_are_stored_exactly_where_scales_are_normal():
    fmt = INDEX_ROWS["nvfp4"]
    once = codec.decode(fmt, codec.encode(fmt, random_rows(200, 128)))
    assert torch.equal(codec.decode(fmt, codec.encode(fmt, once)), once)


@pytest.mark.parametrize(
    "name", ["kv_fp8_entry_scale", "kv_bf16", "kv_fp32", "index_bf16", "index_fp32"]
)
def test_reencoding_reproduces_the_bytes(name):
    fmt = ALL_ROWS[name]
    encoded = codec.encode(fmt, random_rows(61, fmt.dim))
    again = codec.encode(fmt, codec.decode(fmt, encoded))
    assert torch.equal(again.data, encoded.data) and torch.equal(again.scales, encoded.scales)


@pytest.mark.parametrize(
    ("name", "half_code"), [("kv_fp8", 0x76), ("index_fp8", 0x76), ("index_mxfp4", 5)]
)
def test_reencoding_power_of_two_scales_reproduces_the_bytes(name, half_code):
    """A group whose largest code is half the format's largest takes the next smaller scale."""
    fmt = ALL_ROWS[name]
    encoded = codec.encode(fmt, random_rows(400, fmt.dim))
    again = codec.encode(fmt, codec.decode(fmt, encoded))
    nope_dim = fmt.dim - fmt.rope_dim
    if name == "index_mxfp4":
        codes = torch.stack((encoded.data & 7, (encoded.data >> 4) & 7), dim=-1).flatten(1)
        old, new = encoded.data, again.data
    else:
        codes = encoded.data[:, :nope_dim] & 0x7F
        old, new = encoded.data[:, :nope_dim], again.data[:, :nope_dim]
    is_half = codes.unflatten(1, (-1, fmt.group)).amax(dim=-1) == half_code
    assert bool(is_half.any()) and not bool(is_half.all())
    is_same = (old == new).unflatten(1, (fmt.num_groups, -1)).all(dim=-1)
    assert torch.equal(is_same, ~is_half)
    assert torch.equal(encoded.data[:, nope_dim:], again.data[:, nope_dim:])
    third = codec.encode(fmt, codec.decode(fmt, again))
    assert torch.equal(third.data, again.data) and torch.equal(third.scales, again.scales)


@pytest.mark.parametrize("name", ["fp8", "fp8_entry_scale", "bf16"])
def test_rope_part_is_the_rounded_bf16(name):
    fmt, values = KV_ROWS[name], hostile_rows("wide", 20, 512)
    decoded = codec.decode(fmt, codec.encode(fmt, values))
    assert torch.equal(decoded[:, 448:], values[:, 448:].bfloat16().float())


@pytest.mark.parametrize("name", ALL_ROWS)
def test_decoded_values_fit_the_value_dtype(name):
    fmt = ALL_ROWS[name]
    decoded = codec.decode(fmt, codec.encode(fmt, random_rows(20, fmt.dim)))
    assert decoded.dtype is torch.float32
    assert torch.equal(decoded.to(fmt.value_dtype).float(), decoded)


@pytest.mark.parametrize(
    ("name", "percent"),
    [
        ("kv_fp8", 2.66), ("kv_fp8_entry_scale", 2.63), ("index_fp8", 2.7), ("index_mxfp4", 11.5),
        ("index_nvfp4", 9.5),
    ],
)  # fmt: skip
def test_error_on_normed_vectors(name, percent):
    fmt = ALL_ROWS[name]
    values = normed_rows(500, fmt.dim)
    decoded = codec.decode(fmt, codec.encode(fmt, values))
    nope = slice(0, fmt.dim - fmt.rope_dim)
    error = (decoded - values)[:, nope].norm() / values[:, nope].norm()
    assert abs(100 * float(error) - percent) <= 0.3


def test_requantising_the_models_own_grid():
    on_grid = codec.decode(KV_ROWS["fp8"], codec.encode(KV_ROWS["fp8"], normed_rows(300, 512)))
    again = codec.decode(KV_ROWS["fp8"], codec.encode(KV_ROWS["fp8"], on_grid))
    assert torch.equal(again, on_grid)
    fmt = KV_ROWS["fp8_entry_scale"]
    other = codec.decode(fmt, codec.encode(fmt, on_grid))
    error = (other - on_grid)[:, :448].norm() / on_grid[:, :448].norm()
    assert 0.02 < float(error) < 0.03


def encode_first(name: str, first: float) -> tuple[int, codec.EncodedRows]:
    """The code of `first` as channel 0 of a row that is 1 in channel 1 and 0 elsewhere."""
    fmt = ALL_ROWS[name]
    values = torch.zeros(1, fmt.dim)
    values[0, :2] = f32(first, 1.0)
    encoded = codec.encode(fmt, values)
    return int(encoded.data[0, 0]), encoded


@pytest.mark.parametrize(
    ("value", "code"), [(NAN, 0x7F), (0.0, 0x00), (-0.0, 0x80), (1e-30, 0x00), (-1e-40, 0x80)]
)
@pytest.mark.parametrize("name", E4M3_ROWS)
def test_special_values_leave_the_scale_of_e4m3_rows_alone(name, value, code):
    actual, encoded = encode_first(name, value)
    assert actual == code
    assert torch.equal(encoded.scales, encode_first(name, 0.5)[1].scales)


@pytest.mark.parametrize(
    ("value", "code"), [(NAN, 7), (0.0, 0), (-0.0, 8), (1e-30, 0), (-1e-40, 8)]
)
@pytest.mark.parametrize("name", E2M1_ROWS)
def test_special_values_leave_the_scale_of_e2m1_rows_alone(name, value, code):
    actual, encoded = encode_first(name, value)
    assert actual & 15 == code
    assert torch.equal(encoded.scales, encode_first(name, 0.5)[1].scales)


@pytest.mark.parametrize("value", [INF, 3.4e38], ids=["inf", "rounds_to_inf"])
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("name", E4M3_ROWS)
def test_infinity_is_the_largest_e4m3_code(name, sign, value):
    code, encoded = encode_first(name, sign * value)
    assert code == (0x7E if sign > 0 else 0xFE)
    fmt = ALL_ROWS[name]
    if name == "kv_fp8":
        assert encoded.scales[0, 0] == 247
    else:
        scale = encoded.scales.view(torch.float32)
        expected = BF16_MAX / 448 if name == "kv_fp8_entry_scale" else 2.0**120
        assert torch.equal(scale, torch.full_like(scale, expected))
    assert codec.decode(fmt, encoded)[0, 1] == 0


@pytest.mark.parametrize("value", [INF, 3.4e38], ids=["inf", "rounds_to_inf"])
@pytest.mark.parametrize(
    ("name", "scale"), [("index_mxfp4", 253), ("index_nvfp4", 0x7E)], ids=["mxfp4", "nvfp4"]
)
def test_infinity_is_the_largest_e2m1_code(name, scale, value):
    for sign, code in ((1, 7), (-1, 15)):
        actual, encoded = encode_first(name, sign * value)
        assert actual & 15 == code
        assert encoded.scales[0, 0] == scale


def test_nvfp4_saturates_above_its_largest_scale():
    values = torch.zeros(1, 128)
    values[0, :2] = f32(1e6, -5000.0)
    decoded = codec.decode(INDEX_ROWS["nvfp4"], codec.encode(INDEX_ROWS["nvfp4"], values))
    assert decoded[0, :2].tolist() == [2688.0, -2688.0]


@pytest.mark.parametrize("name", PLAIN_ROWS)
def test_special_values_of_plain_rows(name):
    fmt = ALL_ROWS[name]
    values = torch.zeros(1, fmt.dim)
    negative_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32)[0]
    values[0, :8] = f32(NAN, 0.0, INF, -INF, 0.0, -0.0, 1e-40, -3.4e38)
    values[0, 1] = negative_nan
    data = codec.encode(fmt, values).data
    if fmt.value_dtype is torch.bfloat16:
        bits = data.view(torch.int16)[0, :8].int() & 0xFFFF
        expected = [0x7FFF, 0x7FFF, 0x7F80, 0xFF80, 0, 0x8000, 0x0001, 0xFF80]
    else:
        bits = data.view(torch.int32)[0, :8].long() & 0xFFFFFFFF
        tail = f32(1e-40, -3.4e38).view(torch.int32).long() & 0xFFFFFFFF
        expected = [0x7FC00000, 0x7FC00000, 0x7F800000, 0xFF800000, 0, 0x80000000, *tail.tolist()]
    assert bits.tolist() == expected


@pytest.mark.parametrize("name", ["fp8", "fp8_entry_scale"])
def test_special_values_of_the_rope_part(name):
    values = torch.zeros(1, 512)
    values[0, 448:454] = f32(NAN, INF, -INF, -0.0, 3.4e38, 1e-40)
    encoded = codec.encode(KV_ROWS[name], values)
    bits = encoded.data[:, 448:].view(torch.int16)[0, :6].int() & 0xFFFF
    assert bits.tolist() == [0x7FFF, 0x7F80, 0xFF80, 0x8000, 0x7F80, 0x0001]
    assert torch.equal(encoded.scales, codec.encode(KV_ROWS[name], torch.zeros(1, 512)).scales)


@pytest.mark.parametrize("name", [*E4M3_ROWS, *E2M1_ROWS])
def test_all_nan_rows_have_the_floor_scale(name):
    fmt = ALL_ROWS[name]
    nan_rows = codec.encode(fmt, torch.full((1, fmt.dim), NAN))
    zero_rows = codec.encode(fmt, torch.zeros(1, fmt.dim))
    assert torch.equal(nan_rows.scales, zero_rows.scales)
    payload = nan_rows.data[0, : fmt.fields[0].count]
    assert bool((payload == (0x7F if name in E4M3_ROWS else 0x77)).all())


@pytest.mark.parametrize("name", [*E4M3_ROWS, *E2M1_ROWS])
def test_quantised_rows_are_made_from_the_bf16_value(name):
    fmt = ALL_ROWS[name]
    values = random_rows(50, fmt.dim)
    fresh, rounded = codec.encode(fmt, values), codec.encode(fmt, values.bfloat16().float())
    assert torch.equal(fresh.data, rounded.data) and torch.equal(fresh.scales, rounded.scales)
