"""Requests live in any order of steps, and always hold what an uncached model would give them.

A token's projections depend on its id and position alone, so that every sequence of ids has an
oracle, however its request came by them.
"""

import functools
import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsv4 import CacheConfig, KVCacheManager
from dsv4.errors import NoFreeSlotError, OutOfBlocksError
from dsv4.kernels.reference.dense import dense_layer
from dsv4.testing import Row, model_projections, model_weights, poison, run_forward

DRAFTS = 3
CONFIG = CacheConfig.tiny(
    compress_ratios=(0, 4, 128), num_query_heads=1, index_num_heads=16, index_head_dim=32,
    head_dim=80, rope_dim=16, block_tokens=128, drafts_per_step=DRAFTS,
)  # fmt: skip
MAX_REQUESTS, NUM_BLOCKS, MAX_TOKENS = 4, 7, 420
WEIGHTS = model_weights(CONFIG, seed=0)
BY_ID = [model_projections(CONFIG, MAX_TOKENS, seed=100 * token_id) for token_id in (1, 2)]


def mix(first, second, ids):
    """Projections, tensor by tensor, of a sequence of the ids 0 and 1."""
    if first is None:
        return None
    if isinstance(first, tuple):
        return type(first)(*(mix(a, b, ids) for a, b in zip(first, second, strict=True)))
    n = len(ids)
    return torch.where(ids.view(n, *[1] * (first.dim() - 1)) > 0, second[:n], first[:n])


@functools.lru_cache(maxsize=64)
def projections_of(tokens):
    ids = torch.frombuffer(bytearray(tokens), dtype=torch.uint8)
    return [mix(*layers, ids) for layers in zip(*BY_ID, strict=True)]


@functools.cache
def rope_tables():
    return KVCacheManager(
        CONFIG, max_requests=1, num_blocks=4, max_request_tokens=MAX_TOKENS
    ).rope_tables


@functools.lru_cache(maxsize=64)
def oracle_of(tokens):
    return [
        dense_layer(layer.attention_type, inputs, weights, rope_tables()[layer.rope_base], CONFIG)
        for layer, inputs, weights in zip(
            CONFIG.schedule, projections_of(tokens), WEIGHTS, strict=True
        )
    ]


def assert_stores(manager, slot, tokens):
    """All that the request can still read is the oracle's, byte for byte."""
    length = len(tokens)
    assert manager.lengths[slot] == length
    if not length:
        return
    for idx, (schema, expected) in enumerate(zip(manager.schemas, oracle_of(tokens), strict=True)):
        state, pages = manager.state.layer(idx), manager.paged.layer(idx)
        window = np.arange(max(0, length - CONFIG.sliding_window), length)
        assert_rows(state.ring, slot, window % schema.ring_rows, expected.window, window)
        if pages is None:
            continue
        start = max(0, length // schema.ratio * schema.ratio - schema.tail_buffer_size_b)
        positions = np.arange(start, length)
        rows = positions % schema.tail_rows
        for tail, stored in (
            (state.tail, expected.tails), (state.index_tail, expected.index_tails),
        ):  # fmt: skip
            for part in range(2 if tail is not None else 0):
                assert torch.equal(tail[slot, rows, part], stored[part][positions])
        entries = np.arange(length // schema.ratio)
        blocks = manager.host_block_table[slot, entries // schema.entries_per_block]
        rows = entries % schema.entries_per_block
        assert_rows(pages.entries, blocks, rows, expected.entries, entries)
        if pages.index_keys is not None:
            assert_rows(pages.index_keys, blocks, rows, expected.index_keys, entries)


def assert_rows(pages, page, rows, expected, numbers):
    assert torch.equal(pages.data[page, rows], expected.data[numbers])
    assert torch.equal(pages.scales[page, rows], expected.scales[numbers])


def books(manager):
    return (
        manager.lengths.tolist(), manager.rollback_floor.tolist(), manager.is_open.tolist(),
        manager.host_block_table.tolist(), manager.allocator.num_owners.tolist(),
        manager.is_torn.tolist(),
    )  # fmt: skip


counts = st.one_of(st.integers(1, 9), st.integers(110, 150), st.integers(1, 300))


class Life(RuleBasedStateMachine):
    """A manager and, for each open request, the tokens it should have and its floor."""

    @initialize()
    def start(self):
        self.manager = KVCacheManager(
            CONFIG, max_requests=MAX_REQUESTS, num_blocks=NUM_BLOCKS,
            max_forward_tokens=512, max_request_tokens=MAX_TOKENS,
        )  # fmt: skip
        poison(self.manager)
        self.tokens, self.floors = {}, {}
        self.folder = tempfile.TemporaryDirectory()
        self.saved = []

    def slot(self, choice):
        return sorted(self.tokens)[choice % len(self.tokens)]

    def grow(self, counts_of, seed):
        """Feed new tokens to requests in one forward; False if they don't fit."""
        rng, manager, grown = np.random.default_rng(seed), self.manager, {}
        for slot, count in counts_of.items():
            old = self.tokens[slot]
            count = min(count, MAX_TOKENS - len(old))
            grown[slot] = old + rng.integers(0, 2, count, dtype=np.uint8).tobytes()
        rows = [
            Row(slot, projections_of(new) if new else BY_ID[0], len(self.tokens[slot]), len(new))
            for slot, new in grown.items()
        ]
        before = books(manager)
        try:
            results = run_forward(manager, WEIGHTS, rows)
        except OutOfBlocksError:
            assert books(manager) == before
            return False
        self.check_outputs(results, rows, grown)
        for slot, new in grown.items():
            self.tokens[slot] = new
            self.floors[slot] = max(self.floors[slot], len(new) - DRAFTS)
        return True

    def check_outputs(self, results, rows, grown):
        for idx, result in enumerate(results):
            sizes = [row.after - row.before for row in rows]
            for row, output in zip(rows, result.output.split(sizes), strict=True):
                if row.after > row.before:
                    expected = oracle_of(grown[row.slot])[idx].output[row.before :]
                    error = (output - expected).abs().max()
                    assert error <= 1e-6 * max(1.0, expected.abs().max())

    @rule()
    def open(self):
        if len(self.tokens) == MAX_REQUESTS:
            with pytest.raises(NoFreeSlotError):
                self.manager.open_request()
            return
        slot = self.manager.open_request()
        assert slot not in self.tokens
        self.tokens[slot], self.floors[slot] = b"", 0

    @precondition(lambda self: self.tokens)
    @rule(choice=st.integers(0, 3), count=counts, seed=st.integers(0, 3))
    def prefill(self, choice, count, seed):
        self.grow({self.slot(choice): count}, seed)

    @precondition(lambda self: self.tokens)
    @rule(choice=st.integers(0, 3), offset=st.integers(0, 5), seed=st.integers(0, 3))
    def prefill_to_a_boundary(self, choice, offset, seed):
        slot = self.slot(choice)
        self.grow({slot: -len(self.tokens[slot]) % CONFIG.block_tokens + offset}, seed)

    @precondition(lambda self: self.tokens)
    @rule(seed=st.integers(0, 3), drafts=st.lists(st.integers(0, DRAFTS), min_size=4, max_size=4))
    def decode_all(self, seed, drafts):
        self.grow({slot: 1 + drafts[slot] for slot in sorted(self.tokens, reverse=True)}, seed)

    @precondition(lambda self: self.tokens)
    @rule(choice=st.integers(0, 3), rejected=st.integers(0, DRAFTS), seed=st.integers(0, 3))
    def verify(self, choice, rejected, seed):
        slot = self.slot(choice)
        before = len(self.tokens[slot])
        if self.grow({slot: 1 + DRAFTS}, seed):
            self.shorten(slot, max(before, len(self.tokens[slot]) - rejected))

    @precondition(lambda self: self.tokens)
    @rule(choice=st.integers(0, 3), forgotten=st.integers(0, 6), to_zero=st.booleans())
    def truncate(self, choice, forgotten, to_zero):
        slot = self.slot(choice)
        length = len(self.tokens[slot]) - forgotten
        self.shorten(slot, 0 if to_zero and forgotten == 6 else max(length, 0))

    def shorten(self, slot, length):
        if 0 < length < self.floors[slot]:
            before = books(self.manager)
            with pytest.raises(ValueError, match=f"are 0 and {self.floors[slot]}$"):
                self.manager.truncate(slot, length)
            assert books(self.manager) == before
            return
        self.manager.truncate(slot, length)
        self.tokens[slot] = self.tokens[slot][:length]
        self.floors[slot] = self.floors[slot] if length else 0

    @precondition(lambda self: self.tokens)
    @rule(choice=st.integers(0, 3))
    def fork(self, choice):
        slot = self.slot(choice)
        fork = self.open_another(lambda: self.manager.fork(slot))
        if fork is not None:
            self.tokens[fork], self.floors[fork] = self.tokens[slot], self.floors[slot]

    @precondition(lambda self: self.tokens)
    @rule(choice=st.integers(0, 3), past=st.integers(0, 2), together=st.booleans())
    def fork_and_go_back_into_a_shared_block(self, choice, past, together):
        slot = self.slot(choice)
        if not self.grow({slot: -len(self.tokens[slot]) % CONFIG.block_tokens + past}, seed=0):
            return
        fork = self.open_another(lambda: self.manager.fork(slot))
        if fork is None:
            return
        self.tokens[fork], self.floors[fork] = self.tokens[slot], self.floors[slot]
        for each in (slot, fork):
            self.shorten(each, max(0, len(self.tokens[each]) - past - 1))
        self.grow({fork: 2, slot: 2} if together else {fork: 2}, seed=1)

    @precondition(lambda self: self.tokens)
    @rule(choice=st.integers(0, 3))
    def free(self, choice):
        slot = self.slot(choice)
        self.manager.free_request(slot)
        del self.tokens[slot], self.floors[slot]

    @precondition(lambda self: self.tokens and len(self.saved) < 3)
    @rule(choice=st.integers(0, 3))
    def save(self, choice):
        slot = self.slot(choice)
        path = Path(self.folder.name) / str(len(self.saved))
        self.manager.save_request(slot, path)
        self.saved.append((path, self.tokens[slot]))

    @precondition(lambda self: self.saved)
    @rule(choice=st.integers(0, 2))
    def load(self, choice):
        path, tokens = self.saved[choice % len(self.saved)]
        slot = self.open_another(lambda: self.manager.load_request(path))
        if slot is not None:
            self.tokens[slot], self.floors[slot] = tokens, len(tokens)

    def open_another(self, make):
        before = books(self.manager)
        try:
            slot = make()
        except (NoFreeSlotError, OutOfBlocksError) as error:
            assert isinstance(error, OutOfBlocksError) or len(self.tokens) == MAX_REQUESTS
            assert books(self.manager) == before
            return None
        assert slot not in self.tokens
        return slot

    @invariant()
    def every_request_is_right(self):
        self.manager.check_integrity()
        for slot, tokens in self.tokens.items():
            assert_stores(self.manager, slot, tokens)
            assert self.manager.rollback_floor[slot] == self.floors[slot]

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for slot in self.tokens:
            self.manager.free_request(slot)
        assert self.manager.allocator.num_free == NUM_BLOCKS
        assert self.manager.allocator.num_shares == 0
        self.manager.check_integrity()
        self.folder.cleanup()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def swap_blocks(manager):
    table = manager.host_block_table
    table[0, :2] = table[0, [1, 0]]


def lose_a_window_row(manager):
    manager.state.layer(2).ring.data[0, 295 % (CONFIG.sliding_window + DRAFTS)] = 0


def lose_a_tail_row(manager):
    manager.state.layer(1).tail[0, 297 % (8 + DRAFTS)] = 0


def lose_an_entry(manager):
    manager.paged.layer(2).entries.data[manager.host_block_table[0, 1], 0] = 0


@pytest.mark.parametrize(
    "corrupt", [swap_blocks, lose_a_window_row, lose_a_tail_row, lose_an_entry]
)
def test_the_comparison_finds_corruption(corrupt):
    machine = Life()
    machine.start()
    machine.open()
    assert machine.grow({0: 298}, seed=0)
    machine.every_request_is_right()
    corrupt(machine.manager)
    with pytest.raises(AssertionError):
        assert_stores(machine.manager, 0, machine.tokens[0])


def test_ids_decide_a_sequence():
    first, second = (oracle_of(bytes(ids)) for ids in ([0, 1, 1, 0], [0, 1, 0, 0]))
    for mine, other in itertools.islice(zip(first, second, strict=True), 1, 2):
        assert torch.equal(mine.window.data[:2], other.window.data[:2])
        assert not torch.equal(mine.entries.data, other.entries.data)
