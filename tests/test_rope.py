"""RoPE rows against transformers' rotary embedding and the machine's own sine and cosine."""

import math

import numpy as np
import pytest
import torch

from dsv4.config import CacheConfig, YarnScaling
from dsv4.rope import base_frequencies, build_rope_table, inverse_frequencies, rope_at, sin_cos

CPU = torch.device("cpu")
# Eight rotated channels keep a table of 2^20 positions small.
NARROW = CacheConfig(compress_ratios=(0, 4), head_dim=72, rope_dim=8)
CONFIGS = {
    "flash": CacheConfig.v4_flash(),
    "tiny": CacheConfig.tiny(),
    "narrow": NARROW,
    "no_yarn": CacheConfig.tiny(yarn=None),
    "factor_4": CacheConfig.v4_flash(yarn=YarnScaling(factor=4.0)),
    # Both ends of the ramp on pair 0, and one of them below it.
    "ramp_of_no_width": CacheConfig.tiny(yarn=YarnScaling(original_max_position=6)),
    "ramp_below_pair_0": CacheConfig.tiny(yarn=YarnScaling(original_max_position=2)),
}


def hf_rotary(config: CacheConfig):
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    yarn = config.yarn
    scaling = yarn and {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    model_config = modeling.DeepseekV4Config(
        num_hidden_layers=config.num_layers,
        compress_ratios=list(config.compress_ratios),
        head_dim=config.head_dim,
        qk_rope_head_dim=config.rope_dim,
        rope_theta=config.rope_theta,
        compress_rope_theta=config.compress_rope_theta,
        max_position_embeddings=config.max_position,
        rope_scaling=scaling,
    )
    return modeling.DeepseekV4RotaryEmbedding(model_config)


def ulps_apart(a: torch.Tensor, b: torch.Tensor) -> float:
    spacing = torch.from_numpy(np.spacing(torch.maximum(a.abs(), b.abs()).numpy()))
    return float(((a.double() - b.double()).abs() / spacing.double()).max())


@pytest.mark.parametrize("base", ["main", "compress"])
@pytest.mark.parametrize("name", CONFIGS)
def test_inverse_frequencies_bit_equal_to_transformers(name, base):
    config = CONFIGS[name]
    expected = getattr(hf_rotary(config), f"{base}_inv_freq")
    actual = base_frequencies(config, base)
    assert actual.dtype is torch.float32 and actual.shape == (config.rope_dim // 2,)
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


def test_yarn_of_flash_scales_the_slow_pairs_only():
    yarn = YarnScaling(16, 65536, 32, 1)
    plain = inverse_frequencies(160000.0, 64, None)
    scaled = inverse_frequencies(160000.0, 64, yarn)
    assert torch.equal(scaled[:16], plain[:16])
    assert torch.equal(scaled[25:], plain[25:] / 16)
    between = scaled[16:25]
    assert bool((between < plain[16:25]).all()) and bool((between > plain[16:25] / 16).all())
    ramp = (torch.arange(16, 25) - 15) / 10
    expected = plain[16:25].double() * (1 - ramp) + plain[16:25].double() / 16 * ramp
    torch.testing.assert_close(between.double(), expected, rtol=3e-7, atol=0)


def test_main_base_has_no_yarn():
    config = CacheConfig.v4_flash()
    table = build_rope_table(config, "main", num_positions=2, device=CPU)
    expected = torch.tensor([math.cos(10000 ** (-2 * i / 64)) for i in range(32)])
    torch.testing.assert_close(table.cos[1], expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("base", ["main", "compress"])
@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("flash", [0, 1, 127, 128, 4095, 65535, 65536, 69999]),
        ("tiny", [0, 1, 127, 4095, 65535]),
        ("narrow", [0, 1, 127, 4095, 65536, 524287, 1048575]),
    ],
    ids=["flash", "tiny", "narrow_to_1m"],
)
def test_table_against_transformers(name, positions, base):
    config = CONFIGS[name]
    table = build_rope_table(config, base, num_positions=positions[-1] + 1, device=CPU)
    position_ids = torch.tensor([positions])
    cos, sin = hf_rotary(config)(torch.zeros(1), position_ids, layer_type=base)
    assert table.cos.dtype is torch.float32
    assert table.cos.shape == table.sin.shape == (positions[-1] + 1, config.rope_dim // 2)
    assert ulps_apart(table.cos[positions], cos[0]) <= 1.5
    assert ulps_apart(table.sin[positions], sin[0]) <= 1.5


@pytest.mark.parametrize("base", ["main", "compress"])
def test_table_is_the_rounded_fp64_value_of_the_fp32_angle(base):
    config = CacheConfig.v4_flash()
    table = build_rope_table(config, base, num_positions=66000, device=CPU)
    freqs = base_frequencies(config, base).numpy()
    for position in (0, 1, 3, 1000, 65535, 65536, 65999):
        angles = [float(np.float32(position) * freq) for freq in freqs]
        cos = torch.tensor([math.cos(angle) for angle in angles], dtype=torch.float32)
        sin = torch.tensor([math.sin(angle) for angle in angles], dtype=torch.float32)
        assert torch.equal(table.cos[position], cos)
        assert torch.equal(table.sin[position], sin)


@pytest.mark.parametrize("num_positions", [1, 61, 65536, 65537])
@pytest.mark.parametrize("base", ["main", "compress"])
def test_table_does_not_depend_on_its_length(base, num_positions):
    config = CacheConfig.tiny()
    long = build_rope_table(config, base, num_positions=65600, device=CPU)
    short = build_rope_table(config, base, num_positions=num_positions, device=CPU)
    assert short.cos.shape == (num_positions, 16)
    assert torch.equal(short.cos, long.cos[:num_positions])
    assert torch.equal(short.sin, long.sin[:num_positions])


@pytest.mark.parametrize("base", ["main", "compress"])
@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_rows_are_correctly_rounded_at_every_position(step, base):
    """No value lies within 4 units of the last fp64 place of a middle between two fp32 numbers.

    So any sine and cosine that are exact to such a unit are rounded to the same fp32 number.
    """
    frequencies = base_frequencies(CacheConfig.v4_flash(), base)
    for positions in torch.arange(0, 1 << 20, step).split(1 << 15):
        angles = (positions.float()[:, None] * frequencies).double()
        rows = rope_at(positions, frequencies)
        for value, row, expected in zip(
            sin_cos(angles), (rows.sin, rows.cos), (angles.sin(), angles.cos()), strict=True
        ):
            assert torch.equal(row.view(torch.int32), expected.float().view(torch.int32))
            from_middle = value.view(torch.int64) % (1 << 29) - (1 << 28)
            assert int(from_middle.abs().min()) > 4
            assert float((value - expected).abs().max()) < 2.0**-52


def test_angles_near_multiples_of_a_quarter_turn():
    multiples = torch.arange(1, 1 << 24, 997, dtype=torch.float64) * (math.pi / 2)
    near = multiples[multiples < 2.0**24].float()
    angles = torch.cat([torch.nextafter(near, near + way) for way in (-1.0, 1.0)]).double()
    sin, cos = sin_cos(angles)
    for idx in range(0, len(angles), 7):
        angle = float(angles[idx])
        assert abs(float(sin[idx]) - math.sin(angle)) <= 2 * math.ulp(math.sin(angle))
        assert abs(float(cos[idx]) - math.cos(angle)) <= 2 * math.ulp(math.cos(angle))
