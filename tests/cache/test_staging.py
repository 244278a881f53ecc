"""Plans and block tables on their way to a device: never overwritten in flight, always complete.

The device is stood in for by other memory of the CPU, and its queue by a list.
"""

import numpy as np
import pytest
import torch

from dsv4 import CacheConfig, IntegrityError, KVCacheManager, prepare_forward
from dsv4.cache.memory import device_memory
from dsv4.cache.memory.staging import NUM_BUFFERS, PinnedStaging, Staging, staging_for

CONFIG = CacheConfig.tiny()


class Queue:
    """Work that a device has not done yet."""

    def __init__(self):
        self.waiting = []
        self.num_done = 0
        self.num_waits = 0

    @property
    def end(self):
        return self.num_done + len(self.waiting)

    def run_until(self, position):
        while self.num_done < position:
            self.waiting.pop(0)()
            self.num_done += 1


class QueueEvent:
    """An event of a `Queue`: reached once all that was queued before it is done."""

    def __init__(self, queue):
        self.queue, self.position = queue, 0

    def record(self):
        self.position = self.queue.end

    def query(self):
        return self.queue.num_done >= self.position

    def synchronize(self):
        self.queue.num_waits += 1
        self.queue.run_until(self.position)


class QueuedStaging(PinnedStaging):
    """Ordinary memory; copies happen when the queue gets to them."""

    def __init__(self, target):
        self.queue = Queue()
        super().__init__(target)

    def _allocate(self):
        return torch.empty_like(self.target)

    def _new_event(self):
        return QueueEvent(self.queue)

    def _start_copy(self, buffer, copied):
        self.queue.waiting.append(lambda: self.target.copy_(buffer))
        copied.record()


def numbered(value):
    return np.full(6, value, dtype=np.int32)


def test_a_buffer_in_flight_is_not_overwritten():
    staging, arrived = QueuedStaging(torch.zeros(6, dtype=torch.int32)), []
    queue = staging.queue
    for value in range(3 * NUM_BUFFERS):
        staging.send(numbered(value))
        queue.waiting.append(lambda: arrived.append(staging.target.tolist()))
    queue.run_until(queue.end)
    assert arrived == [[value] * 6 for value in range(3 * NUM_BUFFERS)]
    assert queue.num_waits == 2 * NUM_BUFFERS


def test_the_host_waits_only_for_a_device_that_is_far_behind():
    staging = QueuedStaging(torch.zeros(6, dtype=torch.int32))
    for value in range(40):
        staging.send(numbered(value))
        staging.queue.run_until(staging.queue.end - (NUM_BUFFERS - 1))
    assert staging.queue.num_waits == 0
    staging.send(numbered(40))
    assert staging.queue.num_waits == 0 and len(staging.queue.waiting) == NUM_BUFFERS
    staging.send(numbered(41))
    assert staging.queue.num_waits == 1 and len(staging.queue.waiting) == NUM_BUFFERS


def test_values_may_change_as_soon_as_they_are_sent():
    staging = QueuedStaging(torch.zeros(6, dtype=torch.int32))
    values = numbered(1)
    staging.send(values)
    values[:] = 2
    staging.queue.run_until(1)
    assert staging.target.tolist() == [1] * 6


def test_each_device_has_its_way():
    assert staging_for(torch.device("cpu")) is None
    assert staging_for(torch.device("cuda", 1)) is PinnedStaging
    assert staging_for(torch.device("xpu")) is Staging


class CountedStaging(Staging):
    """Memory apart from the host's, filled at once."""

    def __init__(self, target):
        super().__init__(target)
        self.num_sent = 0

    def send(self, values):
        super().send(values)
        self.num_sent += 1


def make_manager(**sizes):
    defaults = {"max_requests": 6, "num_blocks": 24, "max_forward_tokens": 1024}
    return KVCacheManager(CONFIG, **{**defaults, **sizes})


@pytest.fixture
def apart(monkeypatch):
    """A maker of managers whose device has memory of its own."""

    def make(**sizes):
        with monkeypatch.context() as patch:
            patch.setattr(device_memory, "staging_for", lambda device: CountedStaging)
            return make_manager(**sizes)

    return make


def num_sent(manager):
    return manager.device_memory.plan_buffers._staging.num_sent


def forward(manager, slots, after):
    plan = prepare_forward(manager, slots, manager.lengths[slots], after)
    plan.complete()
    return plan


def test_a_manager_apart_has_the_sizes_of_any_other(apart):
    mine, other = apart(), make_manager()
    assert {name: tensor.shape for name, tensor in mine.tensors().items()} == {
        name: tensor.shape for name, tensor in other.tensors().items()
    }
    assert sum(part.allocated for part in mine.memory().values()) == sum(
        tensor.nbytes for tensor in mine.tensors().values()
    )
    assert (
        mine.device_memory.plan_buffers.packed.data_ptr()
        != mine.device_memory.plan_buffers._packed.ctypes.data
    )


@pytest.mark.parametrize("seed", range(4))
def test_plans_arrive_as_they_are_on_the_host(apart, seed):
    random = np.random.default_rng(seed)
    mine, other = apart(), make_manager()
    for _ in range(60):
        is_open = np.flatnonzero(mine.is_open)
        if is_open.size and random.random() < 0.3:
            for manager in (mine, other):
                manager.free_request(int(is_open[0]))
        if mine.num_free_slots and random.random() < 0.5:
            assert mine.open_request() == other.open_request()
        mine.check_integrity()
        slots = random.permutation(np.flatnonzero(mine.is_open))
        slots = slots[: random.integers(0, len(slots) + 1)]
        after = np.minimum(mine.lengths[slots] + random.choice([1, 1, 4, 130], len(slots)), 1000)
        plans = [forward(manager, slots, after) for manager in (mine, other)]
        for name in ("request_slots", "positions", "request_ids", "token_starts", "chunk_ids"):
            assert torch.equal(*(getattr(plan.tokens, name) for plan in plans)), name
        assert plans[0].tokens.block_table is mine.block_table
        assert torch.equal(mine.block_table, other.block_table)
        mine.check_integrity()


def test_one_upload_brings_plan_and_blocks(apart):
    manager = apart()
    slots = [manager.open_request() for _ in range(3)]
    forward(manager, slots, [300, 300, 300])
    assert num_sent(manager) == 1
    assert torch.equal(manager.block_table, torch.from_numpy(manager._books.requests.block_table))
    forward(manager, slots, [301, 301, 301])
    assert num_sent(manager) == 2


def test_freeing_a_request_only_notes_it(apart):
    manager = apart()
    slots = [manager.open_request() for _ in range(2)]
    forward(manager, slots, [300, 300])
    on_device = manager.block_table.clone()
    manager.free_request(0)
    assert num_sent(manager) == 1 and torch.equal(manager.block_table, on_device)
    assert manager._books.requests.changed_blocks()[0].tolist() == [0, 1]
    manager.check_integrity()
    forward(manager, [1], [301])
    assert manager.block_table[0].tolist() == [-1] * manager.block_table.shape[1]
    assert not manager._books.requests.changed_blocks()[0].size


def test_a_block_that_changes_twice_arrives_as_it_is_now(apart):
    manager = apart()
    slots = [manager.open_request() for _ in range(2)]
    forward(manager, slots, [600, 3])
    manager.free_request(0)
    assert manager.open_request() == 0
    forward(manager, [1, 0], [4, 300])
    assert (
        manager.block_table[:2, :3].tolist() == manager._books.requests.block_table[:2, :3].tolist()
    )
    manager.check_integrity()


def test_more_changes_than_fit_do_not_wait_for_the_buffers(apart):
    manager = apart(max_requests=3, max_forward_tokens=300)
    limit = manager.capacity.max_table_updates
    assert limit == 5
    slots = [manager.open_request() for _ in range(3)]
    for end in range(300, 1801, 300):
        for slot in slots:
            forward(manager, [slot], [end])
    before = num_sent(manager)
    for slot in slots:
        manager.free_request(slot)
    slot = manager.open_request()
    plan = prepare_forward(manager, [slot], [0], [300])
    assert num_sent(manager) == before + 1
    assert torch.equal(manager.block_table, torch.from_numpy(manager._books.requests.block_table))
    assert plan.tokens.positions.tolist() == list(range(300))
    manager.check_integrity()


def test_integrity_looks_at_the_device(apart):
    manager = apart()
    slot = manager.open_request()
    forward(manager, [slot], [600])
    manager.block_table[slot, 1] += 1
    with pytest.raises(IntegrityError, match="the device's block table differs"):
        manager.check_integrity()


def test_a_refused_plan_sends_nothing(apart):
    manager = apart(num_blocks=2)
    slot = manager.open_request()
    forward(manager, [slot], [300])
    for after, match in ((900, "tokens in one request"), (200, "positions")):
        with pytest.raises(ValueError, match=match):
            prepare_forward(manager, [slot], [300], [after])
    assert num_sent(manager) == 1 and not manager._books.requests.changed_blocks()[0].size


@pytest.mark.gpu
def test_pinned_buffers_keep_up_with_a_slow_device():
    target = torch.zeros(100_000, dtype=torch.int32, device="cuda")
    staging, arrived = PinnedStaging(target), []
    for value in range(5 * NUM_BUFFERS):
        torch.cuda._sleep(1_000_000)
        staging.send(np.full(100_000, value, dtype=np.int32))
        arrived.append(torch.stack(target.aminmax()))
    assert [pair.tolist() for pair in arrived] == [[v, v] for v in range(5 * NUM_BUFFERS)]


@pytest.mark.gpu
def test_block_tables_on_a_gpu():
    manager = make_manager(device="cuda")
    slots = [manager.open_request() for _ in range(6)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for end in (3, 4, 255, 260, 520):
            for slot in slots:
                forward(manager, [slot], [end])
        for slot in slots[1:4]:
            manager.free_request(slot)
        forward(manager, [0, 5], [521, 777])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.array_equal(manager.block_table.cpu().numpy(), manager._books.requests.block_table)
    manager.check_integrity()
