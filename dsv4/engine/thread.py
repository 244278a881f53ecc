"""`EngineThread`: an engine on a thread of its own, for servers."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from dsv4.cache.memory.capacity import ComponentBytes
from dsv4.cache.stats import CacheStats
from dsv4.engine.engine import Engine
from dsv4.engine.request import FinishReason, OnOutput, Output
from dsv4.engine.sampling_params import SamplingParams
from dsv4.errors import LostCacheError

IDLE = 0.001  # seconds between two looks at requests that wait for a read from disk
SNAPSHOT = 0.25  # seconds between two snapshots
MOST_FAILURES = 3  # steps one after the other, until the engine is given up


class QueueFullError(RuntimeError):
    """Too many requests wait already."""


class EngineDeadError(RuntimeError):
    """The engine's thread has died, or was stopped."""


class Client(NamedTuple):
    """Who waits for a request, and the samples that have not ended."""

    on_output: OnOutput
    samples: set[int]


class RequestState(NamedTuple):
    """One open sample: `waiting`, `prefill`, `decode` or `swapped`."""

    request_id: str
    sample: int
    state: str
    num_prompt: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True)
class EngineSnapshot:
    """The state of an engine after some step.

    Attributes:
        counts: Events so far, by name.
        memory: Bytes of the cache by component.
    """

    time: float
    counts: dict[str, int]
    requests: list[RequestState]
    stats: CacheStats
    memory: dict[str, ComponentBytes]
    host_memory: dict[str, ComponentBytes] = field(default_factory=dict)

    def count_states(self, *states: str) -> int:
        """Count the open samples in some states."""
        return sum(request.state in states for request in self.requests)


class EngineThread:
    """Takes requests from any thread, and runs an engine while there are some.

    Outputs are reported on the engine's thread. If the thread dies, every open request ends with
    an error, and `fatal_error` says why.

    Args:
        engine: From now on used by this thread alone.
        max_waiting: Requests that may be open at once.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 1024) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], object]] = deque()
        self._open: dict[str, Client] = {}
        self._num_submitted = 0
        self._is_stopping = False
        self.fatal_error: str | None = None
        self._snapshot = self._take_snapshot()
        self._thread = threading.Thread(target=self._run, name="dsv4-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """Cancel all requests and end the thread."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_output: OnOutput,
        *,
        request_id: str | None = None,
        salt: bytes = b"",
        checkpoint_at: int | None = None,
    ) -> str:
        """Queue a prompt, see `Engine.submit`, and return the request's id.

        Raises:
            ValueError: The request can never be served.
            QueueFullError: Too many requests are open.
            EngineDeadError: The engine is not running.
        """
        self._engine.check_prompt(len(prompt), params)
        with self._changed:
            self._check_alive()
            if len(self._open) >= self._max_waiting:
                raise QueueFullError(
                    f"Too many requests: expected at most {self._max_waiting} open at once"
                )
            self._num_submitted += 1
            name = request_id or f"request-{self._num_submitted}"
            if name in self._open:
                raise ValueError(f"Invalid request_id: expected a new one, got {name!r} again")
            self._open[name] = Client(on_output, set(range(params.n)))
            submit = partial(
                self._engine.submit, prompt, params, self._report,
                request_id=name, salt=salt, checkpoint_at=checkpoint_at,
            )  # fmt: skip
            self._inbox.append(partial(self._submit, name, submit))
            self._changed.notify()
        return name

    def cancel(self, request_id: str) -> None:
        """End a request; one that is over, or unknown, is left alone."""
        with self._changed:
            if request_id in self._open:
                self._inbox.append(lambda: self._engine.cancel(request_id))
                self._changed.notify()

    def snapshot(self) -> EngineSnapshot:
        """Return the engine's state, at most a fraction of a second old while it runs."""
        return self._snapshot

    def call(self, function: Callable[[Engine], object], timeout: float | None = None) -> object:
        """Run a function on the engine's thread between two steps, and return its result."""
        answer: Future[object] = Future()

        def run() -> None:
            try:
                answer.set_result(function(self._engine))
            except BaseException as error:  # the caller's fault, not the engine's
                answer.set_exception(error)

        with self._changed:
            self._check_alive()
            self._inbox.append(run)
            self._changed.notify()
        return answer.result(timeout)

    def _check_alive(self) -> None:
        if self.fatal_error is not None or self._is_stopping:
            raise EngineDeadError(f"The engine is not running: {self.fatal_error or 'stopped'}")

    def _submit(self, request_id: str, submit: Callable[[], object]) -> None:
        try:
            submit()
        except Exception as error:
            self._end(request_id, "error", str(error))

    def _report(self, output: Output) -> None:
        """Pass an output on; a client's fault is not the engine's."""
        client = self._open.get(output.request_id)
        if client is None:
            return
        if output.finish_reason is not None:
            client.samples.discard(output.index)
            if not client.samples:
                with self._changed:
                    del self._open[output.request_id]
        with suppress(Exception):
            client.on_output(output)

    def _end(self, request_id: str, reason: FinishReason, error: str | None) -> None:
        """End a request that the engine does not know, or no longer runs."""
        for index in sorted(self._open[request_id].samples):
            self._report(Output(request_id, index, [], finish_reason=reason, error=error))

    def _run(self) -> None:
        reason: FinishReason = "cancelled"
        try:
            self._serve()
        except BaseException as error:
            reason, self.fatal_error = "error", f"{type(error).__name__}: {error}"
        with self._changed:
            self._is_stopping = True
            left = list(self._open)
        for request_id in left:
            self._end(request_id, reason, self.fatal_error)

    def _serve(self) -> None:
        """Run steps while there are requests, until the engine is stopped."""
        engine, num_failed = self._engine, 0
        while True:
            with self._changed:
                while not (self._inbox or self._is_stopping or not engine.is_idle):
                    self._changed.wait()
                if self._is_stopping:
                    break
                calls, self._inbox = self._inbox, deque()
            for call in calls:
                call()
            try:
                is_busy = engine.step()
                num_failed = 0 if is_busy else num_failed
            except (LostCacheError, torch.AcceleratorError):
                raise
            except Exception as error:
                num_failed += 1
                if num_failed >= MOST_FAILURES:
                    raise
                if num_failed > 1:  # it is not a passing fault: the running requests pay for it
                    for sample in list(engine.scheduler.running):
                        engine.end_request(sample.request.request_id, "error", str(error))
                is_busy = True
            if engine.is_idle or time.monotonic() - self._snapshot.time > SNAPSHOT:
                self._snapshot = self._take_snapshot()
            if not is_busy and not engine.is_idle:
                time.sleep(IDLE)
        for request_id in list(engine.requests):
            engine.cancel(request_id)

    def _take_snapshot(self) -> EngineSnapshot:
        manager, scheduler = self._engine.manager, self._engine.scheduler
        lengths = manager.lengths
        states = []
        for sample in (*scheduler.waiting, *scheduler.running):
            state, num_blocks = "waiting" if sample.swapped is None else "swapped", 0
            if sample.slot >= 0:
                state = "prefill" if lengths[sample.slot] < sample.num_tokens - 1 else "decode"
                num_blocks = len(manager.blocks_of(sample.slot))
            name, num_prompt = sample.request.request_id, len(sample.request.prompt)
            sizes = num_prompt, len(sample.ids), num_blocks
            states.append(RequestState(name, sample.index, state, *sizes))
        return EngineSnapshot(
            time.monotonic(), dict(scheduler.counts), states, manager.stats(), manager.memory(),
            manager.host_memory(),
        )  # fmt: skip
