"""The three layer types and the schedule built from `compress_ratios`."""

import dataclasses

import pytest

from dsv4.layer_schedule import AttentionType, LayerSpec, build_schedule


@pytest.mark.parametrize(
    ("ratio", "name"), [(0, "SWA"), (4, "CSA"), (128, "HCA")], ids=["swa", "csa", "hca"]
)
def test_from_ratio(ratio, name):
    kind = AttentionType.from_ratio(ratio)
    assert kind is AttentionType[name]
    assert kind.ratio == ratio


@pytest.mark.parametrize("ratio", [3, 5, 8, 127, -4, -1, True, "4", None], ids=repr)
def test_from_ratio_refuses(ratio):
    with pytest.raises(
        ValueError,
        match=rf"expected one of 0 \(SWA\), 4 \(CSA\), 128 \(HCA\), 1 and 2 .*, got {ratio!r}",
    ):
        AttentionType.from_ratio(ratio)


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (AttentionType.SWA, "main"),
        (AttentionType.CSA, "compress"),
        (AttentionType.HCA, "compress"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_rope_base_follows_the_layer(kind, base):
    assert LayerSpec(0, kind).rope_base == base
    assert LayerSpec(0, kind, is_mtp=True).rope_base == base


def test_build_schedule():
    assert build_schedule([128, 4, 0], num_mtp_layers=1) == (
        LayerSpec(0, AttentionType.HCA),
        LayerSpec(1, AttentionType.CSA),
        LayerSpec(2, AttentionType.SWA, is_mtp=True),
    )


@pytest.mark.parametrize("num_mtp_layers", [0, 1, 2, 3])
def test_build_schedule_flags_the_last_layers(num_mtp_layers):
    schedule = build_schedule([4, 0, 0], num_mtp_layers=num_mtp_layers)
    flags = [layer.is_mtp for layer in schedule]
    assert flags == [False] * (3 - num_mtp_layers) + [True] * num_mtp_layers
    assert [layer.ratio for layer in schedule] == [4, 0, 0]
    assert [layer.layer_idx for layer in schedule] == [0, 1, 2]


def test_build_schedule_refuses_an_unknown_ratio():
    with pytest.raises(ValueError, match=r"Unknown compression ratio: .* got 3"):
        build_schedule([0, 4, 3])


def test_layer_spec_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError, match="layer_idx"):
        LayerSpec(0, AttentionType.SWA).layer_idx = 1
