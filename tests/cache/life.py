"""A random life of requests: any order of steps, compared with an uncached model after each.

A token's projections depend on its id and position alone, so that every sequence of ids has an
oracle, however its request came by them.
"""

import contextlib
import functools
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsv4 import CacheConfig, CheckpointPolicy, KVCacheManager, PrefixStore, prepare_forward
from dsv4.cache.stats import collect_stats
from dsv4.errors import NoFreeSlotError, OutOfBlocksError
from dsv4.formats import INDEX_FORMATS, KV_FORMATS
from dsv4.kernels.backends import load_backend
from dsv4.rope import build_rope_table
from dsv4.testing import (
    Row,
    forward_inputs,
    forward_layer,
    model_projections,
    model_weights,
    move_to,
    poison,
)
from tests.cache.faults import Fault, OutOfMemoryFault, Points, at_lines
from tests.cache.live import assert_same, dense_bytes, live_bytes
from tests.dense import dense_layers
from tests.handles import RecordingHandle, turned_into
from tests.v41 import random_v41_choices, tiny_v41

DRAFTS = 3
BASE = {"num_query_heads": 1, "head_dim": 80, "rope_dim": 16, "index_num_heads": 16,
        "index_head_dim": 32, "drafts_per_step": DRAFTS}  # fmt: skip


class LayerResult(NamedTuple):
    """What a layer gives: output of its tokens, and the entries they chose (None but for CSA)."""

    output: torch.Tensor
    chosen: torch.Tensor | None


class Oracle(NamedTuple):
    """What a request of some tokens holds, and each layer's results over all of them."""

    live: list[torch.Tensor]
    layers: list[LayerResult]


class World:
    """A model, what its layers make of each token, and the sizes of a manager of it.

    The oracle is the whole sequence without a cache.
    """

    tolerance = 1e-6  # of the output's scale

    def __init__(self, config, *, max_tokens, num_blocks, device="cpu", backend=None):
        self.config = config
        self.device, self.backend = device, backend
        self.max_tokens = max_tokens
        self.num_blocks = num_blocks
        self.max_requests = 4
        self.weights = self.moved(model_weights(config, seed=0))
        self.by_id = [
            self.moved(model_projections(config, max_tokens, seed=100 * each)) for each in (1, 2)
        ]
        self.projections_of = functools.lru_cache(maxsize=256)(self._projections_of)
        self.oracle_of = functools.lru_cache(maxsize=256)(self._oracle_of)

    def new_manager(self, **sizes):
        defaults = {
            "max_requests": self.max_requests, "num_blocks": self.num_blocks,
            "max_forward_tokens": 512, "max_request_tokens": self.max_tokens,
            "device": self.device, "backend": self.backend,
        }  # fmt: skip
        return KVCacheManager(self.config, **{**defaults, **sizes})

    def moved(self, layers):
        return [move_to(self.device, layer) for layer in layers]

    @functools.cached_property
    def fresh(self):
        """A manager that no life is about, of the same sizes and so of the same kernels."""
        return self.new_manager()

    def _projections_of(self, tokens):
        ids = torch.frombuffer(bytearray(tokens), dtype=torch.uint8).to(self.device)
        return [mix(*layers, ids) for layers in zip(*self.by_id, strict=True)]

    def _oracle_of(self, tokens):
        config, manager = self.config, self.fresh
        ropes = {
            base: build_rope_table(config, base, num_positions=len(tokens), device=self.device)
            for base in ("main", "compress")
        }
        layers = dense_layers(config, self.projections_of(tokens), self.weights, ropes)
        live = dense_bytes(config, manager.schemas, layers, len(tokens))
        return Oracle(live, [LayerResult(layer.output, layer.selected) for layer in layers])


class KernelWorld(World):
    """The oracle is the same kernels on a fresh request, all tokens in one forward.

    Sums of 80 channels and some hundred rows in another order differ by some 1e-6; the worst case
    is 1e-4.
    """

    tolerance = 1e-5

    def _oracle_of(self, tokens):
        manager = self.fresh
        poison(manager)
        slot = manager.open_request()
        row = Row(slot, self.projections_of(tokens), 0, len(tokens))
        layers = run_layers(manager, self.weights, [row])
        live = [part.clone() for part in live_bytes(manager, slot)]
        manager.free_request(slot)
        return Oracle(live, layers)


def mix(first, second, ids):
    """Projections, tensor by tensor, of a sequence of the ids 0 and 1."""
    if first is None:
        return None
    if isinstance(first, tuple):
        return type(first)(*(mix(a, b, ids) for a, b in zip(first, second, strict=True)))
    n = len(ids)
    return torch.where(ids.view(n, *[1] * (first.dim() - 1)) > 0, second[:n], first[:n])


def whole_world(kind=World, **where):
    """All three kinds of layers; a block is as short as HCA allows."""
    config = CacheConfig.tiny(**BASE, compress_ratios=(0, 4, 128), block_tokens=128)
    return kind(config, max_tokens=420, num_blocks=7, **where)


def short_world(kind=World, **where):
    """Blocks of two CSA entries and a window of 8 tokens: many boundaries in few tokens."""
    config = CacheConfig.tiny(
        **BASE, compress_ratios=(0, 4), block_tokens=8, sliding_window=8, index_topk=4
    )
    return kind(config, max_tokens=40, num_blocks=9, **where)


def random_world(seed):
    """A short world of either model, of other sizes and row formats."""
    choose = random.Random(seed)
    block = choose.choice([8, 16, 24])
    choices = {
        "block_tokens": block, "sliding_window": choose.choice([4, 8, 12, 16]),
        "index_topk": choose.choice([2, 4]), "drafts_per_step": choose.choice([0, 1, 2, 5]),
        "kv_format": choose.choice(KV_FORMATS), "index_format": choose.choice(INDEX_FORMATS),
    }  # fmt: skip
    if choose.random() < 0.5:
        choices["compress_ratios"] = choose.choice([(4,), (0, 4), (4, 0, 4)])
        config = CacheConfig.tiny(**{**BASE, **choices})
    else:
        config = tiny_v41(**choices, **random_v41_choices(choose), num_query_heads=1)
    return World(config, max_tokens=5 * block, num_blocks=choose.choice([7, 9, 12]))


def v41_world(kind=World, **where):
    """Two groups of layers that share entries, and candidates, in short blocks."""
    config = tiny_v41(
        compress_ratios=(0, 2, 1, 1), kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2, candidate_topk_blocks=3, candidate_block_size=2,
        num_query_heads=1, index_topk=4, block_tokens=8, sliding_window=8, drafts_per_step=DRAFTS,
    )  # fmt: skip
    return kind(config, max_tokens=40, num_blocks=9, **where)


WHOLE, SHORT, V41 = whole_world(), short_world(), v41_world()


def assert_stores(world, manager, slot, tokens):
    """All that the request can still read is the oracle's, byte for byte."""
    assert manager.lengths[slot] == len(tokens)
    if tokens:
        assert_same(live_bytes(manager, slot), world.oracle_of(tokens).live)


def run_layers(manager, weights, rows):
    """One forward of some requests; each layer's output and chosen entries over all tokens."""
    lengths = zip(*((row.slot, row.before, row.after) for row in rows), strict=True)
    plan = prepare_forward(manager, *map(list, lengths))
    return run_plan(manager, plan, weights, rows)


def run_plan(manager, plan, weights, rows):
    """The layers of a forward that is planned."""
    results, chosen = [], {}
    for idx, layer_weights in enumerate(weights):
        handle = turned_into(RecordingHandle, manager.acquire(idx, plan))
        output = forward_layer(handle, forward_inputs(rows, idx), layer_weights, chosen).output
        selected = chosen[handle.layer.choice_of].entry_idx if chosen and handle.paged else None
        results.append(LayerResult(output, next(iter(handle.selections), selected)))
    return results


def books(manager):
    return (
        manager.lengths.tolist(), manager.rollback_floor.tolist(), manager.is_open.tolist(),
        manager._books.requests.block_table.tolist(), manager._books.allocator.num_owners.tolist(),
        manager._books.host.block_owners.num_owners.tolist(),
        manager._books.host.slot_owners.num_owners.tolist(),
        manager._books.checkpoints.num_owners.tolist(),
    )  # fmt: skip


def check_counts(manager):
    """Every block is counted once: free, evictable, of an open request, or kept for others."""
    stats = collect_stats(manager._books, manager._memory)
    table = manager._books.requests.block_table
    in_requests = set(table[table >= 0].tolist())
    kept = {block for place in manager._books.swapped.places for block in place.kept.tolist()}
    assert stats.num_request_blocks == len(in_requests)
    assert stats.num_swapped_blocks == len(kept - {-1} - in_requests)


choices = st.integers(0, 3)
seeds = st.integers(0, 3)


class Life(RuleBasedStateMachine):
    """A manager and what it should hold.

    tokens and floors are those of each open request, known the ids that the manager was told of it
    (None for a request that it doesn't track), waiting the requests that are swapped out, and seen
    sequences that a prompt may begin with.
    """

    world = SHORT
    num_lives = num_steps = num_disk_tokens = 0

    @initialize(
        every_blocks=st.integers(0, 2), num_checkpoints=st.integers(1, 5),
        host_blocks=st.sampled_from([0, 3, 12, 30]), has_store=st.booleans(),
    )  # fmt: skip
    def start(self, every_blocks=1, num_checkpoints=4, host_blocks=3, has_store=False):
        type(self).num_lives += 1
        self.folder, self.store = tempfile.TemporaryDirectory(), None
        if has_store and host_blocks:
            path = Path(self.folder.name) / "store"
            self.store = PrefixStore(path, 1 << 20, key=b"a key", num_readers=1)
        self.sizes = {
            "num_checkpoints": num_checkpoints, "host_blocks": host_blocks, "host_slots": 2,
            "checkpoint_policy": CheckpointPolicy(every_blocks=every_blocks), "store": self.store,
        }  # fmt: skip
        self.seen, self.saved = [], []
        self.begin()

    def begin(self):
        """A new manager without requests."""
        self.manager = self.world.new_manager(**self.sizes)
        poison(self.manager)
        host = self.manager._books.host
        pools = [memory.checkpoints for memory in self.manager.memory_parts]
        for storage in (*pools, host.blocks, host.slots):
            storage.fill_(0xFF)
        self.tokens, self.floors, self.known = {}, {}, {}
        self.waiting = []

    @precondition(lambda self: self.store is not None)
    @rule(choice=st.integers(0, 5), more=st.integers(0, 9), seed=seeds)
    def restart(self, choice, more, seed):
        """A new manager on the same store; a prompt begins like one from before."""
        opened = set(self.tokens)
        self.resume(0, 0, 9, seed)
        for slot in set(self.tokens) - opened:  # there should be records
            self.grow({slot: self.count(9)}, seed)
        for slot in list(self.tokens):
            self.manager.free_request(slot)
            self.remove(slot)
        self.manager.reset()
        self.manager.close()
        self.begin()
        if self.seen:
            last = len(self.seen) - choice % len(self.seen)
            self.resume(last, 40, more, seed, is_prefetched=True)

    def read_from_disk(self, start):
        """Wait for reads that a call starts, and for writes before it: no step is by chance."""
        if self.store is None:
            return start()
        tier = self.manager._books.prefix.tier
        tier.finish_writes()
        self.store.flush()
        before, started = tier.num_loaded_tokens, start()
        prefetch = getattr(started, "prefetch", started)
        if prefetch is not None:
            assert prefetch.wait()
            self.manager.check_integrity()
            type(self).num_disk_tokens += tier.num_loaded_tokens - before
        return started

    def slot(self, choice):
        return sorted(self.tokens)[choice % len(self.tokens)]

    def count(self, share):
        """A number of tokens: few, about a block, or many."""
        block = self.world.config.block_tokens
        sizes = [*range(1, 6), block - 1, block, block + 2, 2 * block, 2 * block + 3]
        return sizes[share % len(sizes)]

    def longer(self, slot, count, rng):
        """Return the tokens of a request and new ones: known ids first, then random ones."""
        old, known = self.tokens[slot], self.known[slot] or b""
        count = min(count, self.world.max_tokens - len(old))
        fresh = rng.integers(0, 2, count, dtype=np.uint8).tobytes()
        new = old + known[len(old) : len(old) + count]
        return new + fresh[len(new) - len(old) :]

    def grow(self, counts_of, seed, *, is_noted=True):
        """Feed new tokens to requests in one forward; False if they don't fit."""
        rng, manager, grown = np.random.default_rng(seed), self.manager, {}
        for slot, count in counts_of.items():
            grown[slot] = self.longer(slot, count, rng)
        rows = [
            Row(slot, self.world.projections_of(new) if new else self.world.by_id[0],
                len(self.tokens[slot]), len(new))
            for slot, new in grown.items()
        ]  # fmt: skip
        needed = manager.blocks_needed([row.slot for row in rows], [row.after for row in rows])
        stats = manager.stats()
        room = stats.num_free_blocks + stats.num_evictable_blocks
        before = books(manager)
        try:
            results = run_layers(manager, self.world.weights, rows)
        except OutOfBlocksError as error:
            assert error.needed == needed > room
            assert books(manager) == before
            return False
        assert needed <= room
        self.check_results(results, rows, grown)
        for slot, new in grown.items():
            self.tokens[slot] = new
            floor = len(new) - self.world.config.drafts_per_step - 1
            self.floors[slot] = max(self.floors[slot], floor)
            if is_noted:
                self.note(slot)
        return True

    def note(self, slot):
        """Tell the manager all ids of a request that it doesn't know yet."""
        known = self.known[slot] or b""
        missing = self.tokens[slot][len(known) :]
        if missing:
            self.manager.note_tokens(slot, list(missing), start=len(known))
            self.known[slot] = known + missing

    def check_results(self, results, rows, grown):
        """Outputs are close to the oracle's, chosen entries are its own."""
        rows = [row for row in rows if row.after > row.before]
        sizes = [row.after - row.before for row in rows]
        for idx, result in enumerate(results):
            parts = [None if part is None else part.split(sizes) for part in result]
            for place, row in enumerate(rows):
                expected = self.world.oracle_of(grown[row.slot]).layers[idx]
                output, chosen = (None if part is None else part[place] for part in parts)
                if chosen is not None:
                    wanted = expected.chosen[row.before :].to(chosen.dtype)
                    assert torch.equal(chosen, wanted), "other entries were chosen"
                want = expected.output[row.before :]
                scale = max(1.0, want.abs().max())
                assert (output - want).abs().max() <= self.world.tolerance * scale

    def add(self, slot, tokens, floor, known):
        self.tokens[slot], self.floors[slot], self.known[slot] = tokens, floor, known

    def remove(self, slot):
        self.seen = [*self.seen, self.tokens[slot]][-6:]
        del self.tokens[slot], self.floors[slot], self.known[slot]

    @rule()
    def open(self):
        slot = self.open_another(self.manager.open_request)
        if slot is not None:
            self.add(slot, b"", 0, None)

    @rule(
        choice=st.integers(0, 9), kept=st.integers(0, 40), more=st.integers(0, 9), seed=seeds,
        is_prefetched=st.booleans(),
    )  # fmt: skip
    def resume(self, choice, kept, more, seed, is_prefetched=False):
        """A prompt that begins like a sequence that was there, or like none."""
        source = [b"", *self.seen, *self.tokens.values()]
        beginning = source[choice % len(source)]
        share = kept * len(beginning) // 40
        fresh = np.random.default_rng(seed).integers(0, 2, self.count(more), dtype=np.uint8)
        prompt = (beginning[:share] + fresh.tobytes())[: self.world.max_tokens]
        hit = None
        if is_prefetched:
            self.read_from_disk(lambda: self.manager.prefetch(list(prompt)))

        def make():
            nonlocal hit
            hit = self.read_from_disk(lambda: self.manager.resume_request(list(prompt)))
            return hit.slot

        slot = self.open_another(make)
        if slot is None:
            return
        end = hit.num_tokens + hit.num_replayed
        assert end % self.world.config.block_tokens == 0
        assert end < len(prompt)
        if hit.num_replayed:
            slot = self.replay(slot, prompt, hit.num_tokens, end, np.random.default_rng(seed))
        self.add(slot, prompt[:end], end, prompt)

    def replay(self, slot, prompt, start, end, rng):
        """Run known tokens again, in pieces, with other events between them."""
        manager, projections = self.manager, self.world.projections_of(prompt)
        length = start
        for piece in sorted(rng.integers(start, end, 2).tolist()):
            event = rng.integers(4)
            if piece > length:
                run_layers(manager, self.world.weights, [Row(slot, projections, length, piece)])
                length = piece
            if event == 1 and manager.num_free_slots:
                fork = manager.fork(slot)
                manager.free_request(slot)
                slot = fork
            elif event == 2:
                with contextlib.suppress(NoFreeSlotError, OutOfBlocksError):
                    slot = manager.swap_in(manager.swap_out(slot))
            elif event == 3:
                plan = prepare_forward(manager, [slot], [length], [end])
                if len(self.world.weights) > 1:  # else the forward would be complete
                    self.run_layer(plan, [Row(slot, projections, length, end)], 0)
                plan.cancel()
                length = int(manager.lengths[slot])
                assert length in (piece, start)
            manager.check_integrity()
        run_layers(manager, self.world.weights, [Row(slot, projections, length, end)])
        return slot

    @precondition(lambda self: self.tokens)
    @rule(choice=choices, share=st.integers(0, 9), seed=seeds, is_noted=st.booleans())
    def prefill(self, choice, share, seed, is_noted):
        self.grow({self.slot(choice): self.count(share)}, seed, is_noted=is_noted)

    @precondition(lambda self: self.tokens)
    @rule(choice=choices, offset=st.integers(0, 5), seed=seeds)
    def prefill_to_a_boundary(self, choice, offset, seed):
        slot = self.slot(choice)
        self.grow({slot: self.to_boundary(slot) + offset}, seed)

    def to_boundary(self, slot):
        return -len(self.tokens[slot]) % self.world.config.block_tokens

    @precondition(lambda self: self.tokens)
    @rule(
        choice=choices, share=st.integers(0, 9), more=st.booleans(), seed=seeds,
        num_layers=st.integers(0, 3), fails=st.booleans(),
    )  # fmt: skip
    def cancel(self, choice, share, more, seed, num_layers, fails):
        """A forward that ends after some layers, by its caller or because one fails."""
        slots = sorted(self.tokens) if more else [self.slot(choice)]
        rng, rows, manager = np.random.default_rng(seed), [], self.manager
        for slot in slots:
            old = self.tokens[slot]
            count = min(self.count(share), self.world.max_tokens - len(old), 512 // len(slots))
            new = old + rng.integers(0, 2, count, dtype=np.uint8).tobytes()
            if count:
                rows.append(Row(slot, self.world.projections_of(new), len(old), len(new)))
        if not rows:
            return
        manager.stats()
        before = books(manager)
        try:
            plan = prepare_forward(
                manager, *map(list, zip(*((r.slot, r.before, r.after) for r in rows), strict=True))
            )
        except OutOfBlocksError:
            assert books(manager) == before
            return
        surviving = plan.surviving_lengths.tolist()
        for idx in range(min(num_layers, len(self.world.weights) - 1)):
            self.run_layer(plan, rows, idx)
        if fails:
            self.fail_layer(plan, rows, min(num_layers, len(self.world.weights) - 1))
        else:
            plan.cancel()
        assert plan.is_cancelled and manager.live_plan is None
        for row, length in zip(rows, surviving, strict=True):
            is_step = row.after - row.before <= self.world.config.drafts_per_step + 1
            assert length == row.before or not is_step
            self.tokens[row.slot] = self.tokens[row.slot][:length]
            self.floors[row.slot] = int(manager.rollback_floor[row.slot])
            assert self.floors[row.slot] <= length

    def run_layer(self, plan, rows, idx):
        chosen = vars(plan).setdefault("chosen_in_test", {})
        handle, inputs = self.manager.acquire(idx, plan), forward_inputs(rows, idx)
        forward_layer(handle, inputs, self.world.weights[idx], chosen)

    def fail_layer(self, plan, rows, idx):
        """A layer writes its rows, then raises."""
        kernels = load_backend(self.manager.backend)
        write = kernels.write_layer

        def fail(**arguments):
            write(**arguments)
            raise MemoryError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "write_layer", fail)
            with pytest.raises(MemoryError):
                self.run_layer(plan, rows, idx)

    @precondition(lambda self: self.tokens)
    @rule(choice=choices, call=st.integers(0, 4), point=st.integers(0, 400))
    def interrupt(self, choice, call, point):
        """A call that is interrupted at some line of the library, or ends before it."""
        slot, manager = self.slot(choice), self.manager
        length, floor = len(self.tokens[slot]), self.floors[slot]
        shorter = max(min(floor, length), length - 2)
        calls = {
            0: (lambda: manager.truncate(slot, shorter), shorter),
            1: (lambda: manager.free_request(slot), None),
            2: (lambda: manager.stats(), length),
            3: (lambda: manager.truncate(slot, 0), 0),
            4: (lambda: manager.open_requests(1), length),
        }
        run, after = calls[call]
        opened = set(manager.open_slots)
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled()), at_lines(Points(point)):
                run()
        except (Fault, OutOfMemoryFault, NoFreeSlotError):
            pass
        for extra in set(manager.open_slots) - opened:
            manager.free_request(extra)
        if slot not in manager.open_slots:
            assert after is None
            self.remove(slot)
            return
        now = int(manager.lengths[slot])
        assert now in (length, after)
        self.tokens[slot] = self.tokens[slot][:now]
        self.floors[slot] = min(floor, now)
        if self.known[slot] is not None:
            self.known[slot] = self.known[slot][: int(manager._books.prefix.ids.num_known[slot])]

    @precondition(lambda self: self.tokens)
    @rule(seed=seeds, drafts=st.lists(st.integers(0, DRAFTS), min_size=4, max_size=4))
    def decode_all(self, seed, drafts):
        self.grow({slot: 1 + drafts[slot] for slot in sorted(self.tokens, reverse=True)}, seed)

    @precondition(lambda self: self.tokens)
    @rule(choice=choices, rejected=st.integers(0, DRAFTS + 1), seed=seeds)
    def verify(self, choice, rejected, seed):
        slot = self.slot(choice)
        before = len(self.tokens[slot])
        if self.grow({slot: 1 + DRAFTS}, seed):
            self.shorten(slot, max(before, len(self.tokens[slot]) - rejected))

    @precondition(lambda self: self.tokens)
    @rule(seed=seeds, kept=st.lists(st.integers(0, DRAFTS + 1), min_size=8, max_size=8))
    def verify_on_the_device(self, seed, kept):
        """Two steps in a row: the device knows the accepted tokens of the first, not the host."""
        count, rng = self.world.config.drafts_per_step + 1, np.random.default_rng(seed)
        fits = self.world.max_tokens - 2 * count
        slots = [slot for slot in sorted(self.tokens) if len(self.tokens[slot]) <= fits]
        for accepted in (kept[:4], kept[4:]) if slots else ():
            grown = {slot: self.longer(slot, count, rng) for slot in slots}
            rows = [
                Row(slot, self.world.projections_of(new), len(self.tokens[slot]), len(new))
                for slot, new in grown.items()
            ]
            try:
                plan = self.manager.prepare_step(slots, count)
            except OutOfBlocksError:
                return
            self.check_results(run_plan(self.manager, plan, self.world.weights, rows), rows, grown)
            accepted = [min(accepted[slot], count) for slot in slots]
            plan.commit(torch.tensor(accepted, device=self.manager.device))
            for slot, num_kept in zip(slots, accepted, strict=True):
                length = len(self.tokens[slot]) + num_kept
                self.floors[slot] = max(self.floors[slot], len(self.tokens[slot]))
                self.tokens[slot] = grown[slot][:length]
                if self.known[slot] is not None:
                    self.known[slot] = self.known[slot][:length]

    @precondition(lambda self: self.tokens)
    @rule(choice=choices, forgotten=st.integers(0, 6), to_zero=st.booleans())
    def truncate(self, choice, forgotten, to_zero):
        slot = self.slot(choice)
        length = len(self.tokens[slot]) - forgotten
        self.shorten(slot, 0 if to_zero and forgotten == 6 else max(length, 0))

    @precondition(lambda self: self.tokens)
    @rule(choice=choices, blocks_back=st.integers(0, 3))
    def truncate_to_a_boundary(self, choice, blocks_back):
        slot, block = self.slot(choice), self.world.config.block_tokens
        self.shorten(slot, max(0, len(self.tokens[slot]) // block - blocks_back) * block)

    def shorten(self, slot, length):
        manager, floor = self.manager, self.floors[slot]
        manager.stats()
        lengths = list(manager._books.prefix.checkpoints_of(slot))
        if 0 < length < floor and length not in lengths:
            below = max([0, *(each for each in lengths if each < length)])
            above = min([floor, *(each for each in lengths if each > length)])
            before = books(manager)
            with pytest.raises(ValueError, match=f"are {below} and {above}$"):
                manager.truncate(slot, length)
            assert books(manager) == before
            return
        manager.truncate(slot, length)
        self.tokens[slot] = self.tokens[slot][:length]
        self.floors[slot] = min(floor, length)
        if self.known[slot] is not None:
            self.known[slot] = self.known[slot][:length]

    @precondition(lambda self: self.tokens)
    @rule(choice=choices)
    def fork(self, choice):
        slot = self.slot(choice)
        fork = self.open_another(lambda: self.manager.fork(slot))
        if fork is not None:
            self.add(fork, self.tokens[slot], self.floors[slot], self.known[slot])

    @precondition(lambda self: self.tokens)
    @rule(choice=choices, past=st.integers(0, 2), together=st.booleans())
    def fork_and_go_back_into_a_shared_block(self, choice, past, together):
        slot = self.slot(choice)
        if not self.grow({slot: self.to_boundary(slot) + past}, seed=0):
            return
        fork = self.open_another(lambda: self.manager.fork(slot))
        if fork is None:
            return
        self.add(fork, self.tokens[slot], self.floors[slot], self.known[slot])
        for each in (slot, fork):
            self.shorten(each, max(0, len(self.tokens[each]) - past - 1))
        self.grow({fork: 2, slot: 2} if together else {fork: 2}, seed=1)

    @precondition(lambda self: self.tokens)
    @rule(choice=choices)
    def free(self, choice):
        slot = self.slot(choice)
        self.manager.free_request(slot)
        self.remove(slot)

    @precondition(lambda self: self.tokens)
    @rule(choice=choices)
    def swap_out(self, choice):
        slot = self.slot(choice)
        self.manager.stats()
        before = books(self.manager)
        try:
            swapped = self.manager.swap_out(slot)
        except (NoFreeSlotError, OutOfBlocksError) as error:
            assert isinstance(error, OutOfBlocksError) or len(self.waiting) == 2
            assert books(self.manager) == before
            return
        held = self.tokens[slot], self.floors[slot], self.known[slot]
        self.waiting.append((swapped, held))
        self.remove(slot)

    @precondition(lambda self: self.waiting)
    @rule(choice=choices, is_dropped=st.booleans())
    def swap_in(self, choice, is_dropped):
        place = choice % len(self.waiting)
        swapped, held = self.waiting[place]
        if is_dropped and choice == 3:
            self.manager.drop_swapped(swapped)
            self.waiting.pop(place)
            return
        slot = self.open_another(lambda: self.manager.swap_in(swapped))
        if slot is not None:
            self.waiting.pop(place)
            self.add(slot, *held)

    @precondition(lambda self: self.tokens and len(self.saved) < 3)
    @rule(choice=choices)
    def save(self, choice):
        slot = self.slot(choice)
        path = Path(self.folder.name) / str(len(self.saved))
        self.manager.save_request(slot, path)
        floor = len(self.tokens[slot])
        self.saved.append(("load_request", path, self.tokens[slot], floor,
                           self.known[slot]))  # fmt: skip

    @precondition(lambda self: self.tokens and len(self.saved) < 3)
    @rule(choice=choices)
    def export(self, choice):
        slot = self.slot(choice)
        saved = self.manager.export_request(slot)
        self.saved.append(("import_request", saved, self.tokens[slot],
                           self.floors[slot], self.known[slot]))  # fmt: skip

    @precondition(lambda self: self.saved)
    @rule(choice=choices)
    def load(self, choice):
        read, saved, tokens, floor, known = self.saved[choice % len(self.saved)]
        slot = self.open_another(lambda: getattr(self.manager, read)(saved))
        if slot is not None:
            self.add(slot, tokens, floor, known)

    def open_another(self, make):
        self.manager.stats()
        before = books(self.manager)
        try:
            slot = make()
        except (NoFreeSlotError, OutOfBlocksError) as error:
            is_full = len(self.tokens) == self.world.max_requests
            assert isinstance(error, OutOfBlocksError) or is_full
            assert books(self.manager) == before
            return None
        assert slot not in self.tokens
        return slot

    @invariant()
    def every_request_is_right(self):
        type(self).num_steps += 1
        self.manager.check_integrity()
        for slot, tokens in self.tokens.items():
            assert_stores(self.world, self.manager, slot, tokens)
            assert self.manager.rollback_floor[slot] == self.floors[slot]
        check_counts(self.manager)

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        for slot in self.tokens:
            manager.free_request(slot)
        for swapped, _ in self.waiting:
            manager.drop_swapped(swapped)
        manager.check_integrity()
        tree = manager._books.prefix.tree
        tree.evict(tree.num_evictable)
        tree.make_host_room(manager.capacity.host_blocks)
        manager.check_integrity()
        assert not tree.nodes
        assert manager._books.allocator.num_free == self.world.num_blocks
        assert manager._books.allocator.num_shares == 0
        for owners in (
            manager._books.checkpoints,
            manager._books.host.block_owners,
            manager._books.host.slot_owners,
        ):
            assert not owners.num_owners.any()
        if self.store is not None:
            manager.close()
            self.store.close()
        self.folder.cleanup()


class WholeLife(Life):
    """The same with HCA layers, whose blocks are longer."""

    world = WHOLE
    num_lives = num_steps = num_disk_tokens = 0


class V41Life(Life):
    """The same with layers of DeepSeek-V4.1."""

    world = V41
    num_lives = num_steps = num_disk_tokens = 0


def machine_in(world, machine=Life):
    """The machine in another world."""
    counts = {"num_lives": 0, "num_steps": 0, "num_disk_tokens": 0}
    return type(machine.__name__, (machine,), {"world": world, **counts})


def on_kernels(machine, device):
    """The machine with Triton's kernels, which are their own oracle."""
    make_world = {Life: short_world, V41Life: v41_world}.get(machine, whole_world)
    return machine_in(make_world(KernelWorld, device=device, backend="triton"), machine)
