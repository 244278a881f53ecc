"""`CapturedForward`: a step of up to `batch` requests, captured once and replayed for any plan.

Between capture and replay only the contents of the plan's buffers change. Rows and tokens that a
plan does not use are padding, which touches nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.memory.capacity import Capacity
from dsv4.cache.plan import ForwardPlan
from dsv4.checks import check_int
from dsv4.errors import LiveForwardError

NUM_WARMUP_RUNS = 3

Step = Callable[[Sequence[LayerCacheHandle]], Any]


def check_complete(manager: KVCacheManager, purpose: str) -> None:
    """Refuse a manager whose last forward is not complete: padding would overwrite its plan."""
    if manager.live_plan is not None:
        raise LiveForwardError(
            f"Cannot {purpose}: the manager's last forward is not complete; run all of its "
            "layers first, or cancel its plan"
        )


def check_current(is_current: bool) -> None:
    """Refuse a graph of a manager that has slept since: the memory it writes was given back."""
    if not is_current:
        raise RuntimeError(
            "Stale graph: its manager has slept since the capture, and its memory may be "
            "elsewhere; capture again"
        )


def fill_with_padding(manager: KVCacheManager, num_tokens: int) -> None:
    """Make padding of all rows and of the first `num_tokens` tokens, now and wherever unused."""
    manager.check_one_device("captured forward")
    manager.device_memory.plan_buffers.reserve(num_tokens)
    manager.prepare_forward([], [], []).complete()


class GraphPool:
    """Memory that graphs share, and the stream that they are captured on.

    They run one after the other: the outputs of one last until the replay of any other. Capture the
    largest first; smaller ones then find their memory.
    """

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        check_graph_device(device)
        with torch.cuda.device(device):
            self._memory = torch.cuda.MemPool()  # keeps it, whichever graphs come and go
            self.stream = torch.cuda.Stream()

    @property
    def handle(self) -> Any:
        """The pool's name at PyTorch's allocator."""
        return self._memory.id

    @property
    def num_bytes(self) -> int:
        """GPU memory of its graphs."""
        segments = self._memory.snapshot(include_traces=False)
        return sum(segment["total_size"] for segment in segments)


class CapturedForward:
    """A CUDA graph of a step: decode, the verification of drafts, or either beside chunks.

    The step reads its inputs from the caller's tensors, `num_tokens` rows each, whose addresses
    never change. Token i of a plan is row i of the inputs; the rows after the plan's last token may
    hold anything, NaN included. The step runs a few times on padding before the capture, which no
    request notices.

    Args:
        manager: The cache; one whose last forward is not complete is refused.
        step: Called with one handle per layer. It writes every layer, does not wait for the
            device, and returns tensors that each replay fills again.
        batch: The most requests of a replay.
        tokens_per_request: The most tokens of one request, unless it is a chunk. With 1, no
            chunks and `num_tokens` = batch, each row of a plan must have exactly one; else any
            number up to that.
        max_chunks: The most chunks of a replay: requests with more tokens than a step. Sizes of
            their workspaces follow from it.
        num_tokens: The most tokens of a replay, by default batch × tokens_per_request, and with
            chunks the manager's most.
        max_length: The longest request of a replay, by default the manager's longest. Sizes
            that follow from `plan.max_entries` are captured for it.
        pool: Memory that this graph shares with others.

    Attributes:
        num_tokens: Rows that the step's inputs must have.
        num_rows: Rows of the plan that the step sees. Unless each has exactly one token there is
            one more than `batch`, to which unused tokens and chunks belong.
        outputs: The result of the step.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        step: Step,
        *,
        batch: int,
        tokens_per_request: int = 1,
        max_chunks: int = 0,
        num_tokens: int | None = None,
        max_length: int | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        manager.check_one_device("captured forward")
        if not manager.can_capture:
            raise ValueError(
                "A split context has CUDA graphs over NCCL alone: this one's ranks exchange "
                "through the host"
            )
        capacity = manager.capacity
        if max_length is None:
            max_length = capacity.max_request_tokens
        self.batch = check_int(
            "batch", batch, at_least=1, at_most=capacity.max_requests, limit="max_requests"
        )
        self.tokens_per_request = check_int(
            "tokens_per_request", tokens_per_request,
            at_least=1, at_most=capacity.max_step_tokens, limit="drafts_per_step + 1",
        )  # fmt: skip
        self.max_length = check_int(
            "max_length", max_length,
            at_least=1, at_most=capacity.max_request_tokens, limit="max_request_tokens",
        )  # fmt: skip
        check_int("max_chunks", max_chunks, at_least=0, at_most=self.batch, limit="batch")
        self.num_tokens = self._choose_tokens(num_tokens, capacity, has_chunks=max_chunks > 0)
        # A chunk has more tokens than a step; the workspace has rows for no more chunks than that.
        self.max_chunks = min(max_chunks, self.num_tokens // (capacity.max_step_tokens + 1))
        self.manager, self._num_sleeps = manager, manager.num_sleeps
        is_even = self.num_tokens == self.batch and self.tokens_per_request == 1
        self._is_decode = is_even and not max_chunks
        self.num_rows = self.batch + (not self._is_decode)
        self._graph = CudaGraph(manager.device, pool)
        check_complete(manager, "capture")
        fill_with_padding(manager, self.num_tokens)
        self.outputs = self._graph.capture(partial(self._run, step))

    def _choose_tokens(self, wanted: int | None, capacity: Capacity, *, has_chunks: bool) -> int:
        """Return the most tokens of a replay."""
        limit = capacity.max_forward_tokens
        if wanted is not None or has_chunks:
            least = capacity.max_step_tokens + 1 if has_chunks else 1
            if least > limit:
                raise ValueError(
                    f"Invalid max_chunks: expected 0, since a chunk has at least {least} tokens "
                    f"and a forward at most {limit} (max_forward_tokens)"
                )
            return check_int(
                "num_tokens", limit if wanted is None else wanted,
                at_least=least, at_most=limit, limit="max_forward_tokens",
            )  # fmt: skip
        num_tokens = self.batch * self.tokens_per_request
        if num_tokens > limit:
            raise ValueError(
                "Invalid batch × tokens_per_request: expected at most "
                f"{limit} (max_forward_tokens), got {num_tokens}"
            )
        return num_tokens

    @property
    def is_current(self) -> bool:
        """Whether its manager has not slept since the capture."""
        return self.manager.num_sleeps == self._num_sleeps

    def fits(self, plan: ForwardPlan) -> bool:
        """Tell whether the sizes of a plan are as captured."""
        return self._find_misfit(plan) is None

    def replay(self, plan: ForwardPlan) -> Any:
        """Run the captured step for a plan, and complete it. Returns the step's outputs.

        A plan that does not fit is refused with nothing changed; its layers can still be run
        one by one.
        """
        self.manager.check_plan(plan)
        check_current(self.is_current)
        if plan.has_started:
            raise RuntimeError("Invalid plan: expected one not yet written, got one begun or run")
        if (misfit := self._find_misfit(plan)) is not None:
            raise ValueError(f"Invalid plan: expected {misfit}")
        plan.begin()
        try:
            self._graph.replay()
        except BaseException:
            plan.cancel()
            raise
        if self._has_handles:
            plan.note_written()
        else:
            plan.complete()
        return self.outputs

    def _run(self, step: Step) -> Any:
        """Run the step over the buffers as they are, through a plan that only it sees."""
        most = self.num_tokens if self.max_chunks else self.tokens_per_request
        if not self._is_decode:  # a row may have no token: token i need not be of row i
            most = max(most, 2)
        plan = self.manager.padding_plan(
            self.num_rows, self.num_tokens, self.max_chunks, most, max_length=self.max_length
        )
        try:
            outputs = step(
                [self.manager.acquire(idx, plan) for idx in range(len(self.manager.schedule))]
            )
            if not plan.is_complete:
                raise RuntimeError(
                    "Invalid step: expected one that writes every layer's window and entries"
                )
            self._has_handles = plan.is_written  # which checkpoint
        finally:
            plan.is_retired = True
        return outputs

    def _find_misfit(self, plan: ForwardPlan) -> str | None:
        """Return what of a plan was not captured: as expected, and as it is."""
        num_chunks, max_step = len(plan.tokens.chunk_ids), plan.tokens.max_step
        if num_chunks and not self.max_chunks:
            return (
                f"at most {self.tokens_per_request} tokens in a row, as "
                f"captured, got a chunk of {max_step}, which needs the workspace"
            )
        for name, value, limit in (
            ("rows", plan.num_requests, self.batch),
            ("chunks", num_chunks, self.max_chunks),
            ("tokens in a row", 0 if self.max_chunks else max_step, self.tokens_per_request),
            ("tokens", plan.num_tokens, self.num_tokens),
            ("tokens in a request", plan.longest, self.max_length),
        ):
            if value > limit:
                return f"at most {limit} {name}, as captured, got {value}"
        if self._is_decode and plan.num_tokens != plan.num_requests:
            return (
                "one token in each row, as captured, "
                f"got {plan.num_tokens} in {plan.num_requests} rows"
            )
        return None


class CudaGraph:
    """A recorded run that can be repeated; with a pool it shares its memory."""

    def __init__(self, device: torch.device, pool: GraphPool | None = None) -> None:
        check_graph_device(device)
        self._device, self._pool = device, pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], Any]) -> Any:
        """Warm up, record one call of `run`, and return its result."""
        pool = self._pool
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            side = torch.cuda.Stream() if pool is None else pool.stream
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(NUM_WARMUP_RUNS):
                    run()
            current.wait_stream(side)
            handle = None if pool is None else pool.handle
            with torch.cuda.graph(self._graph, pool=handle, stream=side):
                return run()

    def replay(self) -> None:
        """Repeat the recorded run on the current stream."""
        self._graph.replay()


def check_graph_device(device: torch.device) -> None:
    """Refuse a device that has no graphs."""
    if device.type != "cuda":
        raise ValueError(f"Invalid device of a captured forward: expected cuda, got {device}")
