"""DeepSeek-V4.1 as data: its preset and config.json, whose rows a layer reads, refusals, bytes."""

import dataclasses
import json

import pytest
from transformers import PretrainedConfig

from dsv4.cache.memory.layout import cache_layout, checkpoint_bytes
from dsv4.cache.memory.schema import build_schemas
from dsv4.config import CacheConfig, has_mtp_layers
from dsv4.layer_schedule import AttentionType
from dsv4.tools.cli import main
from tests.v41 import tiny_v41

HF_CONFIG = {
    "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1280, "rms_norm_eps": 1e-20, "sliding_window": 128,
    "max_position_embeddings": 1048576, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
                     "beta_fast": 32, "beta_slow": 1},
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0], "num_nextn_predict_layers": 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
}  # fmt: skip


@pytest.mark.parametrize("include_mtp", [False, True], ids=["main", "mtp"])
def test_preset_equals_the_config_json(include_mtp, tmp_path):
    preset = CacheConfig.v41_flash(include_mtp=include_mtp)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v41", "text_config": HF_CONFIG})
    )
    assert CacheConfig.from_hf(str(tmp_path), include_mtp=include_mtp) == preset
    assert CacheConfig.from_hf(HF_CONFIG, include_mtp=include_mtp) == preset
    assert preset.num_mtp_layers == 3 * include_mtp


class Holder:
    """A config object of transformers: one that holds the text model's, or itself."""

    def __init__(self, **fields):
        self.__dict__ |= fields

    def to_dict(self):
        return dict(self.__dict__)


def test_config_objects_hold_the_text_config():
    for text in (HF_CONFIG, Holder(**HF_CONFIG)):
        for outer in (Holder(text_config=text, head_dim=1), PretrainedConfig(text_config=text)):
            assert CacheConfig.from_hf(outer) == CacheConfig.v41_flash()
            assert has_mtp_layers(outer)
    with pytest.raises(TypeError, match="expected a DeepseekV4Config, a mapping or a path, got"):
        CacheConfig.from_hf(Holder(text_config=[1]))


def test_ratios_come_before_layer_types():
    """V4.1's layer types name the kv sources alone, and no ratio."""
    names = ["sliding_attention"] * 40
    for idx in HF_CONFIG["kv_source_layer_ids"]:
        names[idx] = "shared_compressed_attention"
    assert CacheConfig.from_hf({**HF_CONFIG, "layer_types": names}) == CacheConfig.v41_flash()


@pytest.mark.parametrize("given", [{}, {"candidate_source_layer_id": None}], ids=["none", "null"])
def test_the_last_kv_source_publishes_candidates(given):
    raw = {key: value for key, value in HF_CONFIG.items() if key != "candidate_source_layer_id"}
    assert CacheConfig.from_hf({**raw, **given}) == CacheConfig.v41_flash()
    off = CacheConfig.from_hf({**raw, "candidate_source_layer_id": -1})
    assert off == CacheConfig.v41_flash(candidate_source_layer_id=-1)
    assert CacheConfig.from_hf({**raw, **given}, candidate_source_layer_id=-1) == off


@pytest.mark.parametrize("key", ["kv_source_layer_ids", "index_source_layer_ids"])
def test_ratios_of_v41_need_sources(key):
    """V4's rows and its Hadamard transform would read such a model wrongly."""
    raw = {name: value for name, value in HF_CONFIG.items() if name != key}
    for given in ({}, {key: None}, {key: []}):
        with pytest.raises(ValueError, match=f"ratio 1 and 2 need {key}, got"):
            CacheConfig.from_hf({**raw, **given})
    assert CacheConfig.from_hf(raw, **{key: HF_CONFIG[key]}) == CacheConfig.v41_flash()
    with pytest.raises(ValueError, match=f"Invalid {key}: expected a list, got str"):
        CacheConfig.from_hf({**raw, key: "2, 8"})


def test_draft_layers_of_v41_need_sources():
    keys = ("kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id")
    raw = {name: value for name, value in HF_CONFIG.items() if name not in keys}
    raw |= {"compress_ratios": [0] * 40 + [2], "num_nextn_predict_layers": 1}
    with pytest.raises(ValueError, match="ratio 1 and 2 need kv_source_layer_ids, got None"):
        CacheConfig.from_hf(raw, include_mtp=True)


def test_sources_of_v4_are_refused():
    raw = {**HF_CONFIG, "compress_ratios": [0, 0] + [4] * 38, "num_nextn_predict_layers": 0}
    with pytest.raises(ValueError, match="expected layers of ratio 1 or 2, got layer 2"):
        CacheConfig.from_hf(raw)
    with pytest.raises(ValueError, match="candidate_source_layer_id: expected one of"):
        CacheConfig.from_hf({**raw, "kv_source_layer_ids": [], "index_source_layer_ids": []})


def test_owners_of_the_preset():
    schedule = CacheConfig.v41_flash(include_mtp=True).schedule
    owners = [-1, -1] + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20 + [-1] * 3
    choices = owners[:20] + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4 + [-1] * 3
    assert [layer.entries_of for layer in schedule] == owners
    assert [layer.choice_of for layer in schedule] == choices
    candidates = {layer.layer_idx: layer.candidates_of for layer in schedule}
    assert {idx for idx in candidates if candidates[idx] >= 0} == {24, 28, 32, 36}
    assert {layer.attention_type for layer in schedule[2:40]} == {AttentionType.CSA}
    assert [layer.layer_idx for layer in schedule if layer.owns_entries] == [2, 8, 14, 20]
    assert sum(layer.owns_choice for layer in schedule) == 8


def test_every_layer_of_v4_owns_its_own():
    for layer in CacheConfig.v4_flash(include_mtp=True).schedule:
        assert layer.owns_entries == (layer.ratio > 0)
        assert layer.owns_choice == (layer.ratio == 4)
        assert layer.candidates_of == -1 and not layer.has_latent_keys


def test_layers_of_ratio_1_and_2_may_own_their_own():
    config = tiny_v41(
        kv_source_layer_ids=(), index_source_layer_ids=(), candidate_source_layer_id=-1
    )
    assert all(layer.owns_entries == (layer.ratio > 0) for layer in config.schedule)
    assert config.num_layer_writes == 7 + 6


REFUSALS = {
    "two_models": ({"compress_ratios": (0, 2, 4, 1, 1, 1, 1)},
                   "expected those of one model, 4 and 128 or 1 and 2, got 4 and 2"),
    "order": ({"kv_source_layer_ids": (3, 1)},
              r"Invalid kv_source_layer_ids: expected ascending layers, got \[3, 1\]"),
    "twice": ({"index_source_layer_ids": (1, 3, 3)}, "index_source_layer_ids: expected asc"),
    "swa_source": ({"kv_source_layer_ids": (0, 1, 3)},
                   "Invalid kv_source_layer_ids: expected layers of ratio 1 or 2, got layer 0"),
    "no_layer": ({"kv_source_layer_ids": (1, 7)}, "kv_source_layer_ids: expected 0 to 6, got 1 to"),
    "kv_not_index": ({"index_source_layer_ids": (1, 4)},
                     "expected every kv source among them, layer 3 is not"),
    "no_owner": ({"kv_source_layer_ids": (3,), "index_source_layer_ids": (1, 3)},
                 "layer 1 needs a kv source of its ratio 2 up to itself, got none"),
    "owner_ratio": ({"kv_source_layer_ids": (1,), "index_source_layer_ids": (1, 3),
                     "candidate_source_layer_id": -1},
                    "layer 3 needs a kv source of its ratio 1 up to itself, got layer 1 of ratio"),
    "index_alone": ({"kv_source_layer_ids": ()}, "index_source_layer_ids needs kv_source"),
    "candidates_elsewhere": ({"candidate_source_layer_id": 5},
                             "candidate_source_layer_id: expected one of index_source_layer_ids"),
    "candidates_of_an_earlier_group": ({"candidate_source_layer_id": 1},
                                       "expected none after layer 1, got 3"),
    "few_candidates": ({"candidate_topk_blocks": 3},
                       r"3 blocks of 3 may hold 7 entries, expected at least index_topk \(8\)"),
    "no_block": ({"candidate_block_size": 0}, "candidate_block_size: expected an integer from 1"),
    "arrangement": ({"page_arrangement": "tiled"}, "Unknown page_arrangement: expected one of sp"),
    "entry_format": ({"entry_format": "fp5"}, "Unknown KV format: expected one of .* got 'fp5'"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_v41(**changes)


def test_as_many_candidates_as_are_chosen():
    assert tiny_v41(candidate_topk_blocks=8, candidate_block_size=1).candidate_topk_blocks == 8


def test_trained_rows_are_the_default():
    config = CacheConfig.v41_flash()
    assert (config.kv_row.row_bytes, config.entry_row.row_bytes, config.index_row.row_bytes) == (
        528, 288, 68,
    )  # fmt: skip
    assert config.kv_row.is_joined and config.entry_row.is_joined and not config.index_row.is_joined
    assert config.scale_floor == "amax" and not config.index_hadamard
    v4_rows = CacheConfig.v41_flash(kv_format="fp8")
    assert v4_rows.entry_row == v4_rows.kv_row == CacheConfig.v4_flash().kv_row


def test_pages_and_tails_belong_to_owners():
    config = CacheConfig.v41_flash()
    schemas = build_schemas(config)
    layout = cache_layout(config, schemas)
    assert {schema.layer.layer_idx for schema in schemas if schema.page_bytes} == {2, 8, 14, 20}
    assert {schema.layer.layer_idx for schema in schemas if schema.tail_bytes} == {2, 8, 14}
    for layer, rows in zip(config.schedule, layout.layers, strict=True):
        if layer.ratio:
            owner = layout.layers[layer.entries_of]
            assert rows.entries_offset == owner.entries_offset >= 0
            assert rows.index_offset == owner.index_offset > 0
        else:
            assert rows.entries_offset == rows.index_offset == -1
    assert layout.blocks.num_bytes == 890 * config.block_tokens
    assert checkpoint_bytes(schemas) == 40 * 128 * 528  # 2.58 MiB
    assert layout.slots.num_bytes - checkpoint_bytes(schemas) == 3 * 2 * 4096


@pytest.mark.parametrize(("block_tokens", "drafts"), [(256, 0), (256, 1), (64, 0), (8, 0)])
def test_pages_of_the_older_arrangement(block_tokens, drafts):
    """FlashMLA's strides are multiples of 512 bytes for window rows, of 256 for entries."""

    def has_strides(page_align):
        config = CacheConfig.v41_flash(
            page_arrangement="split", page_align=page_align, block_tokens=block_tokens,
            drafts_per_step=drafts,
        )  # fmt: skip
        layout = cache_layout(config, build_schemas(config))
        rings = [layout.slots.num_bytes, *(rows.ring_offset for rows in layout.layers)]
        owners = (layout.layers[idx] for idx in config.kv_source_layer_ids)
        pages = [layout.blocks.num_bytes, *(rows.entries_offset for rows in owners)]
        return not any([*(size % 512 for size in rings), *(size % 256 for size in pages)])

    assert has_strides(512)
    assert has_strides(16) == (block_tokens == 256 and drafts == 0)


def test_plan_has_890_bytes_a_token(capsys):
    assert main(["plan", "--model", "v41-flash", "--context", "1M", "--gpu", "h200", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    tokens = plan["bytes_per_token"].values()
    assert sum(part["payload"] for part in tokens) == 890
    assert sum(part["allocated"] for part in tokens) == 890
    assert (plan["kv_format"], plan["page_align"], plan["num_mtp_layers"]) == ("fp8_32", 16, 3)


def test_plan_of_v4_rows_has_1790_bytes_a_token(capsys):
    options = ["--context", "1M", "--gpu", "h200", "--json", "--kv", "fp8", "--index", "fp8"]
    assert main(["plan", "--model", "v41-flash", *options]) == 0
    tokens = json.loads(capsys.readouterr().out)["bytes_per_token"].values()
    assert sum(part["payload"] for part in tokens) == 1790


def test_layers_are_cut_at_kv_sources():
    """A stage is the config of its layers alone, in a model that it remembers."""
    config = CacheConfig.v41_flash(include_mtp=True)
    last = config.cut_layers(20, 40)
    assert last.compress_ratios == (1,) * 20 and last.kv_source_layer_ids == (0,)
    assert last.index_source_layer_ids == (0, 4, 8, 12, 16) and last.candidate_source_layer_id == 0
    first = config.cut_layers(0, 14)
    assert first.kv_source_layer_ids == (2, 8) and first.candidate_source_layer_id == -1
    drafts = config.cut_layers(40, 43)
    assert drafts.kv_source_layer_ids == () and drafts.num_mtp_layers == 3
    assert all(stage.has_latent_keys for stage in (first, last, drafts))
    assert first.cut_layers(8, 14) == config.cut_layers(8, 14)
    sizes = [cache_layout(c, build_schemas(c)).blocks.num_bytes for c in (first, last, drafts)]
    assert sizes == [356 * config.block_tokens, 356 * config.block_tokens, 16]
    assert last.format_fingerprint != first.format_fingerprint
    fields = json.loads(json.dumps(last.stored_fields))
    assert CacheConfig.from_stored_fields(fields).format_fingerprint == last.format_fingerprint


@pytest.mark.parametrize(("first", "last", "layer", "owner"), [(3, 8, 3, 2), (21, 40, 21, 20)])
def test_layers_without_their_owner_are_not_cut(first, last, layer, owner):
    message = f"cannot be cut out: .*, layer {layer} reads the entries of layer {owner}"
    with pytest.raises(ValueError, match=message):
        CacheConfig.v41_flash().cut_layers(first, last)


def test_plan_of_pipeline_stages(capsys):
    options = ["--context", "1M", "--gpu", "h200", "--json", "--no-mtp", "--pp"]
    for num_stages, starts in (("2", [0, 20]), ("3", [0, 14, 20])):
        assert main(["plan", "--model", "v41-flash", *options, num_stages]) == 0
        stages = json.loads(capsys.readouterr().out)["stages"]
        ends = [*starts[1:], 40]
        assert [stage["layers"] for stage in stages] == [*map(list, zip(starts, ends, strict=True))]
    with pytest.raises(SystemExit):
        main(["plan", "--model", "v41-flash", *options, "7"])
    assert "from 1 to 6 (the most stages that share no entries)" in capsys.readouterr().err


def test_fingerprint_covers_stored_choices_alone():
    fingerprint = tiny_v41().format_fingerprint
    for change in (
        {"page_arrangement": "split"}, {"scale_floor": "scale"}, {"entry_format": "fp8_32"},
        {"kv_source_layer_ids": (1, 2, 3), "index_source_layer_ids": (1, 2, 3, 4, 6)},
    ):  # fmt: skip
        assert tiny_v41(**change).format_fingerprint != fingerprint
    for change in (
        {"index_source_layer_ids": (1, 3, 6)}, {"candidate_source_layer_id": -1},
        {"candidate_topk_blocks": 9}, {"candidate_block_size": 4},
    ):  # fmt: skip
        assert tiny_v41(**change).format_fingerprint == fingerprint


def test_stored_fields_make_the_same_rows():
    config = CacheConfig.v41_flash()
    fields = json.loads(json.dumps(config.stored_fields))
    assert CacheConfig.from_stored_fields(fields).format_fingerprint == config.format_fingerprint


def test_v4_is_described_as_before():
    """A V4 file has no word of sources, and its fingerprint is the one it always was."""
    new = {"kv_source_layer_ids", "entry_format", "page_arrangement", "scale_floor"}
    assert new <= {field.name for field in dataclasses.fields(CacheConfig)}
    assert not new & set(CacheConfig.v4_flash().stored_fields)
    assert CacheConfig.v4_flash().format_fingerprint == (
        "ca3231f96f5aaf67c1473e3defa68a5f1bb8e46afcef4566b4ce7a9cf20b2724"
    )
