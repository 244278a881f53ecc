"""One set of books over several devices: each layer's bytes on its own, and a request as on one.

The CPU is several devices here: `cpu` shares its memory with the host, and `cpu:0` has its own.
"""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from dsv4 import CacheConfig, KVCacheManager, PrefixStore, prepare_forward
from dsv4.cache.graphs.captured_forward import CapturedForward
from dsv4.cache.memory import device_memory
from dsv4.cache.memory.staging import Staging
from dsv4.distributed.handover import Inbox
from dsv4.testing import Row, model_projections, model_weights, move_to, poison
from tests.cache.life import BASE, World, machine_in, run_layers, v41_world
from tests.cache.live import assert_same, live_bytes
from tests.distributed.local import hand_over

CONFIG = CacheConfig.tiny(**BASE, compress_ratios=(0, 4, 128, 4), block_tokens=128)
DEVICES = ["cpu:0", "cpu", "cpu:0", "cpu"]
NO_ENTRIES = ["cpu:0", "cpu", "cpu", "cpu"]  # on the first device


@pytest.fixture(autouse=True)
def own_memory(monkeypatch):
    """Plans travel to `cpu:0`."""
    real = device_memory.staging_for
    monkeypatch.setattr(
        device_memory,
        "staging_for",
        lambda device: Staging if str(device) == "cpu:0" else real(device),
    )


class SplitWorld(World):
    """Every second layer is on another device."""

    def new_manager(self, **sizes):
        devices = ["cpu" if idx % 2 else "cpu:0" for idx in range(self.config.num_layers)]
        return super().new_manager(device=devices, **sizes)


@pytest.mark.parametrize(
    ("ratios", "num_lives"),
    [((0, 4, 4), 4), pytest.param((0, 4, 128, 4), 12, marks=pytest.mark.slow)],
)
def test_lives(ratios, num_lives):
    is_long = 128 in ratios
    sizes = {"block_tokens": 128} if is_long else {
        "block_tokens": 8, "sliding_window": 8, "index_topk": 4
    }  # fmt: skip
    config = CacheConfig.tiny(**BASE, compress_ratios=ratios, **sizes)
    tokens, blocks = (420, 7) if is_long else (40, 9)
    machine = machine_in(SplitWorld(config, max_tokens=tokens, num_blocks=blocks))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_lives, stateful_step_count=30, deadline=None, derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    assert machine.num_steps > num_lives


def grown(device, length=300, **sizes):
    sizes = {"num_blocks": 9, "host_blocks": 4, "host_slots": 1, **sizes}
    manager = KVCacheManager(CONFIG, max_requests=3, device=device, **sizes)
    poison(manager)
    slot = manager.open_request()
    grow(manager, slot, 0, length)
    return manager, slot


def grow(manager, slot, before, after):
    def placed(layers):
        return [
            move_to(parts.checks.device, layer)
            for parts, layer in zip(manager._layers, layers, strict=True)
        ]

    row = Row(slot, placed(model_projections(CONFIG, after, seed=1)), before, after)
    return run_layers(manager, placed(model_weights(CONFIG, seed=0)), [row])


def test_each_layer_has_its_device():
    manager, _ = grown(DEVICES)
    first, second = manager.memory_parts
    assert [str(each) for each in manager.devices] == ["cpu:0", "cpu"]
    for idx, memory in enumerate((first, second, first, second)):
        assert manager._layers[idx].memory.blocks is memory.paged.storage
        assert manager._layers[idx].memory.slots is memory.state.storage
    assert first.block_table.data_ptr() != second.block_table.data_ptr()


def test_bytes_are_counted():
    manager, _ = grown(DEVICES)
    whole, _ = grown("cpu")
    counted = sum(part.allocated for part in manager.memory().values())
    assert counted == sum(tensor.nbytes for tensor in manager.tensors().values())
    for name in ("csa_entries", "index_keys", "hca_entries", "window", "csa_tails", "hca_tails"):
        assert manager.memory()[name] == whole.memory()[name]


@pytest.mark.parametrize("devices", [DEVICES, NO_ENTRIES])
def test_requests_travel_between_managers_of_any_devices(devices, tmp_path):
    managers = {name: grown(name if name == "cpu" else devices) for name in ("cpu", "split")}
    exported = {name: manager.export_request(slot) for name, (manager, slot) in managers.items()}
    for name in ("slot", "blocks"):
        assert torch.equal(getattr(exported["cpu"], name), getattr(exported["split"], name))
    for source, target in (("cpu", "split"), ("split", "cpu")):
        manager, slot = managers[target]
        manager.save_request(slot, tmp_path / target)
        here = managers[source][0]
        for there in (here.import_request(exported[target]), here.load_request(tmp_path / target)):
            assert_same(live_bytes(here, there), live_bytes(manager, slot))
            here.free_request(there)


@pytest.mark.parametrize("devices", [DEVICES, NO_ENTRIES])
def test_requests_are_handed_over_between_managers_of_any_devices(devices):
    managers = [grown(each) for each in ("cpu", devices, devices)]
    for (manager, slot), (other, _) in permutations(managers, 2):
        ((_, there),) = hand_over(manager, manager.fork(slot), Inbox(other), memory_bytes=1 << 18)
        assert_same(live_bytes(other, there), live_bytes(manager, slot))
        assert manager.open_slots == [slot]
        other.free_request(there)
        other.check_integrity()


@pytest.mark.parametrize(
    "devices",
    [
        DEVICES,
        NO_ENTRIES,
        pytest.param(["cuda", "cpu", "cuda", "cpu"], marks=pytest.mark.gpu),
        pytest.param(["cpu", "cuda", "cuda:0", "cuda"], marks=pytest.mark.gpu),
    ],
)
def test_the_rest_of_a_life_is_as_on_one_device(devices, tmp_path):
    results = []
    for device in ("cpu", devices):
        store = PrefixStore(tmp_path / str(len(results)), 1 << 20, key=b"a key")
        sizes = {"num_checkpoints": 1, "host_blocks": 12, "num_blocks": 7, "store": store}
        manager, slot = grown(device, **sizes)
        manager.truncate(slot, 298)
        fork = manager.fork(slot)
        slot = manager.swap_in(manager.swap_out(slot))
        prepare_forward(manager, [fork], [298], [390]).cancel()
        kept = [manager.export_request(each) for each in (slot, fork)]
        grow(manager, slot, 298, 310)
        grow(manager, fork, 298, 330)
        kept += [manager.export_request(each) for each in (slot, fork)]
        manager.free_requests([slot, fork])
        ids = np.arange(300) % 7
        for count in (300, 256):  # its first checkpoint goes to the host, the blocks after it
            slot = manager.resume_request(ids + count % 2).slot
            grow(manager, slot, int(manager.lengths[slot]), 300)
            manager.free_request(slot)
        hit = manager.resume_request(ids)
        grow(manager, hit.slot, hit.num_tokens, 300)
        kept.append(manager.export_request(hit.slot))
        manager.check_integrity()
        assert hit.num_tokens == 256
        results.append([(each.slot.cpu(), each.blocks.cpu()) for each in kept])
        manager.close()
        store.close()
    for mine, theirs in zip(*results, strict=True):
        assert_same(mine, theirs)


def test_rows_are_one_order_of_bytes():
    manager, _ = grown(DEVICES)
    rows = torch.randint(0, 256, (2, manager.blocks.num_bytes), dtype=torch.uint8)
    rows[:, manager.blocks.num_bytes - manager.layout.blocks.padding :] = 0
    back = torch.zeros_like(rows)
    manager.blocks.write(np.array([5, 3]), rows)
    manager.blocks.read(np.array([5, 3]), back)
    assert torch.equal(rows, back)


def test_refusals():
    manager, _ = grown(DEVICES)
    for name in ("paged", "state"):
        with pytest.raises(ValueError, match=f"No {name} on several devices: expected one"):
            getattr(manager, name)
    with pytest.raises(ValueError, match="No captured forward on several devices"):
        CapturedForward(manager, lambda plan: None, batch=1)
    sizes = {"max_requests": 1, "num_blocks": 2}
    with pytest.raises(ValueError, match="one for each of 4 layers, got 3"):
        KVCacheManager(CONFIG, **sizes, device=DEVICES[1:])
    with pytest.raises(ValueError, match="Invalid storage: expected none on several devices"):
        KVCacheManager(CONFIG, **sizes, device=DEVICES, storage={"blocks": torch.zeros(1)})
    with pytest.raises(ValueError, match="Invalid device of layer 3: expected that of layer 2"):
        KVCacheManager(v41_world().config, **sizes, device=["cpu", "cpu", "cpu", "cpu:0"])
