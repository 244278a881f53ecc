"""The inspector's report of a saved request matches its rows."""

import json

import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.cache.saved_request import SavedRequest, read_any, write_saved
from dsv4.kernels.reference.codec import decode, encode
from dsv4.model.attention import forward_layer
from dsv4.testing import Row, model_projections, model_weights, poison, run_forward
from dsv4.tools.inspector import parts as parts_module
from dsv4.tools.inspector.command import read_layer_selections
from dsv4.tools.inspector.heatmap import map_choices
from dsv4.tools.inspector.parts import layer_parts
from dsv4.tools.inspector.report import RequestInspector, describe_selections
from dsv4.tools.inspector.selections import SelectionRecorder
from tests.cache.test_forged_request import forge
from tests.v41 import tiny_v41

CHOICES = {"drafts_per_step": 3, "block_tokens": 128}
CONFIG = CacheConfig.tiny(**CHOICES)
WEIGHTS = model_weights(CONFIG, seed=0)
TOKENS = model_projections(CONFIG, 450, seed=10)


def save(path, config=CONFIG, length=270, tokens=TOKENS):
    manager = KVCacheManager(config, max_requests=2, num_blocks=8, max_forward_tokens=512)
    poison(manager)
    manager.open_request()
    slot = manager.open_request()
    run_forward(manager, WEIGHTS, [Row(slot, tokens, 0, length)])
    manager.save_request(slot, path)
    return manager


def inspect(path, **options):
    inspector = RequestInspector(path, **options)
    return inspector.report(list(inspector.layers()))


def part_of(report, layer, name):
    (found,) = [part for part in report["layers"][layer]["parts"] if part["part"] == name]
    return found


@pytest.fixture
def path(tmp_path):
    return tmp_path / "request.safetensors"


def test_a_file_says_what_it_means(path):
    save(path)
    config, saved = read_any(path)
    assert config.stored_fields == CONFIG.stored_fields
    assert config.format_fingerprint == CONFIG.format_fingerprint
    assert saved.length == 270


@pytest.mark.parametrize(
    ("length", "blocks", "fill", "rows", "csa", "hca"),
    [
        (1, 0, None, 1, (1, 1, 0), (1, 1, 0)), (4, 1, 4 / 128, 4, (0, 4, 1), (4, 4, 0)),
        (127, 1, 124 / 128, 127, (3, 7, 31), (127, 15, 0)),
        (128, 1, 1.0, 127, (0, 4, 32), (0, 0, 1)),
        (270, 3, 268 / 384, 127, (2, 6, 67), (14, 14, 2)),
        (273, 3, 272 / 384, 127, (1, 5, 68), (17, 1, 2)),
    ],
)  # fmt: skip
def test_blocks_window_and_tails(path, length, blocks, fill, rows, csa, hca):
    manager = save(path, length=length)
    report = inspect(path)
    assert (report["length"], report["rollback_floor"]) == (length, length)
    assert report["blocks"] == {
        "num_blocks": blocks, "block_tokens": 128, "fill": fill,
        "block_bytes": manager.paged.layout.num_bytes,
    }  # fmt: skip
    assert report["window"] == {
        "rows": rows, "ring_rows": 131, "first_position": length - rows,
        "last_position": length - 1, "next_row": length % 131,
    }  # fmt: skip
    found = {
        tail["type"]: (tail["open_tokens"], tail["rows"], tail["closed_entries"])
        for tail in report["tails"]
    }
    assert found == {"CSA": csa, "HCA": hca}
    (sums,) = (p for layer in report["layers"] for p in layer["parts"] if p["part"] == "sums")
    assert sums["rows"] == length % 128 // 16
    assert report["problems"] == []


def test_layers_that_share_entries(path, tmp_path):
    """Entries and tails are their owners', and choices of every ratio are read."""
    config, length = tiny_v41(), 41
    manager = KVCacheManager(config, max_requests=1, num_blocks=8)
    slot, layers = manager.open_request(), model_projections(config, length, seed=1)
    recorder, chosen = SelectionRecorder(slot), {}
    plan = prepare_forward(manager, [slot], [0], [length])
    for idx, weights in enumerate(model_weights(config, seed=3)):
        forward_layer(recorder.watch(manager.acquire(idx, plan)), layers[idx], weights, chosen)
    manager.save_request(slot, path)
    recorder.save(tmp_path / "selections")
    report = inspect(path)
    entries = [(layer["layer"], part["rows"]) for layer in report["layers"]
               for part in layer["parts"] if part["part"] == "entries"]  # fmt: skip
    assert entries == [(1, 20), (3, 41)]
    tails = [(tail["type"], tail["rows"], tail["closed_entries"]) for tail in report["tails"]]
    assert tails == [("CSA 1:1", 0, 41), ("CSA 2:1", 1, 20)]
    selections = read_layer_selections(tmp_path / "selections", RequestInspector(path))
    assert {idx: layer.ratio for idx, layer in selections.items()} == {1: 2, 3: 1, 4: 1, 6: 1}
    assert all(torch.equal(layer.entries, chosen[i].entry_idx) for i, layer in selections.items())
    assert [row["entries"] for row in describe_selections(selections)] == [20, 41, 41, 41]
    assert map_choices(selections[1]).rates.shape == (20, 41)
    recorder = SelectionRecorder(slot)
    recorder.record(1, torch.arange(3), torch.zeros(3, 8), ratio=1)  # it has ratio 2
    recorder.save(tmp_path / "other")
    with pytest.raises(ValueError, match=r"expected layers of \[1, 2, 3, 4, 5, 6\], the CSA"):
        read_layer_selections(tmp_path / "other", RequestInspector(path))


def test_an_empty_request(path):
    manager = KVCacheManager(CONFIG, max_requests=1, num_blocks=1)
    manager.save_request(manager.open_request(), path)
    report = inspect(path)
    assert report["window"]["first_position"] is None and report["blocks"]["fill"] is None
    for layer in report["layers"]:
        for part in layer["parts"]:
            assert (part["rows"], part["minimum"], part["zero_rate"]) == (0, None, None)
    json.dumps(report)


@pytest.mark.parametrize("kv_format", ["fp8", "fp8_entry_scale", "bf16", "fp32"])
@pytest.mark.parametrize("index_format", ["mxfp4", "nvfp4", "fp8", "bf16", "fp32"])
def test_ranges_are_those_of_the_rows(path, monkeypatch, kv_format, index_format):
    monkeypatch.setattr(parts_module, "CHUNK_ROWS", 50)
    scale = {"index_global_scale": 0.75} if index_format == "nvfp4" else {}
    config = CacheConfig.tiny(kv_format=kv_format, index_format=index_format, **CHOICES, **scale)
    manager = save(path, config)
    report = inspect(path)
    gathered = {}
    plan_rows = manager._books.requests.block_table[1, :3]
    for idx in (1, 3):
        pages = manager.paged.layer(idx)
        flat = torch.cat([torch.arange(int(b) * 32, int(b) * 32 + 32) for b in plan_rows])[:67]
        for name, rows, row in (
            ("entries", pages.entries, config.kv_row),
            ("index keys", pages.index_keys, config.index_row),
        ):  # fmt: skip
            factor = pages.indexer_global_scale if name == "index keys" and scale else None
            bytes_of = parts_module.read_rows(rows, flat)
            gathered[idx, name] = decode(row, bytes_of, global_scale=factor)
    ring = manager.state.layer(2).ring
    window = parts_module.read_rows(ring, 131 + torch.arange(143, 270) % 131)
    gathered[2, "window"] = decode(config.kv_row, window)
    for (idx, name), values in gathered.items():
        part = part_of(report, idx, name)
        assert part["rows"] == len(values)
        assert part["minimum"] == float(values.min()) and part["maximum"] == float(values.max())
    is_coded = kv_format.startswith("fp8")
    assert (part_of(report, 1, "entries")["saturation_rate"] is not None) == is_coded
    assert part_of(report, 1, "tail")["format"] is None
    assert report["problems"] == []


def rewrite(path, change) -> None:
    """Change the rows of a saved request and save it again with a new checksum."""
    config, saved = read_any(path)
    slot, blocks = saved.slot.clone(), saved.blocks.clone()
    changed = SavedRequest(saved.length, saved.rollback_floor, slot, blocks)
    change(layer_parts(config, changed))
    write_saved(path, changed, config)


def set_rows(part, numbers, values) -> None:
    flat_rows = part.flat_rows(torch.tensor(numbers))
    encoded = encode(part.row_format, values)
    pages = part.rows
    page, row = flat_rows // pages.rows_per_page, flat_rows % pages.rows_per_page
    pages.data[page, row] = encoded.data
    pages.scales[page, row] = encoded.scales


def named(parts, layer, name):
    (part,) = [part for part in parts[layer] if part.name == name]
    return part


def test_zero_and_saturation_rates(path):
    """67 entries of 64 FP8 codes: 2 rows of zeros, and 3 whose codes are all ±448."""
    save(path)
    before = inspect(path)

    def change(parts):
        entries = named(parts, 1, "entries")
        set_rows(entries, [5, 9], torch.zeros(2, 96))
        set_rows(entries, [1, 2, 66], 448.0 * torch.tensor([1.0, -1.0]).repeat(3, 48))
        keys = named(parts, 3, "index keys")
        set_rows(keys, list(range(67)), torch.tensor([6.0, -6.0, 0.0, 1.0]).repeat(67, 16))

    rewrite(path, change)
    report = inspect(path)
    part, old = part_of(report, 1, "entries"), part_of(before, 1, "entries")
    assert part["maximum"] == 448.0 and part["minimum"] == -448.0
    zeros = 67 * 64 * old["zero_rate"]
    saturated = 67 * 64 * old["saturation_rate"]
    assert 2 * 64 <= 67 * 64 * part["zero_rate"] <= 2 * 64 + zeros
    assert 3 * 64 <= 67 * 64 * part["saturation_rate"] <= 3 * 64 + saturated
    keys = part_of(report, 3, "index keys")
    assert (keys["zero_rate"], keys["saturation_rate"]) == (0.25, 0.5)
    assert (keys["minimum"], keys["maximum"]) == (-6.0, 6.0)


def test_finds_what_is_not_finite(path):
    save(path)

    def change(parts):
        bad = torch.ones(3, 96)
        bad[:, 7] = torch.nan
        bad[1, 95] = torch.inf
        set_rows(named(parts, 1, "entries"), [20, 21, 40], bad)
        set_rows(named(parts, 2, "entries"), [1], bad[:1])
        set_rows(named(parts, 0, "window"), [200, 201], bad[:2])
        tail = named(parts, 2, "tail")
        tail.rows[tail.flat_rows(torch.tensor([260])), 0, 3] = -torch.inf

    rewrite(path, change)
    problems = inspect(path)["problems"]
    names = ("layer", "type", "part", "first_row", "last_row", "first_token", "last_token", "nan",
             "inf")  # fmt: skip
    assert [tuple(problem[name] for name in names) for problem in problems] == [
        (0, "SWA", "window", 200, 201, 200, 201, 2, 1),
        (1, "CSA", "entries", 20, 21, 76, 87, 2, 1),
        (1, "CSA", "entries", 40, 40, 156, 163, 1, 0),
        (2, "HCA", "entries", 1, 1, 128, 255, 1, 0),
        (2, "HCA", "tail", 260, 260, 260, 260, 0, 1),
    ]


def test_a_scale_that_is_nan(path):
    save(path)

    def change(parts):
        keys = named(parts, 1, "index keys")
        keys.rows.scales[0, 0, 1] = 0xFF

    rewrite(path, change)
    (problem,) = inspect(path)["problems"]
    assert (problem["part"], problem["first_row"], problem["nan"]) == ("index keys", 0, 32)
    assert (problem["first_token"], problem["last_token"]) == (0, 3)


def test_errors_against_bf16(path, tmp_path):
    save(path)
    exact = tmp_path / "exact"
    save(exact, CacheConfig.tiny(kv_format="bf16", index_format="bf16", **CHOICES))
    report = inspect(path, against=exact)
    config, saved = read_any(exact)
    for idx, name in ((0, "window"), (1, "entries"), (2, "entries"), (3, "index keys")):
        truth = named(layer_parts(config, saved), idx, name)
        numbers = torch.arange(truth.first, truth.first + truth.num_rows)
        values = truth.read(numbers)[0].double()
        row = CONFIG.index_row if name == "index keys" else CONFIG.kv_row
        error = (decode(row, encode(row, values.float())).double() - values).abs()
        part = part_of(report, idx, name)
        assert part["largest_error"] == float(error.max()) > 0
        expected = float((error.square().sum() / values.square().sum()).sqrt())
        assert part["relative_rms_error"] == pytest.approx(expected, rel=1e-12)
        assert part["relative_rms_error"] < (0.2 if name == "index keys" else 0.04)
    assert part_of(report, 1, "tail")["relative_rms_error"] is None


def test_errors_only_where_they_are_known(path, tmp_path):
    save(path)
    exact = tmp_path / "exact"
    save(exact, CacheConfig.tiny(kv_format="bf16", index_format="fp8", **CHOICES))
    report = inspect(path, against=exact)
    assert part_of(report, 1, "entries")["relative_rms_error"] > 0
    assert part_of(report, 1, "index keys")["relative_rms_error"] is None
    assert part_of(inspect(path), 1, "entries")["relative_rms_error"] is None


@pytest.mark.parametrize(
    ("choices", "length", "match"),
    [
        ({"kv_format": "fp8"}, 270, "expected rows in bf16 or fp32, got fp8"),
        ({"kv_format": "bf16"}, 269, "expected 270 tokens, got 269"),
        ({"kv_format": "bf16", "index_hadamard": False}, 270, "expected layers and widths"),
    ],
)
def test_refuses_to_compare_with_others(path, tmp_path, choices, length, match):
    save(path)
    save(tmp_path / "other", CacheConfig.tiny(**CHOICES, **choices), length)
    with pytest.raises(ValueError, match=f"Invalid request to compare with .*: {match}"):
        RequestInspector(path, against=tmp_path / "other")


def test_refuses_to_compare_with_other_owners(path, tmp_path):
    sources = {"kv_source_layer_ids": (1, 2, 3), "index_source_layer_ids": (1, 2, 3, 4, 6)}
    for each, config in (
        (path, tiny_v41(**sources)), (tmp_path / "other", tiny_v41(kv_format="bf16")),
    ):  # fmt: skip
        manager = KVCacheManager(config, max_requests=1, num_blocks=1)
        manager.save_request(manager.open_request(), each)
    with pytest.raises(ValueError, match=r"expected layers and widths .*\(1, 2, 3\).*\(1, 3\)"):
        RequestInspector(path, against=tmp_path / "other")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"config": "{"}, "expected a config of this version"),
        ({"config": "[]"}, "expected a config of this version"),
        ({"config": '{"x": 1}'}, "expected a config of this version"),
        ({"length": "3", "checksum": "0"}, "its contents do not match its checksum"),
        ({"length": "-5"}, "expected length to be a whole number from 0 to .*, got -5"),
        (
            {"config": json.dumps({**CONFIG.stored_fields, "rope_theta": 9.0})},
            "expected config_fingerprint",
        ),
    ],
)
def test_refuses_files_that_do_not_say_what_they_mean(path, changes, match):
    save(path)
    forge(path, **changes)
    with pytest.raises(ValueError, match=f"Invalid saved request .*: {match}"):
        read_any(path)


def test_refuses_a_file_with_too_few_blocks(path):
    save(path)
    config, saved = read_any(path)
    write_saved(path, SavedRequest(270, 270, saved.slot, saved.blocks[:2].clone()), config)
    with pytest.raises(ValueError, match="expected 3 blocks and a floor from 0 to 270, got 2 and"):
        read_any(path)
