"""`CacheConfig`: presets, both spellings of a model config, refusals, fingerprint."""

import dataclasses
import json
from collections import Counter
from copy import deepcopy

import pytest

from dsv4.config import CacheConfig, YarnScaling
from dsv4.layer_schedule import AttentionType

FLASH_RATIOS = [0, 0] + [4, 128] * 20 + [4]
PRO_RATIOS = [128, 128] + [4, 128] * 29 + [4]

# config.json as shipped: `compress_ratios` with the MTP layer last, and a flat `rope_scaling`.
SHIPPED_FLASH = {
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "compress_ratios": [*FLASH_RATIOS, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 1,
}
SHIPPED_PRO = SHIPPED_FLASH | {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "compress_ratios": [*PRO_RATIOS, 0],
    "index_topk": 1024,
}
NAMED_TYPES = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}


def saved_spelling(shipped: dict) -> dict:
    """The same model as transformers' `save_pretrained` writes it: named types, nested RoPE."""
    saved = deepcopy(shipped)
    ratios = saved.pop("compress_ratios")[: shipped["num_hidden_layers"]]
    scaling = saved.pop("rope_scaling")
    factor = saved.pop("qk_rope_head_dim") / shipped["head_dim"]
    return saved | {
        "layer_types": [NAMED_TYPES[ratio] for ratio in ratios],
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 128,
        },
        "partial_rotary_factor": factor,
        "rope_parameters": {
            "main": {
                "rope_type": "default",
                "rope_theta": 10000,
                "partial_rotary_factor": factor,
            },
            "compress": {
                **scaling,
                "rope_type": "yarn",
                "rope_theta": 160000,
                "partial_rotary_factor": factor,
                "attention_factor": 1.0,
            },
        },
    }


def hf_config(shipped: dict) -> object:
    transformers = pytest.importorskip("transformers")
    return transformers.DeepseekV4Config(**deepcopy(shipped))


def flash_with(**changes: object) -> dict:
    return SHIPPED_FLASH | changes


def flash_without(key: str) -> dict:
    return {name: value for name, value in SHIPPED_FLASH.items() if name != key}


@pytest.mark.parametrize(
    ("preset", "counts"),
    [
        (CacheConfig.v4_flash, {"SWA": 2, "CSA": 21, "HCA": 20}),
        (CacheConfig.v4_pro, {"CSA": 30, "HCA": 31}),
        (CacheConfig.tiny, {"SWA": 1, "CSA": 2, "HCA": 1}),
    ],
    ids=["flash", "pro", "tiny"],
)
def test_preset_layer_counts(preset, counts):
    schedule = preset().schedule
    assert Counter(layer.attention_type.name for layer in schedule) == counts
    assert [layer.layer_idx for layer in schedule] == list(range(sum(counts.values())))
    assert not any(layer.is_mtp for layer in schedule)


@pytest.mark.parametrize("first_two", [0, 128], ids=["flash", "pro"])
def test_preset_layer_rule(first_two):
    preset = CacheConfig.v4_flash() if first_two == 0 else CacheConfig.v4_pro()
    expected = [first_two if idx < 2 else (4, 128)[idx % 2] for idx in range(preset.num_layers)]
    assert list(preset.compress_ratios) == expected


def test_preset_geometry():
    flash, pro = CacheConfig.v4_flash(), CacheConfig.v4_pro()
    assert (flash.num_query_heads, flash.index_topk) == (64, 512)
    assert (pro.num_query_heads, pro.index_topk) == (128, 1024)
    for config in (flash, pro):
        assert (config.head_dim, config.rope_dim, config.sliding_window) == (512, 64, 128)
        assert (config.index_num_heads, config.index_head_dim) == (64, 128)
        assert (config.rope_theta, config.compress_rope_theta) == (10000, 160000)
        assert config.yarn == YarnScaling(16, 65536, 32, 1)
        assert (config.rms_norm_eps, config.max_position) == (1e-6, 1048576)


@pytest.mark.parametrize("preset", [CacheConfig.v4_flash, CacheConfig.v4_pro, CacheConfig.tiny])
def test_mtp_is_a_trailing_swa_layer(preset):
    plain, config = preset(), preset(include_mtp=True)
    assert config.schedule[:-1] == plain.schedule
    last = config.schedule[-1]
    assert last.is_mtp and last.attention_type is AttentionType.SWA
    assert config.num_mtp_layers == 1 and config.num_layers == plain.num_layers + 1


def test_presets_take_choices():
    config = CacheConfig.v4_flash(kv_format="bf16", index_topk=7, tail_dtype="bfloat16")
    assert (config.kv_format, config.index_topk, config.tail_dtype) == ("bf16", 7, "bfloat16")
    assert config.kv_row.row_bytes == 1024


@pytest.mark.parametrize("include_mtp", [False, True], ids=["main", "with_mtp"])
@pytest.mark.parametrize("spelling", ["shipped", "saved"])
@pytest.mark.parametrize("source", ["mapping", "file", "file_str", "folder"])
@pytest.mark.parametrize(
    ("shipped", "preset"),
    [(SHIPPED_FLASH, CacheConfig.v4_flash), (SHIPPED_PRO, CacheConfig.v4_pro)],
    ids=["flash", "pro"],
)
def test_from_hf_equals_the_preset(shipped, preset, source, spelling, include_mtp, tmp_path):
    raw = shipped if spelling == "shipped" else saved_spelling(shipped)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    sources = {"mapping": raw, "file": path, "file_str": str(path), "folder": tmp_path}
    config = CacheConfig.from_hf(sources[source], include_mtp=include_mtp)
    assert config == preset(include_mtp=include_mtp)


@pytest.mark.parametrize("include_mtp", [False, True], ids=["main", "with_mtp"])
@pytest.mark.parametrize("source", ["object", "saved_file", "saved_folder"])
@pytest.mark.parametrize(
    ("shipped", "preset"),
    [(SHIPPED_FLASH, CacheConfig.v4_flash), (SHIPPED_PRO, CacheConfig.v4_pro)],
    ids=["flash", "pro"],
)
def test_from_hf_reads_transformers(shipped, preset, source, include_mtp, tmp_path):
    model_config = hf_config(shipped)
    if source == "object":
        config = CacheConfig.from_hf(model_config, include_mtp=include_mtp)
    else:
        model_config.save_pretrained(tmp_path)
        path = tmp_path / "config.json" if source == "saved_file" else tmp_path
        config = CacheConfig.from_hf(path, include_mtp=include_mtp)
    assert config == preset(include_mtp=include_mtp)


def test_from_hf_small_transformers_config():
    model_config = hf_config(
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "head_dim": 96,
            "qk_rope_head_dim": 32,
            "compress_ratios": [0, 4, 128, 4],
            "index_n_heads": 16,
            "index_head_dim": 64,
            "index_topk": 8,
            "max_position_embeddings": 65536,
            "rope_scaling": {
                "type": "yarn",
                "factor": 16,
                "original_max_position_embeddings": 4096,
            },
        }
    )
    assert CacheConfig.from_hf(model_config) == CacheConfig.tiny()


def test_from_hf_without_qk_rope_head_dim_attribute():
    raw = saved_spelling(SHIPPED_FLASH)

    class Config:
        def to_dict(self) -> dict:
            return raw

    assert "qk_rope_head_dim" not in raw
    assert CacheConfig.from_hf(Config()) == CacheConfig.v4_flash()


def test_from_hf_without_scaling_has_no_yarn():
    assert CacheConfig.from_hf(flash_without("rope_scaling")).yarn is None
    nested = saved_spelling(SHIPPED_FLASH)
    nested["rope_parameters"]["compress"] = {"rope_type": "default", "rope_theta": 160000}
    assert CacheConfig.from_hf(nested).yarn is None


def test_from_hf_flat_rope_parameters():
    raw = flash_without("rope_scaling") | {"rope_parameters": SHIPPED_FLASH["rope_scaling"]}
    assert CacheConfig.from_hf(raw) == CacheConfig.v4_flash()


def test_from_hf_takes_choices():
    config = CacheConfig.from_hf(SHIPPED_FLASH, index_format="fp8", num_query_heads=8)
    assert config == CacheConfig.v4_flash(index_format="fp8", num_query_heads=8)


def test_from_hf_leaves_its_argument_alone():
    raw = deepcopy(SHIPPED_FLASH)
    CacheConfig.from_hf(raw, include_mtp=True)
    assert raw == SHIPPED_FLASH


def test_from_hf_keeps_every_draft_layer():
    raw = flash_with(compress_ratios=[*FLASH_RATIOS, 0, 0, 0], num_nextn_predict_layers=3)
    config = CacheConfig.from_hf(raw, include_mtp=True)
    assert config.num_mtp_layers == 3 and config.num_layers == 46
    assert [layer.is_mtp for layer in config.schedule] == [False] * 43 + [True] * 3


REFUSALS = {
    "no_layers": ({"compress_ratios": ()}, "Invalid compress_ratios: expected 1 to 4096 layers"),
    "ratio_3": (
        {"compress_ratios": (0, 3)},
        r"expected one of 0 \(SWA\), 4 \(CSA\), 128 \(HCA\), 1 and 2 \(CSA of V4.1\), got 3",
    ),
    "mtp_count": ({"num_mtp_layers": 5}, "num_mtp_layers: expected an integer from 0 to 4, got 5"),
    "eps_zero": ({"rms_norm_eps": 0.0}, "Invalid rms_norm_eps: expected a number above 0, got 0.0"),
    "eps_nan": ({"rms_norm_eps": float("nan")}, "Invalid rms_norm_eps: .* got nan"),
    "theta": ({"rope_theta": -1.0}, "Invalid rope_theta: expected a number above 1, got -1.0"),
    "compress_theta": ({"compress_rope_theta": 0}, "Invalid compress_rope_theta: .*, got 0"),
    "rope_dim_of_8": (
        {"rope_dim": 36, "head_dim": 100},
        "Invalid rope_dim: expected a multiple of 8 .* got rope_dim 36 and head_dim 100",
    ),
    "rope_dim_all": ({"rope_dim": 96}, "Invalid rope_dim: .* got rope_dim 96 and head_dim 96"),
    "rope_dim_of_16": ({"rope_dim": 24}, "Invalid rope_dim: .* a multiple of 16, got rope_dim 24"),
    "index_dim_of_32": (
        {"index_head_dim": 80},
        "Invalid index_head_dim: expected a multiple of 32 .*, got 80",
    ),
    "index_dim_below_rope": (
        {"head_dim": 128, "rope_dim": 64, "index_head_dim": 32},
        r"Invalid index_head_dim: .* at least rope_dim \(64\), got 32",
    ),
    "hadamard_96": (
        {"index_head_dim": 96},
        "index_hadamard needs index_head_dim .* power of two, got 96",
    ),
    "hadamard_192": (
        {"index_head_dim": 192},
        "index_hadamard needs index_head_dim .* power of two, got 192",
    ),
    "block_tokens": (
        {"block_tokens": 192},
        r"Invalid block_tokens: .* largest ratio \(128\), got 192",
    ),
    "page_align": ({"page_align": 24}, "Invalid page_align: expected a multiple of 16, got 24"),
    "tail_dtype": ({"tail_dtype": "float16"}, "expected one of float32, bfloat16, got 'float16'"),
    "kv_format": (
        {"kv_format": "fp4"},
        "Unknown KV format: expected one of fp8, fp8_entry_scale, bf16, fp32, fp8_32, nvfp4_16, "
        "got 'fp4'",
    ),
    "index_format": (
        {"index_format": "int8"},
        "Unknown index format: expected one of mxfp4, nvfp4, fp8, bf16, fp32, got 'int8'",
    ),
    "fp8_groups": (
        {"head_dim": 112},
        "Format fp8 needs head_dim - rope_dim divisible by 64, got 80",
    ),
    "scale_of_mxfp4": (
        {"index_global_scale": 0.5},
        "for index_format 'nvfp4' only, got 0.5 with 'mxfp4'",
    ),
    "scale_zero": (
        {"index_global_scale": 0.0, "index_format": "nvfp4"},
        "Invalid index_global_scale: expected a number above 0, got 0.0",
    ),
    "scale_negative": (
        {"index_global_scale": -1.0, "index_format": "nvfp4"},
        "Invalid index_global_scale: expected a number above 0, got -1.0",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        CacheConfig.tiny(**changes)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None], ids=repr)
@pytest.mark.parametrize(
    "name",
    [
        "num_query_heads", "head_dim", "rope_dim", "sliding_window", "index_num_heads",
        "index_head_dim", "index_topk", "max_position", "block_tokens", "page_align",
    ],
)  # fmt: skip
def test_refuses_counts_below_one(name, value):
    with pytest.raises(ValueError, match=f"Invalid {name}: expected an integer from 1 to .*, got"):
        CacheConfig.tiny(**{name: value})


@pytest.mark.parametrize("value", [-1, 0.5, False, None], ids=repr)
@pytest.mark.parametrize("name", ["num_mtp_layers", "drafts_per_step"])
def test_refuses_negative_counts(name, value):
    with pytest.raises(ValueError, match=f"Invalid {name}: expected an integer from 0 to .*, got"):
        CacheConfig.tiny(**{name: value})


def test_edges_that_are_legal():
    assert CacheConfig.tiny(index_head_dim=96, index_hadamard=False).index_head_dim == 96
    assert CacheConfig(compress_ratios=(0, 4), block_tokens=4).block_tokens == 4
    assert CacheConfig(compress_ratios=(0, 0), block_tokens=1).smallest_ratio == 0
    assert CacheConfig(compress_ratios=(0,), num_mtp_layers=1).schedule[0].is_mtp
    assert CacheConfig.tiny(index_format="nvfp4", index_global_scale=0.25).index_global_scale


def test_smallest_ratio():
    assert CacheConfig(compress_ratios=(0, 128, 4)).smallest_ratio == 4
    assert CacheConfig(compress_ratios=(0, 128)).smallest_ratio == 128


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers", "num_attention_heads", "head_dim", "sliding_window", "index_n_heads",
        "index_head_dim", "index_topk", "rms_norm_eps", "rope_theta", "compress_rope_theta",
        "max_position_embeddings",
    ],
)  # fmt: skip
def test_from_hf_names_the_missing_key(key):
    with pytest.raises(ValueError, match=f"expected the key '{key}', which is missing"):
        CacheConfig.from_hf(flash_without(key))


def test_from_hf_needs_a_rope_width():
    with pytest.raises(ValueError, match="expected the key 'partial_rotary_factor'"):
        CacheConfig.from_hf(flash_without("qk_rope_head_dim"))


def test_from_hf_needs_a_schedule():
    with pytest.raises(ValueError, match="'layer_types' or 'compress_ratios', found neither"):
        CacheConfig.from_hf(flash_without("compress_ratios"))


@pytest.mark.parametrize("spelling", ["shipped", "saved"])
def test_from_hf_needs_a_layer_for_each_hidden_one(spelling):
    raw = SHIPPED_FLASH if spelling == "shipped" else saved_spelling(SHIPPED_FLASH)
    got = len(raw.get("layer_types") or raw["compress_ratios"])
    with pytest.raises(ValueError, match=f"expected at least 50 layers .*, got {got}"):
        CacheConfig.from_hf(raw | {"num_hidden_layers": 50})


@pytest.mark.parametrize("ratio", [3, 8, 64])
def test_from_hf_refuses_other_ratios(ratio):
    raw = flash_with(compress_ratios=[0, ratio], num_hidden_layers=2)
    with pytest.raises(ValueError, match=f"Unknown compression ratio: .* got {ratio}"):
        CacheConfig.from_hf(raw)


def test_from_hf_refuses_an_unknown_layer_type():
    raw = saved_spelling(SHIPPED_FLASH)
    raw["layer_types"][3] = "full_attention"
    with pytest.raises(ValueError, match=r"expected one of sliding_attention, .*'full_attention'"):
        CacheConfig.from_hf(raw)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("compressed_sparse_attention", 4), ("heavily_compressed_attention", 128)],
    ids=["csa", "hca"],
)
def test_from_hf_refuses_other_rates(name, expected):
    raw = saved_spelling(SHIPPED_FLASH)
    raw["compress_rates"][name] = 64
    with pytest.raises(ValueError, match=f"ratio of {name}: expected {expected}, got 64"):
        CacheConfig.from_hf(raw)


@pytest.mark.parametrize("spelling", ["shipped", "saved"])
def test_from_hf_refuses_mtp_where_there_is_none(spelling):
    raw = flash_with(compress_ratios=FLASH_RATIOS, num_nextn_predict_layers=0)
    raw = raw if spelling == "shipped" else saved_spelling(raw)
    with pytest.raises(ValueError, match=r"include_mtp was asked for, .* has no MTP layer"):
        CacheConfig.from_hf(raw, include_mtp=True)


@pytest.mark.parametrize("spelling", ["shipped", "saved"])
def test_from_hf_refuses_an_attention_factor(spelling):
    raw = deepcopy(SHIPPED_FLASH)
    raw["rope_scaling"]["attention_factor"] = 1.277
    if spelling == "saved":
        raw = saved_spelling(raw)
        raw["rope_parameters"]["compress"]["attention_factor"] = 1.277
    with pytest.raises(ValueError, match=r"expected attention_factor 1, got 1\.277"):
        CacheConfig.from_hf(raw)


@pytest.mark.parametrize("spelling", ["shipped", "saved"])
def test_from_hf_refuses_another_rope_type(spelling):
    raw = deepcopy(SHIPPED_FLASH)
    if spelling == "shipped":
        raw["rope_scaling"]["type"] = "linear"
    else:
        raw = saved_spelling(raw)
        raw["rope_parameters"]["compress"]["rope_type"] = "linear"
    with pytest.raises(ValueError, match="expected 'default' or 'yarn', got 'linear'"):
        CacheConfig.from_hf(raw)


@pytest.mark.parametrize("value", [7, None, ["config.json"]], ids=["int", "none", "list"])
def test_from_hf_refuses_another_type(value):
    name = type(value).__name__
    with pytest.raises(TypeError, match=f"a mapping or a path, got {name}"):
        CacheConfig.from_hf(value)


@pytest.mark.parametrize("missing", ["", "absent.json", "absent/config.json"])
def test_from_hf_refuses_a_path_without_a_file(tmp_path, missing):
    path = tmp_path / missing if missing else tmp_path
    with pytest.raises(ValueError, match=r"expected a config\.json, found none at"):
        CacheConfig.from_hf(path)


def test_from_hf_refuses_json_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"Invalid config.json: expected an object, got list"):
        CacheConfig.from_hf(tmp_path)


def test_from_hf_refuses_an_unknown_choice():
    with pytest.raises(TypeError, match="kv_fromat"):
        CacheConfig.from_hf(SHIPPED_FLASH, kv_fromat="fp8")


def test_is_frozen():
    config = CacheConfig.tiny()
    with pytest.raises(dataclasses.FrozenInstanceError, match="index_topk"):
        config.index_topk = 4


def test_is_hashable_with_a_list_of_ratios():
    from_list = CacheConfig(compress_ratios=[0, 4])
    assert {from_list: 1}[CacheConfig(compress_ratios=(0, 4))] == 1


@pytest.mark.parametrize(
    "config",
    [
        CacheConfig.tiny(),
        CacheConfig.v4_pro(include_mtp=True, kv_format="bf16", drafts_per_step=2),
        CacheConfig.tiny(index_format="nvfp4", index_global_scale=0.5, yarn=None),
    ],
    ids=["tiny", "pro", "nvfp4"],
)
def test_stored_fields_make_a_config_of_the_same_bytes(config):
    fields = json.loads(json.dumps(config.stored_fields))
    made = CacheConfig.from_stored_fields(fields)
    assert made.stored_fields == config.stored_fields
    assert made.format_fingerprint == config.format_fingerprint


@pytest.mark.parametrize("fields", [[], {}, {"compress_ratios": [4], "new_field": 1}])
def test_refuses_stored_fields_of_something_else(fields):
    with pytest.raises(ValueError, match="Invalid config: expected"):
        CacheConfig.from_stored_fields(fields)


def test_fingerprint_of_equal_storage():
    assert CacheConfig.tiny().format_fingerprint == CacheConfig.tiny().format_fingerprint
    shipped = CacheConfig.from_hf(SHIPPED_FLASH)
    saved = CacheConfig.from_hf(saved_spelling(SHIPPED_FLASH))
    assert shipped.format_fingerprint == saved.format_fingerprint


def test_fingerprint_of_a_preset_and_its_config_json():
    shipped = CacheConfig.from_hf(SHIPPED_FLASH)
    assert shipped == CacheConfig.v4_flash()
    assert shipped.format_fingerprint == CacheConfig.v4_flash().format_fingerprint


@pytest.mark.parametrize(
    "change",
    [{"num_query_heads": 8}, {"index_topk": 16}, {"max_position": 4096}, {"index_num_heads": 32}],
    ids=lambda change: next(iter(change)),
)
def test_fingerprint_ignores_what_only_reads(change):
    assert CacheConfig.tiny(**change).format_fingerprint == CacheConfig.tiny().format_fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"kv_format": "bf16"},
        {"kv_format": "fp8_entry_scale"},
        {"index_format": "fp8"},
        {"index_format": "nvfp4"},
        {"block_tokens": 512},
        {"page_align": 16},
        {"index_hadamard": False},
        {"tail_dtype": "bfloat16"},
        {"drafts_per_step": 1},
        {"rope_theta": 20000.0},
        {"compress_rope_theta": 40000.0},
        {"yarn": None},
        {"yarn": YarnScaling(original_max_position=8192)},
        {"rms_norm_eps": 1e-5},
        {"sliding_window": 64},
        {"head_dim": 160},
        {"rope_dim": 16, "head_dim": 80},
        {"index_head_dim": 128},
        {"compress_ratios": (0, 4, 4, 128)},
    ],
    ids=lambda change: "-".join(f"{name}={value}" for name, value in change.items())[:40],
)
def test_fingerprint_changes_with_the_bytes(change):
    assert CacheConfig.tiny(**change).format_fingerprint != CacheConfig.tiny().format_fingerprint


def test_fingerprint_changes_with_the_global_scale():
    def fingerprint(scale: float | None) -> str:
        config = CacheConfig.tiny(index_format="nvfp4", index_global_scale=scale)
        return config.format_fingerprint

    assert len({fingerprint(None), fingerprint(0.5), fingerprint(0.25)}) == 3


def test_fingerprints_are_distinct_from_each_other():
    changes = ({}, {"kv_format": "bf16"}, {"index_format": "bf16"}, {"tail_dtype": "bfloat16"})
    fingerprints = {CacheConfig.tiny(**change).format_fingerprint for change in changes}
    assert len(fingerprints) == len(changes)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"rope_theta": 10000}, {"rope_theta": 10000.0}),
        (
            {"index_format": "nvfp4", "index_global_scale": 1},
            {"index_format": "nvfp4", "index_global_scale": 1.0},
        ),
        ({"index_format": "nvfp4"}, {"index_format": "nvfp4", "index_global_scale": 1.0}),
    ],
    ids=["theta", "scale", "no_scale_is_1"],
)
def test_equal_meaning_has_an_equal_fingerprint(left, right):
    assert (
        CacheConfig.tiny(**left).format_fingerprint == CacheConfig.tiny(**right).format_fingerprint
    )


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"rope_theta": "1e4"}, "Invalid rope_theta: expected a number above 1, got '1e4'"),
        ({"compress_rope_theta": 1.0}, "Invalid compress_rope_theta: .* got 1.0"),
        ({"rms_norm_eps": float("inf")}, "Invalid rms_norm_eps: .* got inf"),
        ({"index_hadamard": "no"}, "Invalid index_hadamard: expected True or False, got 'no'"),
        ({"compress_ratios": (0, 3)}, "Unknown compression ratio: .* got 3"),
        ({"compress_ratios": ("4",)}, "Unknown compression ratio: .* got '4'"),
    ],
    ids=str,
)
def test_refuses_what_is_no_number(choices, message):
    with pytest.raises(ValueError, match=message):
        CacheConfig.tiny(**choices)


def test_refuses_bad_yarn():
    with pytest.raises(ValueError, match=r"Invalid factor: expected a number above 0, got 0"):
        YarnScaling(factor=0)
    with pytest.raises(ValueError, match="Invalid original_max_position: expected an integer"):
        YarnScaling(original_max_position=4096.0)


def test_from_hf_names_what_is_missing_or_odd():
    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            CacheConfig.from_hf({**saved_spelling(SHIPPED_FLASH), **changes})

    nested = saved_spelling(SHIPPED_FLASH)["rope_parameters"]
    without_theta = {**nested, "main": {"rope_type": "default"}}
    refused("expected the key 'rope_theta'", rope_parameters=without_theta)
    yarn_main = {**nested, "main": {**nested["main"], "rope_type": "yarn"}}
    refused("expected 'default', got 'yarn'", rope_parameters=yarn_main)
    refused("expected 4, got 8", compress_rate_csa=8)
    with pytest.raises(ValueError, match="expected the key 'factor'"):
        CacheConfig.from_hf({**SHIPPED_FLASH, "rope_scaling": {"type": "yarn"}})
    with pytest.raises(ValueError, match="has no MTP layer"):
        CacheConfig.from_hf(
            {**saved_spelling(SHIPPED_FLASH), "num_nextn_predict_layers": None}, include_mtp=True
        )
