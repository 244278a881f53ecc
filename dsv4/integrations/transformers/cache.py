"""`PagedCache`: this cache as the `past_key_values` of a transformers model.

It translates padded batches to ragged forwards of a `KVCacheManager`, beam indices to forks, and
`crop` to rollbacks.
"""

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.memory.capacity import ComponentBytes, blocks_for
from dsv4.cache.plan import ForwardPlan
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.errors import OutOfBlocksError
from dsv4.integrations.transformers.attached_cache import AttachedCache
from dsv4.integrations.transformers.captured_attention import CapturedAttention
from dsv4.integrations.transformers.captured_step import CapturedStep, find_step
from dsv4.integrations.transformers.columns import BoolArray, Columns, IntArray
from dsv4.integrations.transformers.device_map import loaded_weights
from dsv4.integrations.transformers.padding import (
    check_last_column,
    check_positions,
    read_mask,
    token_index,
)
from dsv4.model.attention import attend


@dataclass(frozen=True)
class PaddedForward:
    """One forward of the model: its plan, and the places of its tokens in the batch.

    Attributes:
        shape: Rows and columns of the padded batch.
        token_index: `[num_tokens]` by device, flat indices of the tokens among rows × columns;
            None if there is no padding.
        captured: Graphs of the modules; None if they run launch by launch.
    """

    plan: ForwardPlan
    shape: tuple[int, int]
    token_index: dict[torch.device, Tensor] | None
    captured: CapturedAttention | None = None


CudaGraphs = bool | Literal["step"]


class NoGradient(torch.autograd.Function):
    """Pass values on; a backward pass raises and says why."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "No gradients through a PagedCache: it stores rows without their history; "
            "train without past_key_values"
        )


class PagedCache(AttachedCache):
    """The cache that `attach` makes; pass it to the model as `past_key_values`.

    A row of the batch is a request of `manager`. `reset`, `close`, the end of a `with`, or garbage
    collection frees its blocks. The cache refers to its model weakly.

    Attributes:
        drafts_per_step: The most tokens that `crop` can remove.
    """

    def __init__(
        self, model: Any, manager: KVCacheManager, *, cuda_graphs: CudaGraphs = False
    ) -> None:
        super().__init__(layers=[])
        self._owner = weakref.ref(model)
        self._manager: KVCacheManager | None = manager
        self._slots: list[int] = []
        self._columns = Columns(0)
        self._forward: PaddedForward | None = None
        self._is_generating = False
        self._cuda_graphs = cuda_graphs
        self._captured: dict[int, CapturedAttention] = {}  # by batch
        self._steps: dict[tuple[int, str], CapturedStep] = {}  # by batch and experts
        self._hidden_like: Tensor | None = None  # width and dtype of hidden states
        self.drafts_per_step = manager.config.drafts_per_step

    @property
    def manager(self) -> KVCacheManager:
        """The manager of this cache's requests, blocks and pools."""
        if self._manager is None:
            raise RuntimeError("This cache is closed; attach the model again for a new one")
        return self._manager

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, without padding."""
        lengths: list[int] = self.manager.lengths[self._slots].tolist()
        return lengths

    def memory(self) -> dict[str, ComponentBytes]:
        """Return the bytes by component, see `KVCacheManager.memory`."""
        return self.manager.memory()

    def read_inputs(
        self, batch: int, num_columns: int, mask: Tensor | None, position_ids: Tensor | None
    ) -> BoolArray | None:
        """Check the inputs of a forward before it changes anything; return what `read_mask` does.

        Positions of several columns are checked, but not used: the cache counts them itself.
        """
        self._check_batch(batch)
        is_token = read_mask(mask, self._columns, batch=batch, num_columns=num_columns)
        lengths = self._lengths(batch)
        if self._is_generating:
            check_last_column(is_token, lengths)
        if num_columns > 1:
            check_positions(position_ids, is_token, lengths, num_columns=num_columns)
        return is_token

    def split_columns(
        self, batch: int, num_columns: int, is_token: BoolArray | None
    ) -> list[tuple[int, int]]:
        """Split columns into spans, each small enough for one forward of the manager.

        Several spans must all fit, so that no forward starts that cannot be finished.
        """
        limit = self.manager.capacity.max_forward_tokens // max(batch, 1)
        starts = range(0, num_columns, limit)
        spans = [(start, min(start + limit, num_columns)) for start in starts]
        if len(spans) > 1:
            self._check_end(self._lengths(batch) + _counts(is_token, num_columns))
        return spans

    def check_generation(
        self, batch: int, num_columns: int, mask: Tensor | None, *, drafts: int
    ) -> None:
        """Refuse a `generate` with more rows, columns or drafts than there is room for."""
        self._check_batch(batch)
        if drafts > self.drafts_per_step + 1:
            raise ValueError(
                f"Invalid prompt_lookup_num_tokens: expected at most {self.drafts_per_step + 1}, "
                f"got {drafts}; attach with a larger drafts_per_step (now {self.drafts_per_step})"
            )
        padding = 0 if mask is None else int((mask == 0).sum(dim=1).min())
        self._check_length(num_columns - padding, " at the end of generate, drafts included")

    def _check_length(self, length: int, when: str = "") -> None:
        limit = self.manager.capacity.max_request_tokens
        if length > limit:
            raise ValueError(
                f"Too many tokens in one request: expected at most {limit}, got {length}{when}; "
                "attach with larger max_tokens (or num_blocks)"
            )

    def _check_end(self, lengths: IntArray) -> None:
        """Refuse rows that would be too long, or need more blocks than are free."""
        manager = self.manager
        self._check_length(int(lengths.max()))
        if self._slots:
            needed = manager.blocks_needed(self._slots, lengths)
        else:
            needed = int(blocks_for(manager.config, lengths).sum())
        self._check_blocks(needed)

    @contextmanager
    def forward(
        self, batch: int, num_columns: int, is_token: BoolArray | None
    ) -> Iterator[ForwardPlan]:
        """Enclose one forward of the model, of columns as `read_inputs` returns them.

        Yields:
            The forward's plan.
        """
        self._forward = self._start(batch, num_columns, is_token)
        plan = self._forward.plan
        try:
            yield plan
        finally:
            self._forward = None
            if plan.is_cancelled or plan.is_live:
                plan.cancel()
                self._columns.drop(num_columns)

    @contextmanager
    def running(self, plan: ForwardPlan) -> Iterator[None]:
        """Enclose one forward of the model over a plan's tokens, as a batch of one row."""
        self._forward = PaddedForward(plan, (1, plan.num_tokens), None)
        try:
            yield
        finally:
            self._forward = None

    def replay(self, ids: Tensor) -> Tensor | None:
        """Run a decode step of `ids` `[batch, 1]` by its graph, with `cuda_graphs="step"`.

        Returns:
            The last hidden states, `[batch, 1, hidden_size]`; None if there is no graph.
        """
        batch = len(ids)
        step = self._capture_step(batch) if self._cuda_graphs == "step" else None
        if step is None:
            return None
        with self.forward(batch, 1, None) as plan:
            step.ids[:batch].copy_(ids[:, 0])
            hidden: Tensor = step.run(plan)[:batch, None]
        return hidden.clone()

    def _capture_step(self, batch: int) -> CapturedStep | None:
        """Return the graph of a decode step; None if another forward is live, or it is too long."""
        manager, model = self.manager, self._owner()
        longest = int(self._lengths(batch).max()) + 1
        if model is None or longest > manager.capacity.max_request_tokens:
            return None
        key = (batch, model.config._experts_implementation)  # generate changes it for decoding
        return find_step(self._steps, key, model, self, longest=longest, batch=batch)

    def attend(self, layer_idx: int, module: Any, hidden: Tensor) -> Tensor:
        """Run one attention module on `hidden` `[batch, num_columns, hidden_size]`.

        Outputs of padding are 0.
        """
        forward = self._forward
        if forward is None or tuple(hidden.shape[:2]) != forward.shape:
            raise RuntimeError(
                "Invalid use of a PagedCache: expected an attention module called by its model, "
                f"got hidden states of shape {list(hidden.shape)} outside of such a forward"
            )
        if not forward.plan.num_tokens:
            return torch.zeros_like(hidden)
        with torch.no_grad():
            tokens = hidden.flatten(0, 1)
            if forward.captured is None:
                output = self._attend(layer_idx, module, tokens, forward)
            else:
                output = forward.captured.attend(layer_idx, tokens, forward.plan)
            output = output.view(hidden.shape)
        if torch.is_grad_enabled() and hidden.requires_grad:
            output = NoGradient.apply(output, hidden)  # type: ignore[no-untyped-call]
        return output

    def _attend(
        self, layer_idx: int, module: Any, tokens: Tensor, forward: PaddedForward
    ) -> Tensor:
        """Run one module launch by launch, on rows and columns in one axis."""
        num_padded, index = len(tokens), None
        if forward.token_index is not None:
            index = forward.token_index[tokens.device]
        if self._hidden_like is None:
            self._hidden_like = torch.empty_like(tokens[:0])
        if index is not None:
            tokens = tokens[index]
        handle = self.manager.acquire(layer_idx, forward.plan)
        output = attend(module, tokens, handle, loaded_weights(module))
        if index is None:
            return output
        return output.new_zeros(num_padded, output.shape[1]).index_copy_(0, index, output)

    def check_owner(self, model: Any) -> None:
        """Refuse a model that this cache was not made for."""
        if self._owner() is not model:
            raise ValueError(
                "Invalid past_key_values: expected a cache attached to this model, "
                "got one of another model"
            )

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Mark forwards as `generate`'s, which reads the logits of the last column."""
        self._is_generating = True
        try:
            yield
        finally:
            self._is_generating = False

    def _lengths(self, batch: int) -> IntArray:
        """Return the tokens of each row, `[batch]`; 0 before the first forward."""
        if not self._slots:
            return np.zeros(batch, dtype=np.int64)
        return self.manager.lengths[self._slots]

    def _start(self, batch: int, num_columns: int, is_token: BoolArray | None) -> PaddedForward:
        """Plan the forward; a refusal changes nothing."""
        manager, is_new, before = self.manager, not self._slots, self._lengths(batch)
        after = before + _counts(is_token, num_columns)
        self._check_length(int(after.max(initial=0)))
        captured = None
        if self._cuda_graphs is True and num_columns == 1 and is_token is None:
            captured = self._capture(batch, int(after.max()))
        slots = manager.open_requests(batch) if is_new else self._slots
        try:
            plan = prepare_forward(manager, slots, before, after)
        except BaseException:
            if is_new:
                manager.free_requests(slots)
            raise
        if is_new:
            self._slots, self._columns = slots, Columns(batch)
        self._columns.append(num_columns, is_token)
        index = token_index(is_token, manager.devices)
        return PaddedForward(plan, (batch, num_columns), index, captured)

    def _capture(self, batch: int, longest: int) -> CapturedAttention | None:
        """Return the graphs of a decode step; None before the first forward, or if one is live.

        Each batch size keeps the graphs of its longest text, until a weight moves or the
        manager sleeps.
        """
        captured = self._captured.get(batch)
        if captured is not None and not captured.is_current():
            self._captured, self._hidden_like, captured = {}, None, None
        manager, model, hidden = self.manager, self._owner(), self._hidden_like
        if captured is not None and captured.fits(batch, longest):
            return captured
        too_long = longest > manager.capacity.max_request_tokens
        if model is None or hidden is None or too_long or manager.live_plan is not None:
            return None
        modules = [layer.self_attn for layer in model.layers]
        with torch.inference_mode(False), torch.no_grad():
            self._captured[batch] = CapturedAttention(
                manager, modules, batch=batch, hidden=hidden, longest=longest
            )
        return self._captured[batch]

    def _check_batch(self, batch: int) -> None:
        if self._slots and batch != len(self._slots):
            raise ValueError(
                f"Invalid batch: expected {len(self._slots)} rows, as the cache holds, "
                f"got {batch}; call reset() before another batch"
            )
        self._check_room(batch)

    def _check_room(self, batch: int) -> None:
        limit = self.manager.capacity.max_requests
        if batch > limit:
            raise ValueError(
                f"Too many rows: expected at most {limit} (max_requests), got {batch}; beams and "
                "num_return_sequences count as rows"
            )

    def _check_blocks(self, needed: int, num_freed: int = 0) -> None:
        stats = self.manager.stats()
        num_free, evictable = stats.num_free_blocks + num_freed, stats.num_evictable_blocks
        if needed > num_free + evictable:
            raise OutOfBlocksError(
                needed, num_free, evictable or None,
                total=self.manager.capacity.num_blocks,
            )  # fmt: skip

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns, padding included, as transformers counts."""
        return self._columns.count

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the most tokens of a row."""
        return self.manager.capacity.max_request_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return length and offset of a mask over all columns; this cache needs no mask."""
        return self._columns.count + query_length, 0

    def reset(self) -> None:
        """Free all rows and their blocks; the cache can be used again."""
        manager, slots = self.manager, self._slots
        self._slots, self._columns, self._forward = [], Columns(0), None
        manager.free_requests(slots)  # the next batch gets them in the same order

    def close(self) -> None:
        """Free the memory; the cache cannot be used again."""
        manager = self._manager
        if manager is not None:
            self.reset()
            self._manager, self._captured, self._steps = None, {}, {}
            manager.close()

    def __del__(self) -> None:
        if getattr(self, "_manager", None) is not None and not sys.is_finalizing():
            self.close()

    def __enter__(self) -> "PagedCache":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns: `crop(-n)` removes n of them, `crop(0)` none.

        Raises:
            ValueError: A row would be cut, but not to nothing, by more than `drafts_per_step + 1`
                tokens below its greatest length. Nothing was changed.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                "Invalid crop: expected 0 or less, crop(-n) removes n tokens, "
                f"got {tokens_to_remove}: a length in old versions of transformers, an error in new"
            )
        num_columns = -int(tokens_to_remove)
        if num_columns > self._columns.count:
            raise ValueError(
                f"Invalid crop: expected at most {self._columns.count} columns to remove, "
                f"got {num_columns}"
            )
        if not num_columns or not self._slots:
            return
        manager, stop = self.manager, self._columns.count
        kept = manager.lengths[self._slots]
        kept -= self._columns.read(stop - num_columns, stop).sum(axis=1)
        self._check_floors(kept, num_columns)
        manager.truncate(self._slots, kept)
        self._columns.drop(num_columns)

    def _check_floors(self, kept: IntArray, num_columns: int) -> None:
        floors = self.manager.rollback_floor[self._slots]
        is_gone = (kept > 0) & (kept < floors)
        if is_gone.any():
            row = int(is_gone.argmax())
            raise ValueError(
                f"Cannot remove {num_columns} columns: row {row} can be cut to {floors[row]} "
                f"tokens or to none, got {kept[row]}; attach with a larger drafts_per_step "
                f"(now {self.drafts_per_step})"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue row i from row `beam_idx[i]`; unused rows are freed for the copies."""
        self._select_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, one after the other."""
        self._select_rows([row for row in range(len(self._slots)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of the batch that indices, or a mask, select."""
        if indices.dtype == torch.bool:
            if indices.shape != (len(self._slots),):
                raise ValueError(
                    f"Invalid mask: expected [{len(self._slots)}], got {list(indices.shape)}"
                )
            indices = indices.nonzero()[:, 0]
        self._select_rows(indices.tolist())

    def _select_rows(self, rows: list[int]) -> None:
        batch, manager = len(self._slots), self.manager
        if any(type(row) is not int or not -batch <= row < batch for row in rows):
            raise ValueError(f"Invalid rows: expected 0 to {batch - 1}, got {rows}")
        rows = [row + batch if row < 0 else row for row in rows]
        if rows == list(range(batch)):
            return
        self._check_room(len(rows))
        copied = [self._slots[row] for number, row in enumerate(rows) if row in rows[:number]]
        dropped = [slot for row, slot in enumerate(self._slots) if row not in set(rows)]
        # Refuse forks without enough blocks before any row is dropped.
        self._check_blocks(manager.blocks_to_fork(copied), manager.blocks_freed(dropped))
        manager.free_requests(dropped)
        slots: list[int] = []
        for row in rows:
            slot = self._slots[row]
            slots.append(manager.fork(slot) if slot in slots else slot)
        self._slots = slots
        self._columns.select(rows)

    @property
    def batch_size(self) -> int:
        """Number of rows, or -1 before the first forward."""
        return len(self._slots) or -1

    def __len__(self) -> int:
        return 0 if self._manager is None else len(self._manager.schedule)

    def __repr__(self) -> str:
        state = "closed" if self._manager is None else f"tokens={self.lengths}"
        return f"{type(self).__name__}({state})"


def _counts(is_token: BoolArray | None, num_columns: int) -> IntArray | int:
    """Return the number of new tokens of each row."""
    return num_columns if is_token is None else is_token.sum(axis=1)
