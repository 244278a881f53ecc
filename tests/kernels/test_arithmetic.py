"""The arithmetic of stored values: accuracy, written orders, special values."""

import math

import numpy as np
import pytest
import torch

from dsv4.kernels.reference.arithmetic import (
    EXP2_COEFFICIENTS,
    combine_groups,
    exp_of_nonpositive,
    float32_bits,
    fold_in_order,
    fold_pairwise,
    hadamard,
    pool_rows,
    rms_norm,
    rotate,
    round_to,
    round_to_bf16,
    sum_groups,
    sum_of_squares,
)

INF, NAN = math.inf, math.nan


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wide(*shape: int, seed: int = 0, spread: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread, shape, generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(exponents.float())


LOWEST_EXP = -125 * math.log(2)  # below it exp is 2^-125


def relative_bound(x: torch.Tensor) -> torch.Tensor:
    """Bound of the relative error of exp_of_nonpositive(x), as the sum of its roundings.

    - The exponent x log2(e) has a relative error of 2^-24 by its rounding and 1.34e-8 by that of
      log2(e), together 7.3e-8. An exponent off by a factor 1 + d changes the result by x d.
    - The whole part is added exactly, the rest is what the subtraction leaves, exactly.
    - The polynomial is off by 9.4e-8.
    - Its last sum rounds by 2^-24 above 1 and by 2^-25 below; the last product, and its factor
      with |f| <= 1/2, by 2^-26 each; the step before by 2^-27; the others by less than 2^-30. Of
      results of at least 1, or at least 0.7 below 1, that is at most 1.0e-7.
    """
    return 7.3e-8 * x.double().abs() + 9.4e-8 + 1.0e-7


def relative_error(x: torch.Tensor) -> torch.Tensor:
    exact = torch.exp(x.double())
    return (exp_of_nonpositive(x).double() - exact).abs() / exact


def next_to_steps(distance: int) -> list[torch.Tensor]:
    """fp32 numbers around those where the exponent's whole part changes, in ascending order."""
    middles = ((np.arange(-125, 0) + 0.5) * math.log(2)).astype(np.float32)
    offsets = np.arange(distance, -distance - 1, -1, dtype=np.int32)  # more bits are further down
    return [torch.from_numpy((x.view(np.int32) + offsets).view(np.float32)) for x in middles]


def test_exp_is_accurate_over_its_whole_range():
    x = torch.cat((torch.linspace(-87, 0, 400_001), -torch.logspace(-30, 1.93, 100_001)))
    error = (exp_of_nonpositive(x).double() - torch.exp(x.double())).abs()
    assert float(error.max()) <= 1.4e-7
    x = x[x >= LOWEST_EXP]
    assert (relative_error(x) <= relative_bound(x)).all()


def test_exp_next_to_the_steps_of_its_range_reduction():
    for x in next_to_steps(50):
        assert (relative_error(x) <= relative_bound(x)).all()


def test_exp_falls_by_at_most_one_unit_of_the_last_place():
    for x in next_to_steps(500):
        y = exp_of_nonpositive(x)
        assert (x.diff() > 0).all()
        assert (float32_bits(y).diff() >= -1).all()
        assert float(y[-1]) > float(y[0])


def test_exp_is_the_written_polynomial():
    x = np.concatenate((np.linspace(-100, 0, 30_001), -np.logspace(-9, 1.9, 10_001)))
    x = x.astype(np.float32)
    exponent = np.maximum(x * np.float32(1.4426950408889634), np.float32(-125))
    n = np.rint(exponent)
    f = exponent - n
    y = np.float32(0.0013269406044855714)
    for coefficient in (0.009671294130384922, 0.0555071122944355, 0.24022246897220612,
                        0.6931470036506653, 1.0):  # fmt: skip
        y = y * f + np.float32(coefficient)
    expected = np.ldexp(y, n.astype(np.int32))
    actual = exp_of_nonpositive(torch.from_numpy(x)).numpy()
    assert expected.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)


def test_exp_s_polynomial_is_as_close_as_the_bound_says():
    f = np.linspace(-0.5, 0.5, 200_001)
    y = np.polyval(EXP2_COEFFICIENTS, f)
    assert np.abs(y / np.exp2(f) - 1).max() <= 9.4e-8
    assert [float(np.float32(c)) for c in EXP2_COEFFICIENTS] == list(EXP2_COEFFICIENTS)


@pytest.mark.parametrize("x", [0.0, -0.0, -1e-45, -1e-30, -1e-9])
def test_exp_near_zero_is_one(x):
    assert exp_of_nonpositive(torch.tensor([x])).tolist() == [1.0]


@pytest.mark.parametrize("x", [-86.7, -87.0, -88.0, -103.0, -1e30, -3.4e38, -INF])
def test_exp_below_its_range_is_its_floor(x):
    assert exp_of_nonpositive(torch.tensor([x])).tolist() == [2.0**-125]


def test_exp_reaches_its_floor_without_a_jump():
    x = torch.linspace(-86.7, -86.6, 10_001)
    y = exp_of_nonpositive(x)
    assert (y.diff() >= 0).all() and float(y[0]) == 2.0**-125 < float(y[-1])
    assert float(y.min()) > torch.finfo(torch.float32).tiny


def test_bf16_rounding_equals_torch():
    high = torch.arange(65536, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] + low).flatten()
    x = bits.to(torch.int32).view(torch.float32)
    x = x[~torch.isnan(x)]
    assert x.shape[0] > 390_000
    assert torch.equal(round_to_bf16(x).view(torch.int16), x.bfloat16().view(torch.int16))


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0xBF808000, 0xBF80), (0xBF818000, 0xBF82),
        (0x7F7F7FFF, 0x7F7F), (0x7F7F8000, 0x7F80), (0xFF7F8000, 0xFF80), (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80), (0x80000000, 0x8000), (0x00008000, 0x0000), (0x00018000, 0x0002),
    ],
    ids=lambda value: f"{value:#x}",
)  # fmt: skip
def test_bf16_rounding_of_edges(bits, expected):
    x = torch.from_numpy(np.array([bits], dtype=np.uint32).view(np.float32))
    assert int(round_to_bf16(x).view(torch.int16)) & 0xFFFF == expected


@pytest.mark.parametrize(
    "bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0xFFFFFFFF], ids=hex
)
def test_bf16_rounding_makes_every_nan_the_same(bits):
    x = torch.from_numpy(np.array([bits], dtype=np.uint32).view(np.float32))
    assert int(round_to_bf16(x).view(torch.int16)) == 0x7FFF


def test_bf16_rounding_of_a_strided_tensor():
    x = normal(7, 12).T
    assert torch.equal(round_to_bf16(x), x.bfloat16())
    assert float32_bits(x).shape == (12, 7)


def test_round_to():
    x = normal(50)
    assert torch.equal(round_to(x, torch.bfloat16), x.bfloat16())
    assert round_to(x, torch.float32) is x
    stored = x.bfloat16()
    assert torch.equal(round_to(stored, torch.bfloat16), stored)
    assert torch.equal(round_to(stored, torch.float32), stored.float())


@pytest.mark.parametrize("make", [normal, wide], ids=["normal", "wide"])
@pytest.mark.parametrize("dim", [64, 128, 512, 2048])
def test_sum_of_squares_is_the_same_in_any_order(dim, make):
    x = make(8, dim)
    total = sum_of_squares(x)
    assert total.dtype is torch.float64 and total.shape == (8, 1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        order = torch.randperm(dim, generator=generator)
        assert torch.equal(sum_of_squares(x[:, order]), total)


def grid_squares(row: torch.Tensor) -> list[float]:
    """The squares as `sum_of_squares` adds them: multiples of 2^(2e - 40), by exact rounding."""
    exponent = math.frexp(float(row.abs().max()))[1] - 1
    step = 2.0 ** (2 * exponent - 40)
    return [round(value * value / step) * step for value in row.tolist()]


@pytest.mark.parametrize("dim", [128, 512, 2048])
def test_sum_of_squares_is_the_same_in_any_split(dim):
    for row in wide(4, dim, spread=6):
        squares = grid_squares(row)
        total = float(sum_of_squares(row[None]))
        for width in (1, 3, 16, 61, dim // 2, dim):
            parts = [squares[start : start + width] for start in range(0, dim, width)]
            assert sum(sum(part) for part in parts) == total
        assert sum(reversed(squares)) == total


@pytest.mark.parametrize("make", [normal, wide], ids=["normal", "wide"])
@pytest.mark.parametrize("dim", [1, 128, 512, 2048])
def test_sum_of_squares_is_accurate(dim, make):
    x = make(50, dim)
    for row, actual in zip(x.tolist(), sum_of_squares(x)[:, 0].tolist(), strict=True):
        exact = math.fsum(value * value for value in row)
        assert abs(actual - exact) < 2**-30 * exact


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, -0.0], 0.0), ([3.0, 4.0], 25.0), ([1e-30, 0.0], float(np.float32(1e-30)) ** 2),
        ([3e38, 0.0], float(np.float32(3e38)) ** 2), ([INF, 1.0], INF), ([-INF, INF], INF),
    ],
)  # fmt: skip
def test_sum_of_squares_of_edges(values, expected):
    actual = float(sum_of_squares(torch.tensor([values])))
    assert actual == pytest.approx(expected, rel=2**-30, abs=0)


def test_sum_of_squares_of_subnormal_numbers():
    x = torch.tensor([[1e-40, 3e-42, 0.0]])
    exact = float((x.double() ** 2).sum())
    assert abs(float(sum_of_squares(x)) - exact) <= 2.0 ** (2 * -127 - 40)


def test_sum_of_squares_of_nan():
    assert math.isnan(sum_of_squares(torch.tensor([[1.0, NAN]])))


def ulps_apart(actual: torch.Tensor, exact: torch.Tensor) -> float:
    spacing = torch.from_numpy(np.spacing(exact.abs().float().numpy())).double()
    return float(((actual.double() - exact).abs() / spacing).max())


@pytest.mark.parametrize("make", [normal, wide], ids=["normal", "wide"])
@pytest.mark.parametrize("dim", [96, 128, 512])
@pytest.mark.parametrize("eps", [1e-6, 1e-20])
def test_rms_norm_against_fp64(dim, make, eps):
    x, weight = make(200, dim), 1 + 0.3 * normal(dim, seed=1)
    mean = (x.double() ** 2).mean(dim=-1, keepdim=True)
    exact = x.double() / torch.sqrt(mean + eps) * weight.double()
    actual = rms_norm(x, weight, eps)
    assert actual.dtype is torch.float32
    assert ulps_apart(actual, exact) <= 3


def test_rms_norm_reads_a_bf16_weight():
    x, weight = normal(5, 128), (1 + 0.3 * normal(128, seed=1)).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x, weight.float(), 1e-6))


def test_rms_norm_of_zeros_is_zero():
    assert torch.equal(rms_norm(torch.zeros(2, 64), torch.ones(64), 1e-6), torch.zeros(2, 64))


@pytest.mark.parametrize("rows", [1, 4, 8, 16])
def test_rows_of_a_group_are_added_in_order(rows):
    terms = wide(3, 2, rows, 61, spread=12)
    total = torch.zeros(3, 2, 61)
    for row in range(rows):
        total = total + terms[:, :, row]
    assert torch.equal(fold_in_order(terms), total)
    if rows > 4:
        assert not torch.equal(fold_in_order(terms.flip(2)), total)
        assert not torch.equal(terms.double().sum(dim=2).float(), total)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_groups_are_added_pairwise(groups):
    terms = wide(3, groups, 61, spread=12)
    sums = list(terms.unbind(1))
    while len(sums) > 1:
        sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
    assert torch.equal(fold_pairwise(terms), sums[0])
    if groups == 8:
        assert not torch.equal(fold_in_order(terms[:, None])[:, 0], sums[0])


def exact_pool(kv: torch.Tensor, gate: torch.Tensor, is_present: torch.Tensor) -> torch.Tensor:
    kv = torch.where(is_present[:, :, None], kv, 0.0).double()
    gate = torch.where(is_present[:, :, None], gate, -INF).double()
    return (torch.softmax(gate, dim=1) * kv).sum(dim=1)


@pytest.mark.parametrize("rows", [8, 128])
def test_pool_rows_is_a_softmax_per_channel(rows):
    kv, gate = normal(5, rows, 64), 3 * normal(5, rows, 64, seed=1)
    is_present = torch.ones(5, rows, dtype=torch.bool)
    actual = pool_rows(kv, gate, is_present)
    exact = exact_pool(kv, gate, is_present)
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 3e38], ids=repr)
@pytest.mark.parametrize("rows", [8, 128])
def test_pool_rows_ignores_what_missing_rows_hold(rows, junk):
    kv, gate = normal(3, rows, 32), normal(3, rows, 32, seed=1)
    is_present = torch.ones(3, rows, dtype=torch.bool)
    is_present[0, : rows // 2] = False
    is_present[1, 1:] = False
    clean = pool_rows(kv, gate, is_present)
    exact = exact_pool(kv, gate, is_present)
    torch.testing.assert_close(clean.double(), exact, rtol=0, atol=2e-6)
    assert torch.equal(clean[1], kv[1, 0])
    kv[~is_present] = junk
    gate[~is_present] = junk
    assert torch.equal(pool_rows(kv, gate, is_present), clean)


@pytest.mark.parametrize("rows", [8, 128])
def test_pool_rows_equals_its_written_order(rows):
    kv, gate = normal(2, rows, 16), 4 * normal(2, rows, 16, seed=1)
    groups = []
    for start in range(0, rows, 16):
        largest = gate[:, start : start + 16].amax(dim=1)
        numerator = denominator = torch.zeros(2, 16)
        for row in range(start, min(start + 16, rows)):
            weight = exp_of_nonpositive(gate[:, row] - largest)
            numerator = numerator + weight * kv[:, row]
            denominator = denominator + weight
        groups.append((largest, numerator, denominator))
    top = gate.amax(dim=1)
    scaled = [
        torch.stack((n * exp_of_nonpositive(m - top), d * exp_of_nonpositive(m - top)))
        for m, n, d in groups
    ]
    while len(scaled) > 1:
        scaled = [scaled[i] + scaled[i + 1] for i in range(0, len(scaled), 2)]
    numerator, denominator = scaled[0]
    is_present = torch.ones(2, rows, dtype=torch.bool)
    assert torch.equal(pool_rows(kv, gate, is_present), numerator / denominator)


@pytest.mark.parametrize("rows", [8, 128])
def test_pool_rows_keeps_nan_of_present_rows(rows):
    kv, gate = normal(1, rows, 4), normal(1, rows, 4, seed=1)
    is_present = torch.ones(1, rows, dtype=torch.bool)
    clean = pool_rows(kv, gate, is_present)
    kv[0, 3, 2] = NAN
    pooled = pool_rows(kv, gate, is_present)
    assert torch.isnan(pooled)[0].tolist() == [False, False, True, False]
    assert torch.equal(pooled[0, :2], clean[0, :2]) and pooled[0, 3] == clean[0, 3]


@pytest.mark.parametrize("special", [NAN, INF], ids=repr)
@pytest.mark.parametrize("rows", [8, 128])
def test_pool_rows_of_a_gate_that_is_not_finite(rows, special):
    kv, gate = normal(1, rows, 4), normal(1, rows, 4, seed=1)
    is_present = torch.ones(1, rows, dtype=torch.bool)
    clean = pool_rows(kv, gate, is_present)
    for row in (0, rows // 2 - 1, rows - 1):
        one = gate.clone()
        one[0, row, 1] = special
        pooled = pool_rows(kv, one, is_present)
        assert torch.isnan(pooled)[0].tolist() == [False, True, False, False]
        assert torch.equal(pooled[0, 2:], clean[0, 2:]) and pooled[0, 0] == clean[0, 0]


@pytest.mark.parametrize("rows", [8, 128])
def test_pool_rows_of_gates_of_minus_infinity(rows):
    kv, gate = normal(1, rows, 2), torch.full((1, rows, 2), -INF)
    gate[0, 1, 1] = -3e38
    pooled = pool_rows(kv, gate, torch.ones(1, rows, dtype=torch.bool))
    assert torch.isnan(pooled)[0].tolist() == [True, False]
    assert pooled[0, 1] == kv[0, 1, 1]  # the others weigh 2^-125


def test_pool_rows_of_no_rows_is_nan():
    pooled = pool_rows(normal(1, 8, 2), normal(1, 8, 2), torch.zeros(1, 8, dtype=torch.bool))
    assert torch.isnan(pooled).all()


@pytest.mark.parametrize("special", [INF, -INF], ids=repr)
def test_pool_rows_of_infinite_values(special):
    kv, gate = normal(1, 8, 2), normal(1, 8, 2, seed=1)
    kv[0, 3, 0] = kv[0, 3, 1] = special
    kv[0, 4, 1] = -special
    pooled = pool_rows(kv, gate, torch.ones(1, 8, dtype=torch.bool))
    assert pooled[0, 0] == special and torch.isnan(pooled[0, 1])


def test_pool_rows_of_gates_far_apart():
    kv = normal(1, 8, 4)
    gate = torch.full((1, 8, 4), -1e4)
    gate[0, 5] = 1e4
    assert torch.equal(pool_rows(kv, gate, torch.ones(1, 8, dtype=torch.bool)), kv[:, 5])


def test_sums_of_groups_combine_to_the_pooled_rows():
    kv, gate = normal(3, 128, 8), 4 * normal(3, 128, 8, seed=1)
    groups = [slice(first, first + 16) for first in range(0, 128, 16)]
    alone = [sum_groups(kv[:, g], gate[:, g], torch.ones(3, 16, dtype=torch.bool)) for g in groups]
    pooled = pool_rows(kv, gate, torch.ones(3, 128, dtype=torch.bool))
    assert torch.equal(combine_groups(torch.cat(alone, dim=1)), pooled)


def test_sums_have_one_pattern_of_bits():
    gate, kv = normal(1, 16, 7), normal(1, 16, 7, seed=1)
    gate[0, 3, 1], gate[0, :, 2], gate[0, :, 3] = INF, -INF, -1.0
    gate[0, 5, 3] = -0.0
    gate[0, 3, 0] = torch.tensor(-4194304, dtype=torch.int32).view(torch.float32)  # 0xFFC00000
    kv[0, 2, 4], kv[0, 3, 4], kv[0, 4, 5] = INF, -INF, -NAN
    is_present = torch.ones(1, 16, dtype=torch.bool)
    largest, total, weighted = sum_groups(kv, gate, is_present)[0, 0].view(torch.int32)
    plus_nan, infinity = 0x7FC00000, 0x7F800000
    assert largest[:4].tolist() == [plus_nan, infinity, infinity - 2**31, 0]
    assert total[:2].tolist() == weighted[:2].tolist() == [0, 0]
    assert total[2:].view(torch.float32).isfinite().all()
    assert weighted[4:6].tolist() == [plus_nan, plus_nan]


@pytest.mark.parametrize("dim", [64, 128, 512])
def test_rotate_is_a_complex_product_of_adjacent_pairs(dim):
    x, angles = normal(5, 3, dim), 100 * normal(5, 1, 32, seed=1)
    cos, sin = angles.double().cos().float(), angles.double().sin().float()
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., : dim - 64], x[..., : dim - 64])
    pairs = torch.view_as_complex(x[..., dim - 64 :].double().unflatten(-1, (-1, 2)).contiguous())
    exact = torch.view_as_real(pairs * torch.complex(cos.double(), sin.double())).flatten(-2)
    torch.testing.assert_close(turned[..., dim - 64 :].double(), exact, rtol=0, atol=1e-6)


def test_rotate_quarter_turn():
    x = torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0])
    turned = rotate(x, torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]))
    assert turned.tolist() == [9.0, -2.0, 1.0, 3.0, 4.0]


def test_rotate_back():
    x, angles = normal(4, 128), normal(4, 32, seed=1)
    there = rotate(x, angles.cos(), angles.sin())
    back = rotate(there, angles.cos(), -angles.sin())
    assert not torch.allclose(there, x)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-6)


def walsh_hadamard(dim: int) -> torch.Tensor:
    """Entry (i, j) is (-1)^popcount(i & j) / sqrt(dim)."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]
    return torch.tensor(signs, dtype=torch.float64) / math.sqrt(dim)


@pytest.mark.parametrize("dim", [2, 32, 64, 128])
def test_hadamard_against_the_matrix(dim):
    x = normal(7, 3, dim)
    exact = x.double() @ walsh_hadamard(dim)
    torch.testing.assert_close(hadamard(x).double(), exact, rtol=0, atol=3e-6)
    columns = hadamard(torch.eye(dim))
    torch.testing.assert_close(columns.double(), walsh_hadamard(dim), rtol=0, atol=1e-7)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_hadamard_is_orthonormal_and_its_own_inverse(dim):
    x = normal(20, dim)
    y = hadamard(x)
    assert not torch.allclose(y, x)
    torch.testing.assert_close(hadamard(y), x, rtol=0, atol=3e-6)
    torch.testing.assert_close(y.norm(dim=1), x.norm(dim=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(y @ y.T, x @ x.T, rtol=0, atol=1e-4)


def test_hadamard_is_a_butterfly_with_strides_one_two_four():
    x = wide(5, 8, spread=12)
    rows = [[row[i] for i in range(8)] for row in x]
    for stride in (1, 2, 4):
        for row in rows:
            for low in (i for i in range(8) if not i & stride):
                a, b = row[low], row[low + stride]
                row[low], row[low + stride] = a + b, a - b
    expected = torch.stack([torch.stack(row) for row in rows]) * 8**-0.5
    assert torch.equal(hadamard(x), expected)
