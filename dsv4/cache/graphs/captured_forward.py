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


def fill_with_padding(manager: KVCacheManager, num_tokens: int) -> None:
    """Make padding of all rows and of the first `num_tokens` tokens, now and wherever unused."""
    manager.device_memory.plan_buffers.reserve(num_tokens)
    manager.prepare_forward([], [], []).complete()


class CapturedForward:
    """A CUDA graph of a step: decode, or the verification of drafts.

    The step reads its inputs from the caller's tensors, `num_tokens` rows each, whose addresses
    never change. Token i of a plan is row i of the inputs; the rows after the plan's last token may
    hold anything, NaN included. The step runs a few times on padding before the capture, which no
    request notices.

    Args:
        manager: The cache; one whose last forward is not complete is refused.
        step: Called with one handle per layer. It writes every layer, does not wait for the
            device, and returns tensors that each replay fills again.
        batch: The most requests of a replay.
        tokens_per_request: The most tokens of one request. With 1, each row of a plan must
            have exactly one; with more, any number up to that.
        max_length: The longest request of a replay, by default the manager's longest. Sizes
            that follow from `plan.max_entries` are captured for it.

    Attributes:
        num_tokens: Rows that the step's inputs must have: batch × tokens_per_request.
        num_rows: Rows of the plan that the step sees. With several tokens per request there is
            one more than `batch`, to which unused tokens belong.
        outputs: The result of the step.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        step: Step,
        *,
        batch: int,
        tokens_per_request: int = 1,
        max_length: int | None = None,
    ) -> None:
        capacity = manager.capacity
        if max_length is None:
            max_length = capacity.max_request_tokens
        batch = check_int(
            "batch", batch, at_least=1, at_most=capacity.max_requests, limit="max_requests"
        )
        tokens_per_request = check_int(
            "tokens_per_request", tokens_per_request,
            at_least=1, at_most=capacity.max_step_tokens, limit="drafts_per_step + 1",
        )  # fmt: skip
        max_length = check_int(
            "max_length", max_length,
            at_least=1, at_most=capacity.max_request_tokens, limit="max_request_tokens",
        )  # fmt: skip
        self.num_tokens = batch * tokens_per_request
        if self.num_tokens > capacity.max_forward_tokens:
            raise ValueError(
                "Invalid batch × tokens_per_request: expected at most "
                f"{capacity.max_forward_tokens} (max_forward_tokens), got {self.num_tokens}"
            )
        self.manager = manager
        self.batch = batch
        self.tokens_per_request = tokens_per_request
        self.max_length = max_length
        self.num_rows = batch if tokens_per_request == 1 else batch + 1
        self._graph = new_graph(manager.device)
        check_complete(manager, "capture")
        fill_with_padding(manager, self.num_tokens)
        self.outputs = self._graph.capture(partial(self._run, step))

    def fits(self, plan: ForwardPlan) -> bool:
        """Tell whether the sizes of a plan are as captured."""
        is_decode = self.tokens_per_request > 1 or plan.num_tokens == plan.num_requests
        sizes = self._sizes(plan)
        return is_decode and not plan.has_workspace and all(v <= limit for _, v, limit in sizes)

    def replay(self, plan: ForwardPlan) -> Any:
        """Run the captured step for a plan, and complete it. Returns the step's outputs.

        A plan that does not fit is refused with nothing changed; its layers can still be run
        one by one.
        """
        self._check_plan(plan)
        plan.begin()
        try:
            self._graph.replay()
        except BaseException:
            plan.cancel()
            raise
        plan.complete()
        return self.outputs

    def _run(self, step: Step) -> Any:
        """Run the step over the buffers as they are, through a plan that only it sees."""
        plan = self.manager.padding_plan(self.num_rows, self.num_tokens, 0, self.tokens_per_request,
            max_length=self.max_length,
        )  # fmt: skip
        try:
            outputs = step(
                [self.manager.acquire(idx, plan) for idx in range(len(self.manager.schedule))]
            )
            if not plan.is_complete:
                raise RuntimeError(
                    "Invalid step: expected one that writes every layer's window and entries"
                )
        finally:
            plan.is_retired = True
        return outputs

    def _check_plan(self, plan: ForwardPlan) -> None:
        self.manager.check_plan(plan)
        if plan.has_started:
            raise RuntimeError("Invalid plan: expected one not yet written, got one begun or run")
        if plan.has_workspace:
            raise ValueError(
                f"Invalid plan: expected at most {self.tokens_per_request} tokens in a row, as "
                f"captured, got a chunk of {plan.tokens.max_step}, which needs the workspace"
            )
        for name, value, limit in self._sizes(plan):
            if value > limit:
                raise ValueError(
                    f"Invalid plan: expected at most {limit} {name}, as captured, got {value}"
                )
        if self.tokens_per_request == 1 and plan.num_tokens != plan.num_requests:
            raise ValueError(
                "Invalid plan: expected one token in each row, as captured, "
                f"got {plan.num_tokens} in {plan.num_requests} rows"
            )

    def _sizes(self, plan: ForwardPlan) -> list[tuple[str, int, int]]:
        """List name, value and limit of a plan's sizes."""
        return [
            ("rows", plan.num_requests, self.batch),
            ("tokens in a row", plan.tokens.max_step, self.tokens_per_request),
            ("tokens", plan.num_tokens, self.num_tokens),
            ("tokens in a request", plan.longest, self.max_length),
        ]


class CudaGraph:
    """A recorded run that can be repeated; with a pool and a stream it shares its memory."""

    def __init__(
        self, device: torch.device, *, pool: Any = None, stream: torch.cuda.Stream | None = None
    ) -> None:
        self._device = device
        self._pool = pool
        self._stream = stream
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], Any]) -> Any:
        """Warm up, record one call of `run`, and return its result."""
        with torch.cuda.device(self._device):
            current, side = torch.cuda.current_stream(), self._stream or torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(NUM_WARMUP_RUNS):
                    run()
            current.wait_stream(side)
            with torch.cuda.graph(self._graph, pool=self._pool, stream=side):
                return run()

    def replay(self) -> None:
        """Repeat the recorded run on the current stream."""
        self._graph.replay()


def new_graph(device: torch.device) -> CudaGraph:
    """Return an empty graph for that device."""
    check_graph_device(device)
    return CudaGraph(device)


def new_graphs(device: torch.device, count: int) -> list[CudaGraph]:
    """Return graphs that share their memory; they must be replayed in the order of capture."""
    check_graph_device(device)
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    return [CudaGraph(device, pool=pool, stream=stream) for _ in range(count)]


def check_graph_device(device: torch.device) -> None:
    """Refuse a device that has no graphs."""
    if device.type != "cuda":
        raise ValueError(f"Invalid device of a captured forward: expected cuda, got {device}")
