"""A request in a file: it goes on where it was, and no other file is taken for one."""

import json
import os
import random

import pytest
import torch
from safetensors.torch import save_file

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.errors import LiveForwardError, NoFreeSlotError, OutOfBlocksError
from dsv4.testing import Row, model_projections, model_weights, poison, run_forward
from tests.v41 import tiny_v41

CHOICES = {"drafts_per_step": 3, "block_tokens": 128}
CONFIG = CacheConfig.tiny(**CHOICES)
LATENT = tiny_v41(**CHOICES)
WEIGHTS = {each.compress_ratios: model_weights(each, seed=0) for each in (CONFIG, LATENT)}
TOKENS = model_projections(CONFIG, 450, seed=10)
OTHERS = model_projections(CONFIG, 450, seed=90)


def make_manager(config=CONFIG, **sizes):
    defaults = {"max_requests": 3, "num_blocks": 8, "max_forward_tokens": 512}
    manager = KVCacheManager(config, **{**defaults, **sizes})
    poison(manager)
    return manager


def grown_manager(length, layers=TOKENS, **sizes):
    manager = make_manager(**sizes)
    feed(manager, manager.open_request(), layers, length)
    return manager


def feed(manager, slot, layers, after):
    weights, before = WEIGHTS[manager.config.compress_ratios], int(manager.lengths[slot])
    return run_forward(manager, weights, [Row(slot, layers, before, after)])


def outputs_of(manager, slot, length):
    return [
        part
        for after in (length + 1, length + 5, length + 140)
        for result in feed(manager, slot, TOKENS, after)
        for part in result
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "request.safetensors"


@pytest.mark.parametrize("length", [0, 1, 3, 4, 127, 128, 131, 132, 255, 256, 260, 300])
def test_a_loaded_request_goes_on_as_the_saved_one(path, length):
    manager = grown_manager(length)
    manager.save_request(0, path)
    other = make_manager(num_blocks=9)
    feed(other, other.open_request(), OTHERS, 140)
    slot = other.load_request(path)
    assert (other.lengths[slot], other.rollback_floor[slot]) == (length, length)
    other.check_integrity()
    mine, expected = outputs_of(other, slot, length), outputs_of(manager, 0, length)
    for got, want in zip(mine, expected, strict=True):
        assert torch.equal(got, want)
    other.save_request(slot, path.with_name("mine"))
    manager.save_request(0, path.with_name("expected"))
    assert path.with_name("mine").read_bytes() == path.with_name("expected").read_bytes()
    other.check_integrity()


@pytest.mark.parametrize("length", [100, 133])
def test_a_file_holds_nothing_of_others(path, length):
    manager = make_manager()
    slot = manager.open_request()
    feed(manager, slot, OTHERS, 300)
    manager.truncate(slot, 0)
    feed(manager, slot, TOKENS, length)
    feed(manager, slot, OTHERS, length + 3)
    manager.truncate(slot, length)
    manager.save_request(slot, path)
    fresh = KVCacheManager(CONFIG, max_requests=1, num_blocks=2, max_forward_tokens=512)
    feed(fresh, fresh.open_request(), TOKENS, length)
    fresh.save_request(0, path.with_name("fresh"))
    assert path.read_bytes() == path.with_name("fresh").read_bytes()


def test_a_missing_folder_is_named(path):
    folder = path.parent / "none"
    with pytest.raises(FileNotFoundError, match=f"^No folder {folder} for a"):
        grown_manager(5).save_request(0, folder / "it")


def test_a_loaded_request_has_no_past_to_go_back_to(path):
    manager = grown_manager(130)
    manager.save_request(0, path)
    slot = manager.load_request(path)
    with pytest.raises(ValueError, match="nearest possible lengths are 0 and 130"):
        manager.truncate(slot, 129)
    feed(manager, slot, OTHERS, 132)
    manager.truncate(slot, 130)
    for got, want in zip(
        outputs_of(manager, slot, 130), outputs_of(grown_manager(130), 0, 130), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kv_format", ["fp8", "fp8_entry_scale", "bf16", "fp32"])
@pytest.mark.parametrize("index_format", ["mxfp4", "nvfp4", "fp8", "bf16", "fp32"])
def test_every_format(path, kv_format, index_format):
    config = CacheConfig.tiny(kv_format=kv_format, index_format=index_format, **CHOICES)
    manager = make_manager(config)
    feed(manager, manager.open_request(), TOKENS, 270)
    manager.save_request(0, path)
    slot = manager.load_request(path)
    manager.save_request(slot, path.with_name("again"))
    assert path.read_bytes() == path.with_name("again").read_bytes()
    feed(manager, slot, TOKENS, 300)
    feed(manager, 0, TOKENS, 300)
    manager.save_request(0, path)
    manager.save_request(slot, path.with_name("again"))
    assert path.read_bytes() == path.with_name("again").read_bytes()


def books(manager):
    return (
        manager.lengths.tolist(), manager.rollback_floor.tolist(), manager.is_open.tolist(),
        manager._books.requests.block_table.tolist(), manager._books.allocator.num_owners.tolist(),
        manager.num_free_slots, manager.paged.storage.tolist(), manager.state.storage.tolist(),
    )  # fmt: skip


@pytest.mark.parametrize(
    "choice, match",
    [
        ({"kv_format": "bf16"}, "expected kv_format bf16, as this cache has, got fp8"),
        ({"index_format": "nvfp4"}, "expected index_format nvfp4, .* got mxfp4"),
        ({"tail_dtype": "bfloat16"}, "expected tail_dtype bfloat16, .* got float32"),
        ({"compress_ratios": (0, 4, 4, 4)}, r"expected compress_ratios \[0, 4, 4, 4\], .* got"),
        ({"block_tokens": 256}, "expected block_tokens 256, .* got 128"),
        ({"drafts_per_step": 2}, "expected drafts_per_step 2, .* got 3"),
        ({"rope_theta": 20000.0}, "expected config_fingerprint .*, as this cache has, got"),
        ({"page_align": 16}, "expected config_fingerprint .*, as this cache has, got"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_file_of_another_cache_is_refused(path, choice, match):
    grown_manager(130).save_request(0, path)
    manager = make_manager(CacheConfig.tiny(**{**CHOICES, **choice}))
    before = books(manager)
    with pytest.raises(ValueError, match=f"Invalid saved request .*: {match}"):
        manager.load_request(path)
    assert books(manager) == before


def test_what_is_only_read_may_differ(path):
    grown_manager(130).save_request(0, path)
    config = CacheConfig.tiny(**CHOICES, index_topk=4, num_query_heads=8)
    assert make_manager(config).load_request(path) == 0


def test_a_file_cut_short_is_refused(path):
    manager = grown_manager(130)
    manager.save_request(0, path)
    whole, before = path.read_bytes(), books(manager)
    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="expected a whole safetensors file"):
            manager.load_request(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="expected a whole safetensors file"):
        manager.load_request(path)
    assert books(manager) == before


def test_a_file_with_another_byte_is_refused(path):
    manager = grown_manager(130)
    manager.save_request(0, path)
    whole, rng = path.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    text_end = len(whole[:header].rstrip(b" "))
    places = [rng.randrange(text_end) for _ in range(100)]
    places += [rng.randrange(header, len(whole)) for _ in range(50)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="Invalid saved request"):
            manager.load_request(path)
    assert manager.num_free_slots == 2 and manager._books.allocator.num_free == 7
    manager.check_integrity()


def test_files_that_are_no_requests(path):
    manager = make_manager()
    with pytest.raises(FileNotFoundError, match="No saved request at"):
        manager.load_request(path)
    for metadata, match in (
        (None, "expected metadata 'request' in JSON, found none"),
        ({"request": "{"}, "expected metadata 'request' in JSON, found none"),
        ({"request": "3"}, "expected metadata 'request' to be an object"),
        ({"request": "{}"}, "expected the format dsv4-request-4, got none"),
    ):
        save_file({"slot": torch.zeros(3)}, path, metadata)
        with pytest.raises(ValueError, match=match):
            manager.load_request(path)
    path.write_text(json.dumps({"length": 3}))
    with pytest.raises(ValueError, match="Invalid saved request"):
        manager.load_request(path)


def test_no_room_changes_nothing(path):
    grown_manager(300).save_request(0, path)
    full = grown_manager(300, num_blocks=5)
    small = make_manager(max_request_tokens=299)
    taken = grown_manager(4, max_requests=1)
    for manager, error, match in (
        (full, OutOfBlocksError, "3 needed, 2 of 5 free"),
        (small, ValueError, "expected at most 299, got 300"),
        (taken, NoFreeSlotError, "1 needed, 0 of 1 free"),
    ):
        before = books(manager)
        with pytest.raises(error, match=match):
            manager.load_request(path)
        assert books(manager) == before
        manager.check_integrity()


def test_a_request_in_a_live_forward_is_not_saved(path):
    manager = grown_manager(130)
    prepare_forward(manager, [0], [130], [131])
    with pytest.raises(LiveForwardError, match="is live"):
        manager.save_request(0, path)
    with pytest.raises(ValueError, match="slot 1 is not open"):
        manager.save_request(1, path)
    assert not path.exists()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file(path, monkeypatch, call):
    manager = grown_manager(130)
    manager.save_request(0, path)
    old = path.read_bytes()
    feed(manager, 0, TOKENS, 131)

    def fail(*args):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="disk full"):
            manager.save_request(0, path)
    assert path.read_bytes() == old
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    manager.save_request(0, path)
    assert path.read_bytes() != old
