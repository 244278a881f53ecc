"""HCA groups kept as sums: any life of a request stores what a run in one chunk stores."""

import random
from math import inf, nan

import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.testing import Row, forward_inputs, model_projections, model_weights, move_to, poison
from tests.cache.life import mix
from tests.cache.live import assert_same, live_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_TOKENS = 460
# A step of up to 16 tokens closes at most one group; with more drafts the sums are a longer ring.
DRAFTS = [0, 3, 15, 16, 20, 40, 140]


def spoil(inputs, choose):
    """Give channels zeros of both signs as gates, and groups NaN, infinities and no gate at all."""
    kv, gate = inputs
    gate[:, :2] = torch.tensor([[choose.choice((0.0, -0.0)), -0.0] for _ in gate])
    for first in range(0, MAX_TOKENS - 15, 16):
        for values, specials in ((kv, (nan, inf, -inf)), (gate, (nan, inf, -inf))):
            for special in choose.sample(specials, 2):
                row, column = first + choose.randrange(16), choose.randrange(2, kv.shape[1])
                values[row, column] = special
        gate[first : first + 16, 2 + first // 16] = -inf  # the same channel in every source
        kv[first : first + 16, choose.randrange(2, kv.shape[1])] = choose.choice((inf, -inf, nan))


class Lives:
    """Managers that run the same tokens, each 0 or 1, of one HCA layer."""

    def __init__(self, *backends, has_specials=False, **choices):
        self.config = CacheConfig.tiny(
            compress_ratios=(128,), num_query_heads=1, block_tokens=128, **choices
        )
        self.weights = model_weights(self.config, seed=0)
        self.sources = [model_projections(self.config, MAX_TOKENS, seed=s) for s in (1, 2)]
        if has_specials:
            for number, source in enumerate(self.sources):
                spoil(source[0].compressor, random.Random(number))
            self.weights[0].compressor.position_bias[:, :2] = -0.0
        self.managers = [self.make_manager(backend) for backend in backends]
        (self.slot,) = {manager.open_request() for manager in self.managers}
        self.ids = []

    def make_manager(self, backend):
        where = {"backend": backend, "device": DEVICE if backend == "triton" else "cpu"}
        manager = KVCacheManager(
            self.config, max_requests=2, num_blocks=8, max_forward_tokens=512, **where
        )
        poison(manager)
        return manager

    def write(self, managers, slot, ids, before):
        layers = [mix(*both, torch.tensor(ids)) for both in zip(*self.sources, strict=True)]
        inputs = forward_inputs([Row(slot, layers, before, len(ids))], 0)
        for manager in managers:
            plan = prepare_forward(manager, [slot], [before], [len(ids)])
            device = str(manager.device)
            handle = manager.acquire(0, plan)
            handle.write(move_to(device, inputs), move_to(device, self.weights[0]))

    def grow(self, new):
        self.write(self.managers, self.slot, self.ids + new, len(self.ids))
        self.ids = self.ids + new

    def truncate(self, length):
        for manager in self.managers:
            manager.truncate(self.slot, length)
        self.ids = self.ids[:length]

    def live(self, choose, num_moves):
        """Yield after each of some chunks, steps and truncates, most of them around closings."""
        step = self.config.drafts_per_step + 1
        for _ in range(num_moves):
            floor = int(self.managers[0].rollback_floor[self.slot])
            if len(self.ids) + 2 * step + 70 > MAX_TOKENS:
                self.truncate(0)
            elif choose.random() < 0.4:
                self.truncate(choose.choice([floor, choose.randint(floor, len(self.ids))]))
            to_closing = choose.choice([16, 128]) - len(self.ids) % 16 + choose.randint(-2, 2)
            count = choose.choice([1, step, choose.randint(1, step), min(step, to_closing), 70])
            self.grow([choose.randrange(2) for _ in range(max(1, count))])
            yield

    def assert_like_a_cold_run(self):
        cold = self.make_manager("reference")
        self.write([cold], cold.open_request(), self.ids, 0)
        assert_same(live_bytes(self.managers[0], self.slot), live_bytes(cold, 0))


@pytest.mark.parametrize("drafts", DRAFTS)
def test_any_life_stores_what_a_cold_run_stores(drafts):
    lives = Lives("reference", drafts_per_step=drafts)
    for _ in lives.live(random.Random(drafts), 60):
        lives.assert_like_a_cold_run()


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("length", [111, 112, 127, 128, 129, 143, 144, 255])
def test_a_whole_step_can_be_forgotten(drafts, length):
    lives = Lives("reference", drafts_per_step=drafts)
    lives.grow([0] * length)
    lives.grow([1] * (drafts + 1))
    lives.truncate(length)
    lives.assert_like_a_cold_run()
    lives.grow([0, 1] * 17)
    lives.assert_like_a_cold_run()


@pytest.mark.parametrize("drafts", [0, 3, 20])
@pytest.mark.parametrize("tail_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_specials", [False, True], ids=["", "specials"])
def test_kernels_store_the_same_sums(drafts, tail_dtype, has_specials):
    lives = Lives(
        "reference", "triton", drafts_per_step=drafts, tail_dtype=tail_dtype,
        has_specials=has_specials,
    )  # fmt: skip
    for _ in lives.live(random.Random(drafts), 12):
        pass
    sums = lives.managers[0].state.layer(0).sums[0]
    assert not has_specials or {inf, -inf} <= set(sums[:, 0].flatten().tolist())
    for name in ("slots", "blocks"):
        mine, others = (manager.tensors()[name].cpu() for manager in lives.managers)
        assert torch.equal(mine, others), name


@pytest.mark.parametrize("drafts", [0, 20])
def test_all_bytes_of_a_tail_are_those_of_single_tokens(drafts):
    ids = [position % 3 % 2 for position in range(300)]
    single, chunk = (Lives("reference", drafts_per_step=drafts) for _ in range(2))
    for token in ids:
        single.grow([token])
    chunk.grow(ids[:203])
    chunk.grow(ids[203:])
    first, second = (lives.managers[0].state.layer(0) for lives in (single, chunk))
    assert_same([first.tail[0], first.sums[0]], [second.tail[0], second.sums[0]])
