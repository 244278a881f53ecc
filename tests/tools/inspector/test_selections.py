"""Recorded selections: those that attention used, in a file and in a map."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.kernels.contracts import Selection
from dsv4.testing import Row, join_rows, model_projections, model_weights, run_forward, take_rows
from dsv4.tools.inspector import heatmap, report
from dsv4.tools.inspector.heatmap import draw_heatmap, map_choices
from dsv4.tools.inspector.report import describe_selections
from dsv4.tools.inspector.selections import (
    SELECTIONS_FILE,
    LayerSelections,
    SelectionRecorder,
    read_selections,
)
from dsv4.tools.outputs import check_output

CONFIG = CacheConfig.tiny(drafts_per_step=3)
WEIGHTS = model_weights(CONFIG, seed=0)
TOKENS = model_projections(CONFIG, 90, seed=10)
OTHERS = model_projections(CONFIG, 90, seed=50)
CSA_LAYERS = [1, 3]


def make_manager() -> KVCacheManager:
    return KVCacheManager(CONFIG, max_requests=3, num_blocks=4, max_forward_tokens=128)


def watched_forward(manager, recorder, rows) -> list:
    plan = prepare_forward(
        manager, [r.slot for r in rows], [r.before for r in rows], [r.after for r in rows]
    )
    results = []
    for idx, weights in enumerate(WEIGHTS):
        parts = [take_rows(row.layers[idx], slice(row.before, row.after)) for row in rows]
        handle = recorder.watch(manager.acquire(idx, plan))
        results.append(handle.forward(join_rows(parts), weights))
    return results


def run_watched() -> tuple[KVCacheManager, SelectionRecorder, list]:
    """Run two requests and watch the second: a chunk, then three steps, one rolled back."""
    manager = make_manager()
    first, second = manager.open_request(), manager.open_request()
    recorder = SelectionRecorder(second)
    outputs = []
    for before, after in ((0, 60), (60, 61), (61, 63)):
        rows = [Row(first, OTHERS, before, after), Row(second, TOKENS, before, after)]
        outputs.append(watched_forward(manager, recorder, rows))
    manager.truncate(second, 61)
    outputs.append(watched_forward(manager, recorder, [Row(second, OTHERS, 61, 63)]))
    return manager, recorder, outputs


def test_records_what_select_entries_gave():
    _, recorder, _ = run_watched()
    found = recorder.selections()
    assert sorted(found) == CSA_LAYERS
    for layer in found.values():
        assert layer.positions.tolist() == list(range(63))
        visible = (layer.positions + 1) // 4
        assert torch.equal((layer.entries >= 0).sum(dim=1), visible.clamp(max=CONFIG.index_topk))
        assert (layer.entries < visible[:, None]).all()
    alone = SelectionRecorder(0)
    fresh = make_manager()
    slot = fresh.open_request()
    mixed = [
        join_rows([take_rows(a, slice(0, 61)), take_rows(b, slice(61, 63))])
        for a, b in zip(TOKENS, OTHERS, strict=True)
    ]
    watched_forward(fresh, alone, [Row(slot, mixed, 0, 63)])
    for idx, layer in alone.selections().items():
        assert torch.equal(layer.entries, found[idx].entries)


def test_watching_changes_nothing():
    _, _, outputs = run_watched()
    manager = make_manager()
    first, second = manager.open_request(), manager.open_request()
    for (before, after), got in zip(((0, 60), (60, 61), (61, 63)), outputs, strict=False):
        rows = [Row(first, OTHERS, before, after), Row(second, TOKENS, before, after)]
        for mine, theirs in zip(run_forward(manager, WEIGHTS, rows), got, strict=True):
            assert torch.equal(mine.output, theirs.output)


def test_a_file_of_them(tmp_path):
    _, recorder, _ = run_watched()
    path = tmp_path / "selections.safetensors"
    recorder.save(path)
    read, kept = read_selections(path), recorder.selections()
    assert list(read) == list(kept)
    for idx, layer in kept.items():
        assert torch.equal(read[idx].positions, layer.positions)
        assert torch.equal(read[idx].entries, layer.entries)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        (None, "expected metadata 'selections' in JSON, found none"),
        ("[]", "expected metadata 'selections' to be an object"),
        ('{"format": "x"}', "expected the format dsv4-selections-2, got x"),
        ('{"format": "dsv4-selections-1"}', "expected the format dsv4-selections-2, got"),
        ('{"format": "dsv4-selections-2"}', "its contents do not match its checksum"),
    ],
)
def test_other_files_are_refused(tmp_path, metadata, match):
    path = tmp_path / "file"
    save_file(
        {"a": torch.zeros(2, dtype=torch.int32)},
        path,
        None if metadata is None else {"selections": metadata},
    )
    with pytest.raises(ValueError, match=f"Invalid recorded selections .*: {match}"):
        read_selections(path)


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("positions", "entries", "match"),
    [
        ([4, 5], [[0]] * 3, r"expected \[tokens\] and \[tokens, topk\] in layer 1, got \[2\] and"),
        ([-5, 4], [[-1], [0]], "expected ascending positions from 0 on in layer 1"),
        ([5, 4], [[0], [0]], "expected ascending positions from 0 on in layer 1"),
        ([4, 4], [[0], [0]], "expected ascending positions from 0 on in layer 1"),
        ([4, 5], [[-2], [0]], "expected entries that their tokens see, or -1, in layer 1"),
        ([2, 5], [[0], [0]], "expected entries that their tokens see, or -1, in layer 1"),
        ([4, 5], [[0], [2**31 - 1]], "expected entries that their tokens see, or -1, in layer 1"),
        (None, [[0]], "expected positions and entries of layers"),
    ],
)
def test_selections_that_cannot_be(tmp_path, positions, entries, match):
    tensors = {"layer.1.entries": int32(entries)}
    if positions is not None:
        tensors["layer.1.positions"] = int32(positions)
    SELECTIONS_FILE.write(tmp_path / "file", {}, tensors)
    with pytest.raises(ValueError, match=f"Invalid recorded selections .*: {match}"):
        read_selections(tmp_path / "file")


def test_selections_of_another_dtype(tmp_path):
    tensors = {"layer.1.positions": int32([4]), "layer.1.entries": int32([[0]]).to(torch.uint8)}
    SELECTIONS_FILE.write(tmp_path / "file", {}, tensors)
    with pytest.raises(ValueError, match=r"expected int32 in layer 1, got .* and torch\.uint8"):
        read_selections(tmp_path / "file")


def test_a_damaged_file_is_refused(tmp_path):
    _, recorder, _ = run_watched()
    path = tmp_path / "selections.safetensors"
    recorder.save(path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in (header, header + 5, len(whole) - 1, header - 40):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="Invalid recorded selections"):
            read_selections(path)


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="No recorded selections at"):
        read_selections(tmp_path / "nothing")
    (tmp_path / "torn").write_bytes(b"\x10\0\0")
    with pytest.raises(ValueError, match="expected a whole safetensors file"):
        read_selections(tmp_path / "torn")


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"expected positions \[tokens\] and entries .* got \[3\]"):
        SelectionRecorder(0).record(1, torch.zeros(3), torch.zeros(4, 2))


def made_selections() -> LayerSelections:
    """Make 40 tokens; each chose entry 0 and its newest visible entry."""
    positions = torch.arange(40, dtype=torch.int32)
    newest = (positions + 1) // 4 - 1
    oldest = torch.where(newest > 0, 0, -1).int()
    entries = torch.stack((torch.where(newest > 0, oldest, newest), newest), dim=1)
    entries[newest <= 0, 1] = -1
    return LayerSelections(positions, entries.int())


def test_the_map_counts_choices():
    rates = map_choices(made_selections()).rates
    assert rates.shape == (10, 40)
    for token in range(40):
        visible = (token + 1) // 4
        assert np.isnan(rates[visible:, token]).all()
        expected = [1.0 if entry in (0, visible - 1) else 0.0 for entry in range(visible)]
        assert rates[:visible, token].tolist() == expected


def test_cells_of_several_tokens_and_entries(monkeypatch):
    monkeypatch.setattr(heatmap, "MAX_CELLS", 5)
    chosen = map_choices(made_selections())
    assert (chosen.token_step, chosen.entry_step, chosen.rates.shape) == (8, 2, (5, 5))
    # Tokens 0 to 7 see entry 0 five times, and entry 1 once; the seventh chose both.
    assert chosen.rates[0, 0] == 1.0
    # Tokens 32 to 39 see 8 to 10 entries; the newest are the 8th (3 times), 9th and 10th.
    assert chosen.rates[4, 4] == 5 / (4 * 1 + 1 * 2)
    assert chosen.rates[0, 4] == 8 / 16
    assert np.isnan(chosen.rates[4, 0])


def test_numbers_of_a_selection():
    (layer,) = describe_selections({7: made_selections()})
    assert (layer["layer"], layer["tokens"], layer["entries"]) == (7, 40, 10)
    chosen = [0] * 3 + [1] * 4 + [2] * 33
    assert layer["chosen_per_token"] == sum(chosen) / 40
    assert layer["never_chosen"] == 0.0
    kept = sum(1 if (p + 1) % 4 == 0 else n for p, n in enumerate(chosen) if n and chosen[p - 1])
    assert layer["kept_from_token_before"] == kept / sum(chosen[1:])


@pytest.mark.parametrize("chunk", [1, 2, 7, 2048])
def test_choices_kept_from_the_token_before(monkeypatch, chunk):
    monkeypatch.setattr(report, "CHUNK_TOKENS", chunk)
    _, recorder, _ = run_watched()
    selections = recorder.selections()
    for layer in describe_selections(selections):
        rows = [set(row) - {-1} for row in selections[layer["layer"]].entries.tolist()]
        kept = sum(len(a & b) for a, b in pairwise(rows))
        assert layer["kept_from_token_before"] == kept / sum(map(len, rows[1:]))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"heat{suffix}"
    draw_heatmap({1: made_selections(), 3: made_selections(), 9: made_selections()}, path)
    start = path.read_bytes()[:256]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in start


def test_a_picture_of_tokens_that_see_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    nothing = LayerSelections(torch.arange(3).int(), torch.full((3, 2), -1).int())
    draw_heatmap({1: nothing}, tmp_path / "heat.png")
    assert (tmp_path / "heat.png").is_file()


def test_refuses_other_pictures(tmp_path):
    with pytest.raises(ValueError, match=r"Invalid heat map file: expected .png or .svg, got"):
        check_output("--heatmap", tmp_path / "heat.pdf", force=False)
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="expected tokens in every layer, got none"):
        draw_heatmap({}, tmp_path / "heat.png")


def test_watched_handles_return_selections():
    manager = make_manager()
    slot = manager.open_request()
    plan = prepare_forward(manager, [slot], [0], [40])
    handle = SelectionRecorder(slot).watch(manager.acquire(1, plan))
    inputs = take_rows(TOKENS[1], slice(0, 40))
    handle.write(inputs, WEIGHTS[1])
    selection = handle.select_entries(inputs.indexer.query, inputs.indexer.head_weights)
    assert isinstance(selection, Selection)
