"""A request as tensors: it goes on in another manager where it was, floor included."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4 import CacheConfig, prepare_forward
from dsv4.errors import LiveForwardError, NoFreeSlotError, OutOfBlocksError
from dsv4.testing import Row, model_projections, model_weights, run_forward
from tests.cache.live import assert_same, live_bytes
from tests.cache.test_saved_request import (
    CHOICES,
    CONFIG,
    LATENT,
    OTHERS,
    TOKENS,
    books,
    feed,
    grown_manager,
    make_manager,
)

TEXTS = {
    CONFIG: (TOKENS, OTHERS),
    LATENT: tuple(model_projections(LATENT, 450, seed=seed) for seed in (10, 90)),
}


def moved(manager, slot, device="cpu", **sizes):
    """Another manager, where another request lives, and the slot of the imported one there."""
    other = make_manager(num_blocks=9, device=device, **sizes)
    other.open_request()
    return other, other.import_request(manager.export_request(slot))


@pytest.mark.parametrize(
    ("config", "length"),
    [*((CONFIG, each) for each in (0, 1, 3, 4, 127, 128, 131, 132, 144, 255, 256, 260, 300)),
     (LATENT, 2), (LATENT, 129)],
    ids=lambda value: value if isinstance(value, int) else "v41" if value is LATENT else "v4",
)  # fmt: skip
def test_an_imported_request_goes_on_and_back_as_the_exported_one(config, length):
    tokens, others = TEXTS[config]
    manager = grown_manager(length, tokens, config=config)
    for shorter in range(4):
        floor = int(manager.rollback_floor[0])
        other, slot = moved(manager, 0, config=config)
        assert other.rollback_floor[slot] == floor and other.lengths[slot] == length
        kept = max(floor, length - shorter)
        other.truncate(slot, kept)
        twin = grown_manager(length, tokens, config=config)
        twin.truncate(0, kept)
        other.check_integrity()
        assert_same(live_bytes(other, slot), live_bytes(twin, 0))
        for mine, want in zip(
            feed(other, slot, others, kept + 140), feed(twin, 0, others, kept + 140), strict=True
        ):
            assert torch.equal(mine.output, want.output)
        assert_same(live_bytes(other, slot), live_bytes(twin, 0))


def test_sums_of_every_length_from_the_floor_on_are_there():
    """A step of 41 tokens closes several groups: each shorter length needs others of them."""
    config = CacheConfig.tiny(block_tokens=128, drafts_per_step=40)
    weights, tokens = model_weights(config, seed=0), model_projections(config, 320, seed=10)

    def grown(length):
        manager = make_manager(config)
        slot = manager.open_request()
        for after in (100, length):
            run_forward(manager, weights, [Row(slot, tokens, manager.lengths[slot], after)])
        return manager

    for length in (130, 141):
        for kept in range(length - 41, length, 3):
            other, slot = make_manager(config), 0
            assert other.import_request(grown(length).export_request(0)) == slot
            twin = grown(length)
            for each in (other, twin):
                each.truncate(0, kept)
            assert_same(live_bytes(other, slot), live_bytes(twin, 0))


def test_tensors_hold_nothing_of_others():
    manager = make_manager()
    slot = manager.open_request()
    feed(manager, slot, OTHERS, 300)
    manager.truncate(slot, 0)
    feed(manager, slot, TOKENS, 133)
    fresh = grown_manager(133).export_request(0)
    mine = manager.export_request(slot)
    assert all(torch.equal(mine.tensors[name], fresh.tensors[name]) for name in fresh.tensors)


def test_known_ids_and_salt_come_along():
    sizes = {"num_checkpoints": 4, "host_blocks": 4}
    manager, ids = make_manager(**sizes), np.arange(280)
    hit = manager.resume_request(ids, salt=b"mine")
    feed(manager, hit.slot, TOKENS, 280)
    first = manager.export_request(hit.slot)
    other, slot = moved(manager, hit.slot, **sizes)
    again = other.export_request(slot)
    assert again.prefix_root == first.prefix_root and torch.equal(again.token_ids, first.token_ids)
    other.free_request(slot)
    assert other.stats().num_prefix_blocks == 2
    assert manager.resume_request(ids, salt=b"other").num_tokens == 0


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"fingerprint": "abc"}, "expected one of a cache with the fingerprint .*, got abc"),
        ({"length": 400}, "expected 4 blocks and a floor from 0 to 400, got 1 and 126"),
        ({"length": -1}, "expected length to be a whole number"),
        ({"rollback_floor": 131}, "a floor from 0 to 130, got 1 and 131"),
        ({"slot": torch.zeros(3, dtype=torch.uint8)}, "expected a slot of"),
        ({"blocks": torch.zeros(2, 3)}, "expected blocks in torch.uint8"),
        ({"token_ids": torch.zeros(2, 3)}, r"expected token_ids \[n\] int32"),
        ({"prefix_root": "salt"}, "expected prefix_root to be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_no_request_is_refused(wrong, match):
    saved, manager = grown_manager(130).export_request(0), make_manager()
    before = books(manager)
    with pytest.raises(ValueError, match=f"Invalid request: .*{match}"):
        manager.import_request(replace(saved, **wrong))
    with pytest.raises(TypeError, match="expected one that export_request returned, got dict"):
        manager.import_request(saved.tensors)
    assert books(manager) == before


def test_a_cache_of_another_meaning_refuses_it():
    manager = make_manager(CacheConfig.tiny(**{**CHOICES, "block_tokens": 256}))
    with pytest.raises(ValueError, match="fingerprint"):
        manager.import_request(grown_manager(130).export_request(0))
    read_only = CacheConfig.tiny(**CHOICES, index_topk=4, num_query_heads=8)
    assert make_manager(read_only).import_request(grown_manager(130).export_request(0)) == 0


def test_no_room_changes_nothing():
    saved = grown_manager(300).export_request(0)
    for manager, error, match in (
        (grown_manager(300, num_blocks=5), OutOfBlocksError, "3 needed, 2 of 5 free"),
        (make_manager(max_request_tokens=299), ValueError, "expected at most 299, got 300"),
        (grown_manager(4, max_requests=1), NoFreeSlotError, "1 needed, 0 of 1 free"),
    ):
        before = books(manager)
        with pytest.raises(error, match=match):
            manager.import_request(saved)
        assert books(manager) == before


def test_a_request_in_a_live_forward_is_not_exported():
    manager = grown_manager(130)
    prepare_forward(manager, [0], [130], [131])
    with pytest.raises(LiveForwardError, match="is live"):
        manager.export_request(0)


@pytest.mark.gpu
@pytest.mark.parametrize("there, back", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_devices(there, back):
    manager = grown_manager(300)
    other, slot = moved(manager, 0, there, backend="reference")
    third, again = moved(other, slot, back, backend="reference")
    assert_same([part.cpu() for part in live_bytes(third, again)], live_bytes(manager, 0))
    assert CONFIG.format_fingerprint == third.config.format_fingerprint
