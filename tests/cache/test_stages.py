"""Managers of some layers of a model: their books are those of the whole model's manager."""

import random

import numpy as np
import pytest

from dsv4 import CacheConfig, CheckpointPolicy, KVCacheManager
from dsv4.config import Stage
from dsv4.testing import Row, model_projections, model_weights, poison, run_forward
from tests.cache.live import assert_same, live_bytes
from tests.v41 import tiny_v41

CONFIG = CacheConfig.tiny(
    num_query_heads=1, head_dim=80, rope_dim=16, index_num_heads=16, index_head_dim=32,
    compress_ratios=(0, 4, 128, 0), num_mtp_layers=1, sliding_window=8, block_tokens=128,
    drafts_per_step=3,
)  # fmt: skip
CUTS = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 2), (2, 4)]
LATENT = tiny_v41(
    compress_ratios=(0, 2, 2, 1, 1), index_source_layer_ids=(1, 3, 4), num_query_heads=1,
    sliding_window=8, block_tokens=128, drafts_per_step=3,
)  # fmt: skip
LATENT_CUTS = [(0, 1), (1, 3), (0, 3), (3, 5)]


def new_manager(config, **sizes):
    defaults = {
        "max_requests": 4, "num_blocks": 14, "max_forward_tokens": 512, "max_request_tokens": 600,
        "num_checkpoints": 6, "host_blocks": 400, "host_slots": 2,
        "checkpoint_policy": CheckpointPolicy(every_blocks=1),
    }  # fmt: skip
    manager = KVCacheManager(config, **{**defaults, **sizes})
    poison(manager)
    return manager


class Lives:
    """The same calls on the whole model's manager and on those of all cuts."""

    def __init__(self, config, cuts):
        self.layers = [(0, config.num_layers), *cuts]
        self.managers = [new_manager(config)] + [
            new_manager(config.cut_layers(*cut)) for cut in cuts
        ]
        self.weights = model_weights(config, seed=0)
        self.tokens = [model_projections(config, 600, seed=10 * i) for i in (1, 2)]

    def call(self, function):
        """Call it on each manager; all give the same."""
        results = [
            function(manager, layers)
            for manager, layers in zip(self.managers, self.layers, strict=True)
        ]
        assert all(result == results[0] for result in results), results
        return results[0]

    def grow(self, slot, text, after):
        def run(manager, layers):
            part, before = slice(*layers), int(manager.lengths[slot])
            row = Row(slot, self.tokens[text][part], before, after)
            run_forward(manager, self.weights[part], [row])

        self.call(run)

    def check(self, *, has_same_blocks=True):
        whole = self.managers[0]
        for manager, (first, last) in zip(self.managers, self.layers, strict=True):
            manager.check_integrity()
            assert manager.lengths.tolist() == whole.lengths.tolist()
            if has_same_blocks:
                books = manager._books.requests.block_table
                assert np.array_equal(books, whole._books.requests.block_table)
            for slot in manager.open_slots:
                mine, all_parts = live_bytes(manager, slot), live_bytes(whole, slot)
                if first == 0:
                    assert_same(mine, all_parts[: len(mine)])
                if last == whole.config.num_layers:
                    assert_same(mine, all_parts[len(all_parts) - len(mine) :])


@pytest.mark.parametrize(
    ("config", "cuts"), [(CONFIG, CUTS), (LATENT, LATENT_CUTS)], ids=["v4", "v41"]
)
def test_stages_keep_the_books_of_the_whole_model(config, cuts):
    lives, choose = Lives(config, cuts), random.Random(3)
    ids = [np.arange(600) + 1000 * i for i in (0, 1)]
    texts = {}
    for _ in range(80):
        kind = choose.choice(
            ["open", "open", "grow", "grow", "grow", "step", "truncate", "fork", "free", "swap"]
        )
        slot = choose.choice([*texts]) if texts else None
        if kind == "open" and len(texts) < 3:
            text = choose.randrange(2)
            hit = lives.call(
                lambda m, _, text=text: m.resume_request(ids[text][:590], salt=b"x")[:3]
            )
            texts[hit[0]] = text
        elif slot is None:
            continue
        elif kind in ("grow", "step"):
            length = int(lives.managers[0].lengths[slot])
            most = 1 if kind == "step" else 150
            after = min(300, length + choose.randint(1, most))
            needed = lives.call(
                lambda m, _, s=slot, n=after: m.blocks_needed(s, max(n, m.lengths[s]))
            )
            stats = lives.managers[0].stats()
            if after > length and needed <= stats.num_free_blocks + stats.num_evictable_blocks:
                lives.grow(slot, texts[slot], after)
        elif kind == "truncate":
            manager = lives.managers[0]
            kept = max(int(manager.rollback_floor[slot]), int(manager.lengths[slot]) - 2)
            if kept <= manager.lengths[slot]:
                lives.call(lambda m, _, s=slot, n=kept: m.truncate(s, n))
        elif kind == "fork" and len(texts) < 3:
            if lives.managers[0].num_free_blocks:
                texts[lives.call(lambda m, _, s=slot: m.fork(s))] = texts[slot]
        elif kind == "free":
            lives.call(lambda m, _, s=slot: m.free_request(s))
            del texts[slot]
        elif kind == "swap":
            text = texts.pop(slot)
            again = lives.call(lambda m, _, s=slot: m.swap_in(m.swap_out(s)))
            texts[again] = text
        lives.check()
    stats = lives.managers[0].stats()
    assert stats.num_hits > 0 and stats.num_prefix_blocks > 0


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_bytes_are_counted(cut):
    manager = new_manager(CONFIG.cut_layers(*cut))
    counted = sum(size.allocated for size in manager.memory().values())
    assert counted == sum(tensor.nbytes for tensor in manager.tensors().values())


def test_a_stage_knows_its_place():
    stage = CONFIG.cut_layers(1, 4)
    assert stage.compress_ratios == (4, 128, 0) and stage.num_mtp_layers == 1
    assert stage.stage == Stage((0, 4, 128, 0), 1)
    last = stage.cut_layers(2, 3)
    assert last == CONFIG.cut_layers(3, 4) and last.num_mtp_layers == 1
    assert last.smallest_ratio == 4 and last.halo_tokens == CONFIG.halo_tokens
    fingerprints = {CONFIG.cut_layers(i, i + 1).format_fingerprint for i in range(4)}
    assert len(fingerprints) == 4  # layers 0 and 3 are alike, and their bytes are not
    assert CONFIG.cut_layers(0, 3).num_mtp_layers == 0


@pytest.mark.parametrize(
    "choice, match",
    [
        ({"stage": 3}, "Invalid stage: expected a Stage or None, got int"),
        ({"stage": Stage((0, 4, 4, 0))}, r"expected compress_ratios \[0, 4, 4, 0\], as the model"),
        ({"stage": Stage((0, 4, 128), 0)}, r"expected compress_ratios \[0, 4, 128\]"),
    ],
)
def test_a_place_that_does_not_fit_is_refused(choice, match):
    with pytest.raises(ValueError, match=match):
        CacheConfig.tiny(compress_ratios=(0, 4, 128, 0), **choice)


def test_odd_places_are_refused():
    for first, last in ((-1, 2), (4, 5), (2, 2), (0, 5)):
        with pytest.raises(ValueError, match="expected"):
            CONFIG.cut_layers(first, last)
    with pytest.raises(ValueError, match="Invalid first_layer"):
        Stage((0, 4), 2)
    with pytest.raises(ValueError, match="Invalid model_ratios: expected a sequence"):
        Stage(4)
