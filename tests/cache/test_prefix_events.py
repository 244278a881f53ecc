"""Events for routers: the blocks that are told of are those that the prefix cache has."""

import numpy as np
import pytest

from dsv4 import BlockRemoved, BlockStored
from tests.cache import test_retention as retention

ids_of = retention.text


class Router:
    """What a router believes: the hashes of each tier, and their tokens."""

    def __init__(self):
        self.tiers = {"GPU": set(), "CPU_PINNED": set()}
        self.tokens, self.parents, self.events = {}, {}, []

    def __call__(self, events):
        self.events += events
        for event in events:
            if isinstance(event, BlockRemoved):
                assert self.tiers[event.medium] >= set(event.block_hashes)
                self.tiers[event.medium] -= set(event.block_hashes)
                continue
            assert isinstance(event, BlockStored) and event.block_size == 8
            chain = [event.parent_block_hash, *event.block_hashes]
            self.tiers[event.medium] |= set(event.block_hashes)
            self.parents.update(zip(event.block_hashes, chain, strict=False))
            if event.token_ids:
                parts = np.split(np.array(event.token_ids), len(event.block_hashes))
                self.tokens.update(
                    zip(event.block_hashes, (p.tolist() for p in parts), strict=True)
                )


@pytest.fixture(params=[0, 12, 200])
def served(request):
    """Random prompts over a small pool; the manager, the router and the prompts."""
    router, rng = Router(), np.random.default_rng(request.param)
    manager = retention.make_manager(
        num_blocks=14, num_checkpoints=3, host_blocks=request.param, on_events=router
    )
    prompts = []
    for _ in range(40):
        shared = prompts[rng.integers(len(prompts))] if prompts and rng.random() < 0.6 else []
        kept = shared[: int(rng.integers(len(shared) + 1))]
        prompts.append([*kept, *ids_of(int(rng.integers(1 << 30)), 3)][:80])
        retention.ask(manager, prompts[-1])
    manager.stats()
    manager.stats()
    return manager, router, prompts


def test_a_router_knows_what_is_where(served):
    manager, router, _ = served
    nodes = manager._books.prefix.tree.nodes
    assert router.tiers["GPU"] == {each.digest for each in nodes.values() if each.block >= 0}
    on_host = {each.digest for each in nodes.values() if each.host_block >= 0}
    assert router.tiers["CPU_PINNED"] == on_host
    for digest, node in nodes.items():
        assert router.parents[digest] == (node.parent.digest if node.parent else None)


def test_tokens_are_told_once_and_right(served):
    _, router, prompts = served
    texts = {tuple(p[start : start + 8]) for p in prompts for start in range(0, len(p) - 7, 8)}
    assert {tuple(each) for each in router.tokens.values()} <= texts
    assert any(isinstance(event, BlockRemoved) for event in router.events)


def test_a_callback_that_raises_changes_nothing():
    calls = []

    def fail(events):
        calls.append(events)
        raise KeyError

    manager = retention.make_manager(on_events=fail)
    retention.ask(retention.make_manager(), ids_of(0, 3))
    slot = manager.resume_request(ids_of(0, 3)).slot
    retention.run_forward(
        manager, retention.WEIGHTS, [retention.Row(slot, retention.TOKENS, 0, 24)]
    )
    manager.free_request(slot)
    with pytest.raises(KeyError):
        manager.stats()
    manager.check_integrity()
    assert len(calls) == 1 and manager.stats().num_prefix_blocks == 3
