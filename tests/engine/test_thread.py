"""Requests from many threads, and an engine that fails, is stopped, or is full."""

import random
import threading
from collections import Counter

import pytest

from dsv4.engine import Engine, EngineDeadError, EngineThread, QueueFullError, SamplingParams
from dsv4.errors import LostCacheError
from tests.engine.test_engine import VOCABULARY, Answers, alone, make_world, ragged

DEADLINE = 300  # seconds: only a hang takes so long
GREEDY = SamplingParams(temperature=0, max_new_tokens=6)


class Gate:
    """A model that runs while the gate is open, and raises what it is told to."""

    def __init__(self, model):
        self.model, self.is_open = model, threading.Event()
        self.is_inside, self.errors = threading.Event(), []
        self.is_open.set()

    def __call__(self, ids, plan, rows):
        self.is_inside.set()
        assert self.is_open.wait(DEADLINE)
        if self.errors:
            raise self.errors.pop(0)
        return self.model(ids, plan, rows)


@pytest.fixture
def served():
    world = make_world("short")
    manager = world.new_manager(max_requests=4, num_blocks=24, num_checkpoints=6)
    gate = Gate(ragged(world.model, manager))
    thread = EngineThread(Engine(gate, manager, max_step_tokens=36), max_waiting=8)
    thread.start()
    yield thread, gate
    gate.is_open.set()
    thread.stop(DEADLINE)
    if thread.fatal_error is None:
        manager.check_integrity()
        assert not manager.open_slots


class Client(Answers):
    """Waits for the last output of all samples."""

    def __init__(self, num_samples=1):
        super().__init__()
        self.left, self.is_over, self.error = num_samples, threading.Event(), None

    def __call__(self, output):
        super().__call__(output)
        self.error = output.error or self.error
        self.left -= output.finish_reason is not None
        if not self.left:
            self.is_over.set()

    def wait(self):
        assert self.is_over.wait(DEADLINE)
        return set(self.reasons.values())


def tokens(seed, count):
    return [random.Random(seed).randrange(VOCABULARY) for _ in range(count)]


def test_requests_from_many_threads(served):
    thread, _ = served
    failures, finished = [], Counter()

    def ask(seed):
        rng = random.Random(seed)
        for number in range(3):
            client, prompt = Client(), tokens(seed % 4, rng.randint(1, 30))
            name = f"{seed}.{number}"
            thread.submit(prompt, GREEDY, client, request_id=name)
            if rng.random() < 0.3:
                thread.cancel(name)
            reasons = client.wait()
            expected = alone("short", tuple(prompt), GREEDY, 0)
            got = client.tokens.get((name, 0), [])
            finished.update(reasons)
            if got != expected[: len(got)] or (reasons == {"length"} and got != expected):
                failures.append((name, reasons, got, expected))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(DEADLINE)
    assert not failures and finished.total() == 18 and finished["length"] > 0
    assert thread.call(lambda engine: engine.is_idle, DEADLINE)
    snapshot = thread.snapshot()
    assert snapshot.counts["submitted"] == 18 and snapshot.requests == []


def test_a_full_queue_and_bad_requests_are_refused(served):
    thread, gate = served
    gate.is_open.clear()
    clients = [Client() for _ in range(8)]
    for number, client in enumerate(clients):
        thread.submit(tokens(number, 5), GREEDY, client)
    with pytest.raises(QueueFullError, match="at most 8"):
        thread.submit([1], GREEDY, Client())
    with pytest.raises(ValueError, match="Invalid prompt: expected 1 to"):
        thread.submit([], GREEDY, Client())
    with pytest.raises(ValueError, match="Invalid prompt: expected 1 to"):
        thread.submit([1] * 10_000, GREEDY, Client())
    with pytest.raises(ValueError, match="Invalid max_new_tokens: expected an integer from 1 to"):
        thread.submit([1], SamplingParams(max_new_tokens=10_000), Client())
    with pytest.raises(ValueError, match="Invalid stop: expected an engine with a tokenizer"):
        thread.submit([1], SamplingParams(stop=("a",)), Client())
    gate.is_open.set()
    assert all(client.wait() == {"length"} for client in clients)
    late = Client()
    thread.submit([-5], GREEDY, late, request_id="bad token")
    assert late.wait() == {"error"} and "Invalid prompt" in late.error


def test_a_passing_fault_is_not_noticed(served):
    thread, gate = served
    gate.errors = [RuntimeError("passing")]
    client, prompt = Client(), tokens(3, 9)
    thread.submit(prompt, GREEDY, client, request_id="it")
    assert client.wait() == {"length"}
    assert client.tokens["it", 0] == alone("short", tuple(prompt), GREEDY, 0)


def test_a_fault_that_stays_ends_the_running_requests(served):
    thread, gate = served
    gate.errors = [RuntimeError("twice"), RuntimeError("twice")]
    client, after = Client(2), Client()
    thread.submit(tokens(3, 9), SamplingParams(n=2, temperature=0), client)
    assert client.wait() == {"error"} and client.error == "twice"
    thread.submit(tokens(3, 9), GREEDY, after)
    assert after.wait() == {"length"}


def test_a_fault_that_never_goes_is_the_engines_end(served):
    thread, gate = served
    gate.errors = [RuntimeError("for ever")] * 9
    first, second = Client(), Client()
    thread.submit(tokens(3, 9), GREEDY, first)
    assert first.wait() == {"error"} and thread.fatal_error is None
    thread.submit(tokens(3, 9), GREEDY, second)  # the next step is the third that fails
    assert second.wait() == {"error"} and "for ever" in thread.fatal_error


@pytest.mark.parametrize("error", [LostCacheError("lost"), KeyboardInterrupt("by hand")])
def test_a_dead_engine_says_so(served, error):
    thread, gate = served
    gate.errors = [error]
    running, queued = Client(), Client(2)
    gate.is_open.clear()
    thread.submit(tokens(3, 9), GREEDY, running)
    assert gate.is_inside.wait(DEADLINE)
    thread.submit(tokens(4, 9), SamplingParams(n=2), queued)
    gate.is_open.set()
    assert running.wait() == queued.wait() == {"error"}
    assert type(error).__name__ in running.error and thread.fatal_error == running.error
    with pytest.raises(EngineDeadError, match=type(error).__name__):
        thread.submit([1], GREEDY, Client())


def test_stop_ends_what_is_open(served):
    thread, gate = served
    gate.is_open.clear()
    client = Client()
    thread.submit(tokens(3, 9), GREEDY, client)
    assert gate.is_inside.wait(DEADLINE)
    threading.Timer(0.05, gate.is_open.set).start()
    thread.stop(DEADLINE)
    assert client.wait() == {"cancelled"}
    with pytest.raises(EngineDeadError, match="stopped"):
        thread.submit([1], GREEDY, Client())


def test_a_call_that_raises_harms_its_caller_alone(served):
    thread, _ = served
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda engine: 1 // 0, DEADLINE)
    client = Client()
    thread.submit(tokens(4, 9), GREEDY, client)
    assert client.wait() == {"length"} and thread.fatal_error is None


def test_a_client_that_raises_harms_nobody(served):
    thread, _ = served

    def fail(output):
        raise RuntimeError("a client's own fault")

    client = Client()
    thread.submit(tokens(3, 9), GREEDY, fail)
    thread.submit(tokens(4, 9), GREEDY, client)
    assert client.wait() == {"length"} and thread.fatal_error is None
