"""Ranks of a split context in processes of their own."""

import dataclasses
import faulthandler
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from dsv4 import CacheConfig, CapturedForward, KVCacheManager, prepare_forward
from dsv4.cache.graphs import captured_forward
from dsv4.distributed import context as split
from dsv4.errors import RankLostError
from dsv4.kernels.backends import load_backend
from dsv4.testing import (
    Row,
    forward_inputs,
    forward_layer,
    model_projections,
    model_weights,
    move_to,
    poison,
    take_rows,
)
from tests.cache.life import BASE, DRAFTS, V41, Life, World, machine_in, run_layers
from tests.cache.live import assert_same, live_bytes
from tests.cache.test_captured_forward import EagerGraph, leaves
from tests.distributed.processes import context, share_kernels, start_method
from tests.v41 import tiny_v41

DEADLINE = 60.0  # two slow cores must be in time
COMPILE_DEADLINE = 180.0  # of an exchange on a GPU: one rank may compile longer than another
LIMIT = 300.0  # of all ranks, before they say where they are
context.set_forkserver_preload([__name__])


def run_ranks(num_ranks, function, *args, killed=(), **options):
    """Call a function with rank and group on each rank; return the results of those that live.

    Ranks that take longer than LIMIT are asked for their stacks, which are in the error.
    """
    start = start_method(options)
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(num_ranks):
            mine, theirs = start.Pipe()
            call = (rank, num_ranks, Path(folder), theirs, function, args, options)
            process = start.Process(target=_run_rank, args=call, daemon=True)
            process.start()
            theirs.close()
            ranks.append((mine, process))
        results, end = [], time.monotonic() + LIMIT
        try:
            for rank, (mine, _) in enumerate(ranks):
                if rank not in killed:
                    assert mine.poll(max(0.0, end - time.monotonic())), stacks(ranks, folder)
                    results.append(mine.recv())
        finally:
            for _, process in ranks:
                process.kill()
                process.join()
    for problem, _ in results:
        assert not problem, problem
    return [result for _, result in results]


def stacks(ranks, folder):
    """What each rank has noted, and what it is doing."""
    logs = [Path(folder) / f"log{rank}" for rank in range(len(ranks))]
    begun = [(log, process) for log, (_, process) in zip(logs, ranks, strict=True) if log.exists()]
    for _, process in begun:
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1.0)
    return "\n".join(log.read_text() for log, _ in begun)


def note(text):
    """Note how far a rank has come, for `stacks`."""
    print(f"{time.monotonic():.1f} s: {text}", file=sys.stderr, flush=True)


def _run_rank(rank, num_ranks, folder, told, function, args, options):
    torch.set_num_threads(1)
    sys.stderr = (folder / f"log{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    try:
        store = dist.FileStore(str(folder / "store"), num_ranks)
        if is_compiled := options.get("device") == "cuda":
            share_kernels()
        timeout = timedelta(seconds=COMPILE_DEADLINE if is_compiled else DEADLINE)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout
        )
        told.send(("", function(rank, dist.group.WORLD, *args, **options)))
    except BaseException:
        told.send((traceback.format_exc(), None))
    time.sleep(DEADLINE)  # the connections of the others stay until all have told


def new_group(path, rank, num_ranks, seconds=DEADLINE):
    """A group of gloo's that meets at a file."""
    store = dist.FileStore(str(path), num_ranks)
    return dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=seconds))


class SplitWorld(World):
    """A world whose managers divide blocks; the oracle has the rank's own entries."""

    tolerance = 1e-5  # fp32 sums in another order

    def __init__(self, config, group, **sizes):
        self.group, self.whole = group, config
        super().__init__(config.split_context(group.rank(), group.size()), **sizes)

    def new_manager(self, **sizes):
        defaults = {
            "max_requests": self.max_requests, "num_blocks": self.num_blocks,
            "max_forward_tokens": 2048, "max_request_tokens": self.max_tokens,
        }  # fmt: skip
        return KVCacheManager(self.whole, process_group=self.group, **{**defaults, **sizes})


class SplitLife(Life):
    """A life without a store, which a split context does not have."""

    @initialize(
        every_blocks=st.integers(0, 2), num_checkpoints=st.integers(1, 5),
        host_blocks=st.sampled_from([0, 3, 12, 30]),
    )  # fmt: skip
    def start(self, every_blocks=1, num_checkpoints=4, host_blocks=3):
        super().start(every_blocks, num_checkpoints, host_blocks)


def short_config(ratios=(0, 4)):
    return CacheConfig.tiny(
        **BASE, compress_ratios=ratios, block_tokens=4, sliding_window=8, index_topk=4
    )


def deep_config():
    return short_config((0, 4, 4))


def whole_config():
    return CacheConfig.tiny(**BASE, compress_ratios=(0, 4, 128), block_tokens=128)


def shared_config():
    """Layers of V4.1 that share entries and choices, and candidates, in blocks of four entries."""
    return dataclasses.replace(V41.config, block_tokens=4)


def live(rank, group, make_config, max_tokens, num_lives, num_steps):
    """Lives of the same steps on all ranks."""
    world = SplitWorld(make_config(), group, max_tokens=max_tokens, num_blocks=9)
    machine = machine_in(world, SplitLife)
    chosen = settings(
        max_examples=num_lives, stateful_step_count=num_steps, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=chosen)
    return machine.num_steps


COUNTED = ("truncate", "fork", "swap_out", "swap_in", "load_request", "import_request",
           "resume_request")  # fmt: skip
# Upper ends of each step's random numbers.
STEPS = {
    "open": (), "resume": (10, 41, 10, 4), "prefill": (4, 10, 4, 2), "free": (4,), "fork": (4,),
    "prefill_to_a_boundary": (4, 6, 4), "verify": (4, DRAFTS + 2, 4), "swap_out": (4,),
    "truncate": (4, 7, 2), "truncate_to_a_boundary": (4, 4), "swap_in": (4, 2), "save": (4,),
    "export": (4,), "load": (4,), "cancel": (4, 10, 2, 4, 4, 2), "interrupt": (4, 5, 400),
    "fork_and_go_back_into_a_shared_block": (4, 3, 2), "decode_all": (4,),
    "verify_on_the_device": (4,),
}  # fmt: skip


class CountedLife(SplitLife):
    """A life that counts its events, those of requests whose tokens see entries of all ranks."""

    def begin(self):
        super().begin()
        for name in COUNTED:
            self.count_calls(name)

    def count_calls(self, name):
        call = getattr(self.manager, name)

        def counted(*args):
            lengths = self.manager.lengths
            result = call(*args)
            if name == "resume_request":
                kind = "replay" if result.num_replayed else "checkpoint"
                self.counts[kind] += result.num_tokens + result.num_replayed > 0
            elif name in ("truncate", "swap_out"):
                self.counts[name] += self.is_long(lengths[args[0]])
            else:
                self.counts[name] += self.is_long(self.manager.lengths[result])
            return result

        setattr(self.manager, name, counted)

    def is_long(self, length):
        return length > self.world.config.block_tokens

    def check_results(self, results, rows, grown):
        super().check_results(results, rows, grown)
        for row in rows:
            count = row.after - row.before
            if self.is_long(row.after) and count:
                kind = "decode" if count == 1 else "verify" if count <= DRAFTS + 1 else "chunk"
                self.counts[kind] += 1


def schedule(rank, group, make_config, max_tokens, num_lives, num_steps):
    """Lives of random steps, the same on all ranks; return how often each event was."""
    world = SplitWorld(make_config(), group, max_tokens=max_tokens, num_blocks=14)
    counts = Counter()
    for seed in range(num_lives):
        draw, life = random.Random(seed), machine_in(world, CountedLife)()
        life.counts = counts
        life.start(every_blocks=seed % 2, num_checkpoints=1 + seed % 4, host_blocks=12)
        for _ in range(num_steps):
            run_step(life, draw)
        life.teardown()
    return {name: int(count) for name, count in counts.items()}


def run_step(life, draw):
    """One of the steps that there is something for, with random numbers."""
    has_none, is_full = not life.tokens, len(life.saved) > 2
    lacks = {"swap_in": not life.waiting, "load": not life.saved, "open": False, "resume": False,
             "save": has_none or is_full, "export": has_none or is_full}  # fmt: skip
    names = [*STEPS, *["resume", "prefill", "decode_all"] * 4, *["free", "load", "swap_in"] * 2]
    name = draw.choice([each for each in names if not lacks.get(each, has_none)])
    args = [draw.randrange(end) for end in STEPS[name]]
    if name == "resume":
        args[1] = 40 - draw.randrange(12)  # most of a sequence
    if name in ("decode_all", "verify_on_the_device"):
        args.append([draw.randrange(DRAFTS + 1) for _ in range(8)])
    getattr(life, name)(*args)
    life.every_request_is_right()


def make_ties(layers):
    """Give every third token equal scores, and every seventh none."""
    for layer in layers:
        if layer.indexer is not None:
            layer.indexer.query[::3] = 0.0
            layer.indexer.head_weights[::7] = torch.nan
    return layers


def own_bytes(manager, one, slot):
    """The rank's share of each block of a request, and the same of a manager that is alone."""
    parts, rank = ([], []), manager.config.rank
    blocks = torch.from_numpy(manager.blocks_of(slot)).long()
    assert blocks.tolist() == one.blocks_of(slot).tolist()
    for idx in range(len(manager.schedule)):
        pages = [each.paged.layer(idx) for each in (manager, one)]
        if pages[0] is None:
            continue
        for name in ("entries", "index_keys"):
            mine, whole = (getattr(each, name) for each in pages)
            if mine is not None:
                own = slice(rank * mine.rows_per_page, (rank + 1) * mine.rows_per_page)
                for field in ("data", "scales"):
                    parts[0].append(getattr(mine, field)[blocks])
                    parts[1].append(getattr(whole, field)[blocks][:, own])
    return parts


FORWARDS = ((420, 20), (30, 140), (3, 3), (1, 1), (20, 3), (1, 0), (0, 1))


def small_config(**choices):
    return CacheConfig.tiny(
        **{"compress_ratios": (0, 4, 128, 4), "block_tokens": 128, "drafts_per_step": 2,
           "index_topk": 16, **choices}
    )  # fmt: skip


def latent_config(**choices):
    """Layers of V4.1; a token of 20 sees more candidate blocks than there are candidates."""
    return tiny_v41(**{"candidate_block_size": 4, "drafts_per_step": 2, **choices})


def compare(
    rank, group, make_config=small_config, device="cpu", dtype=torch.float32, forwards=FORWARDS,
    backend=None, **choices,
):  # fmt: skip
    """Chunks, verification and decode of two requests, beside a manager that is alone.

    Returns the farthest output, relative to the scale, and a digest of all outputs.
    """
    split.JOINED_AT_ONCE, split.LISTED_AT_ONCE = 100, 50  # several times in a chunk
    config = make_config(**choices)
    sizes = {"max_requests": 3, "num_blocks": 8, "max_forward_tokens": 700, "device": device,
             "backend": backend}  # fmt: skip
    whole = dataclasses.replace(config, block_tokens=config.block_tokens * group.size())
    one = KVCacheManager(whole, **sizes)
    manager = KVCacheManager(config, process_group=group, **sizes)
    weights = [move_to(device, each) for each in model_weights(config, seed=0)]
    tokens = [make_ties(model_projections(config, 600, seed=n, dtype=dtype)) for n in (10, 20)]
    tokens = [[move_to(device, each) for each in layers] for layers in tokens]
    for each in (manager, one):
        poison(each)
        each.open_requests(2)
    places, farthest, digest = [0, 0], 0.0, hashlib.sha256()
    for counts in forwards:
        rows = [
            Row(slot, tokens[slot], places[slot], places[slot] + count)
            for slot, count in reversed(list(enumerate(counts)))
        ]
        places = [place + count for place, count in zip(places, counts, strict=True)]
        mine, alone = (run_layers(each, weights, rows) for each in (manager, one))
        note(f"{counts} tokens")
        for got, want in zip(mine, alone, strict=True):
            assert (got.chosen is None) == (want.chosen is None)
            if got.chosen is not None:
                assert torch.equal(got.chosen, want.chosen)
            digest.update(got.output.cpu().view(torch.uint8).numpy().tobytes())
            scale = want.output.float().abs().max()
            farthest = max(farthest, float((got.output - want.output).abs().max() / scale))
        if counts == (3, 3):
            for each in (manager, one):
                each.truncate([0, 1], [place - 2 for place in places])
            places = [place - 2 for place in places]
    for slot in (0, 1):
        assert_same(*own_bytes(manager, one, slot))
    return farthest, digest.hexdigest()


def replay(rank, group, make_config=small_config, device="cpu"):
    """Decode and verification in a graph, beside the same layer by layer; the farthest output."""
    config, longest = make_config(), 500
    sizes = {"max_requests": 3, "num_blocks": 40, "max_request_tokens": longest, "device": device}
    captured, eager = (KVCacheManager(config, process_group=group, **sizes) for _ in range(2))
    weights = [move_to(device, each) for each in model_weights(config, seed=0)]
    tokens = [move_to(device, each) for each in model_projections(config, longest, seed=10)]
    inputs = [take_rows(layer, torch.arange(6, device=device)) for layer in tokens]

    def step(handles):
        chosen = {}
        return [
            forward_layer(handle, layer, weight, chosen).output
            for handle, layer, weight in zip(handles, inputs, weights, strict=True)
        ]

    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(captured_forward, "CudaGraph", EagerGraph)
            captured.context.can_capture = True
        graph = CapturedForward(captured, step, batch=2, tokens_per_request=3)
    for each in (captured, eager):
        each.open_requests(2)
        run_layers(each, weights, [Row(0, tokens, 0, 420), Row(1, tokens, 0, 9)])
    places, farthest = [420, 9], 0.0
    for counts in ((1, 1), (3, 2), (2, 3), (1, 1), (0, 3)):
        rows = [
            Row(slot, tokens, place, place + count)
            for slot, (place, count) in enumerate(zip(places, counts, strict=True))
        ]
        for idx, layer in enumerate(inputs):
            fill_rows(layer, forward_inputs(rows, idx))
        places = [row.after for row in rows]
        plan = prepare_forward(captured, [0, 1], [row.before for row in rows], places)
        got, want = graph.replay(plan), run_layers(eager, weights, rows)
        for mine, other in zip(got, want, strict=True):
            difference = (mine[: sum(counts)] - other.output).abs().max()
            farthest = max(farthest, float(difference / other.output.abs().max()))
    return farthest


def fill_rows(layer, rows):
    """Give the first rows of a layer's inputs their values, in place; the others are NaN."""
    for mine, theirs in zip(leaves(layer), leaves(rows), strict=True):
        mine.fill_(torch.nan)
        mine[: len(theirs)] = theirs


def serve(rank, group):
    """The tokens that the example's engine gives some requests, of which not all fit."""
    from decoder import Decoder
    from engine import Engine

    model = Decoder((4, 0, 4), block_tokens=16)
    manager = KVCacheManager(
        model.config, max_requests=4, num_blocks=8, max_forward_tokens=64, max_request_tokens=200,
        num_checkpoints=4, host_blocks=6, host_slots=2, process_group=group,
    )  # fmt: skip
    served = Engine(model, manager, budget=64)
    text = torch.randint(0, 128, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    requests = served.submit(text[:75], 12, num_samples=2) + served.submit(text[:45], 20)
    requests += served.submit(text[:70] + text[:30], 10)
    while served.step():
        pass
    return [request.ids for request in requests]


def answer(rank, group):
    """What `generate` and the engine say with an attached model, and the blocks of its cache."""
    from dsv4.engine import Engine, SamplingParams
    from dsv4.integrations.transformers import PackedModel, attach
    from dsv4.model.random_hf import random_hf_model

    model, said = random_hf_model(seed=0), {}
    cache = attach(
        model, max_requests=3, max_tokens=500, block_tokens=128, kv_format="fp32",
        index_format="fp32", max_forward_tokens=64, drafts_per_step=3, process_group=group,
    )  # fmt: skip
    text = torch.arange(290)[None] % 120 + 5
    new = model.generate(text, past_key_values=cache, do_sample=False, max_new_tokens=6)
    said["generate"] = new[0, 290:].tolist()
    cache.reset()
    engine = Engine(PackedModel(model, cache), cache.manager, num_drafts=3)
    for prompt in (text[0].tolist(), [*range(5, 12)], text[0, :140].tolist()):
        name = engine.submit(
            prompt, SamplingParams(temperature=0, max_new_tokens=6),
            lambda output: said[output.request_id].extend(output.token_ids),
        )  # fmt: skip
        said[name] = []
    while engine.step():
        pass
    return list(said.values()), cache.manager.capacity.num_blocks


class Dying:
    """A group whose process dies, or stops, at one of its exchanges."""

    def __init__(self, group, number, sign):
        self._group, self._left, self._signal = group, number, sign
        self.rank, self.size, self.name = group.rank, group.size, group.name

    def allgather(self, *args):
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), self._signal)
        return self._group.allgather(*args)


def fail_alone(rank, group):
    """A forward that fails on rank 1 alone, and then another."""
    config, weights = deep_config(), model_weights(deep_config(), seed=0)
    tokens = model_projections(config, 60, seed=1)
    sizes = {"max_requests": 2, "num_blocks": 16, "max_forward_tokens": 64}
    manager = KVCacheManager(config, process_group=group, **sizes)
    slot = manager.open_request()
    run_layers(manager, weights, [Row(slot, tokens, 0, 4)])
    rows = [Row(slot, tokens, 4, 40)]
    if rank == 1:
        kernels = load_backend(manager.backend)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(kernels, "attend", Mock(side_effect=MemoryError))
            run_layers(manager, weights, rows)
    with pytest.raises(RankLostError, match="failed alone"):
        run_layers(manager, weights, rows)
    return int(manager.lengths[slot])


def fail_in_an_exchange(rank, group, folder, number):
    """Rank 1 has no memory for what the others send, once."""
    world, group = group, new_group(folder / "store", rank, group.size(), 4.0)
    config, weights = deep_config(), model_weights(deep_config(), seed=0)
    tokens = model_projections(config, 60, seed=1)
    sizes = {"max_requests": 2, "num_blocks": 16, "max_forward_tokens": 64}
    manager = KVCacheManager(config, process_group=group, **sizes)
    rows = [Row(manager.open_request(), tokens, 0, 40)]
    world.barrier().wait()  # with a longer timeout: one may have started late
    if rank == 1:
        gather, left = manager.context._allgather, iter(range(number))

        def fail(mine):
            if next(left, None) is None:
                raise MemoryError
            return gather(mine)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(manager.context, "_allgather", fail)
            run_layers(manager, weights, rows)
    for _ in range(2):
        with pytest.raises(RankLostError):
            run_layers(manager, weights, rows)
    return int(manager.lengths[0])


def promote(rank, group, make_config, lengths, folder):
    """Requests of a manager without a group go on in one that has it, on every rank.

    They are beside requests that were split from the first token on. Returns how far outputs of
    the next tokens are from those of one rank, relative to the scale.
    """
    config, farthest = make_config(), 0.0
    sizes = {"max_requests": 2, "num_blocks": 64, "max_forward_tokens": 700, "num_checkpoints": 2}
    weights, tokens = model_weights(config, seed=0), model_projections(config, 700, seed=1)
    alone = KVCacheManager(config, **sizes)
    born, split = (KVCacheManager(config, **sizes, process_group=group) for _ in range(2))
    for length in lengths:
        ids = np.arange(length + 96) + 1000 * length  # of each length other ones
        for each in (alone, born, split):
            each.reset()
            poison(each)
        first, other = (each.resume_request(ids, salt=b"mine").slot
                        for each in (alone, born))  # fmt: skip
        for each, slot in ((alone, first), (born, other)):
            run_layers(each, weights, [Row(slot, tokens, 0, length)])
        saved = alone.export_request(first)
        slots = [split.import_request(saved)]
        alone.save_request(first, folder / f"{rank} {length}")
        slots.append(split.load_request(folder / f"{rank} {length}"))
        got, want = split.export_request(slots[0]), born.export_request(other)
        assert_same(list(got.tensors.values()), list(want.tensors.values()))
        assert got.description == want.description
        assert_same(live_bytes(split, slots[1]), live_bytes(born, other))
        split.free_request(slots[1])
        place = length
        for count in (1, 4, 90, 1):
            results = [
                run_layers(each, weights, [Row(slot, tokens, place, place + count)])
                for each, slot in ((split, slots[0]), (alone, first))
            ]
            for got, one in zip(*results, strict=True):
                assert (got.chosen is None) or torch.equal(got.chosen, one.chosen)
                scale = one.output.abs().max()
                farthest = max(farthest, float((got.output - one.output).abs().max() / scale))
            place += count
        run_layers(born, weights, [Row(other, tokens, length, place)])
        assert_same(live_bytes(split, slots[0]), live_bytes(born, other))
        split.free_request(slots[0])
        hit = split.match_prefix(ids, salt=b"mine")
        is_long = place > split.config.block_tokens + split.config.halo_tokens
        assert hit.num_tokens > 0 or not is_long
        assert not split.match_prefix(ids).num_tokens
        split.check_integrity()
    return farthest


def go_apart(rank, group, how):
    """Ranks that run other requests, of as many tokens, or whose books differ."""
    config, weights = short_config(), model_weights(short_config(), seed=0)
    tokens = model_projections(config, 60, seed=1)
    sizes = {"max_requests": 3, "num_blocks": 16, "max_forward_tokens": 128}
    manager = KVCacheManager(config, process_group=group, **sizes)
    slots = manager.open_requests(2)
    if how == "blocks" and rank:
        manager.prepare_forward([slots[1]], [0], [40]).complete()
        manager.truncate(slots[1], 0)
        manager.prepare_forward([slots[1]], [0], [8]).complete()
        manager.truncate(slots[1], 0)
        other = manager.open_request(num_tokens=8)
        manager.prepare_forward([other], [0], [8]).complete()
    with pytest.raises(RankLostError, match="or has other requests"):
        run_layers(manager, weights, [Row(slot, tokens, 0, 40) for slot in slots])
        assert how == "slots"
        run_layers(manager, weights, [Row(slots[rank], tokens, 40, 41)])
    return manager.lengths[:2].tolist()


def choose_apart(rank, group, choices):
    config = short_config()
    with pytest.raises(ValueError, match="same config, sizes and choices on all ranks"):
        KVCacheManager(config, max_requests=2, num_blocks=16, num_checkpoints=2,
                       process_group=group, **choices[rank])  # fmt: skip


def lose_a_rank(rank, group, folder, dying, number, sign, seconds):
    """Run until a rank dies; go on in a group of the others."""
    config, weights = deep_config(), model_weights(deep_config(), seed=0)
    tokens = model_projections(config, 60, seed=1)
    world, group = group, new_group(folder / "first", rank, group.size(), seconds)
    world.barrier().wait()  # a group whose rank dies while it connects is none
    if rank == dying:
        group = Dying(group, number, sign)
    sizes = {"max_requests": 2, "num_blocks": 16, "max_forward_tokens": 64, "num_checkpoints": 3}
    manager, length, begin = None, -1, time.monotonic()
    with pytest.raises(RankLostError):
        manager = KVCacheManager(config, process_group=group, **sizes)
        slot = manager.resume_request(list(range(60))).slot
        for length, end in ((0, 40), (40, 44)):
            begin = time.monotonic()
            run_layers(manager, weights, [Row(slot, tokens, length, end)])
    waited = time.monotonic() - begin
    if manager is not None:
        assert manager.live_plan is None
        assert manager.lengths[slot] == length
        with pytest.raises(RankLostError):  # at once
            run_layers(manager, weights, [Row(slot, tokens, length, length + 20)])
        assert manager.lengths[slot] == length
        manager.free_request(slot)
        manager.check_integrity()
        stats = manager.stats()
        assert stats.num_free_blocks + stats.num_evictable_blocks == 16
    left = [each for each in range(group.size()) if each != dying]
    rest = new_group(folder / "second", left.index(rank), len(left))
    manager = KVCacheManager(config, process_group=rest, **sizes)
    slot = manager.open_request()
    outputs = run_layers(manager, weights, [Row(slot, tokens, 0, 44)])
    return waited, length, [each.output for each in outputs]
