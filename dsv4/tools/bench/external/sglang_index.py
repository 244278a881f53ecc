"""SGLang's top-k and index query, on the scores and queries of `dsv4 bench index`.

SGLang's top-k returns rows, as ours does, in another order. The scales of its queries are not
powers of two, so the checks compare decoded values, not codes.
"""

import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.kernels.layer_memory import existing
from dsv4.kernels.reference.addressing import entry_rows
from dsv4.kernels.reference.indexer import index_query, select_topk
from dsv4.rope import build_rope_table
from dsv4.tools.bench.external.sglang import SGLangKernels

ROUNDED_TWICE = 2.0**-3  # of a row's norm: both results are rounded to E4M3, by 2^-4 each


class SGLangTopk:
    """SGLang's top-k of scores, ready to be repeated.

    A line of scores is a request's only token, with num_entries entries. With lengths, the lines
    are tokens of the only request, with so many entries each.
    """

    def __init__(
        self, kernels: SGLangKernels, handle: LayerCacheHandle, scores: Tensor, *,
        num_entries: int, lengths: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._kernels, self._handle = kernels, handle
        self._slots, device = handle.tokens.request_slots.long(), scores.device
        if lengths is None:
            lengths = torch.full(self._slots.shape, num_entries, device=device)
        self._slots, self._lengths = self._slots.expand(len(lengths)), lengths.int()
        self._scores = scores[: len(lengths), :num_entries]
        shape = (len(lengths), handle.config.index_topk)
        self._table = handle.tokens.block_table[self._slots].contiguous()
        self._page_rows = handle.memory.layout.entries_per_block
        self._plan = kernels.plan_topk(self._lengths)
        self.rows = torch.empty(shape, dtype=torch.int32, device=device)

    def run(self) -> None:
        """Write the rows of the best entries."""
        self._kernels.choose_entries(
            self._scores, self._lengths, self._table, self.rows, self._page_rows, self._plan
        )

    def check(self) -> None:
        """Refuse entries whose set of scores differs from that of the reference's."""
        self.rows.fill_(-1)
        self.run()
        best = select_topk(self._scores, self._lengths.long(), self.rows.shape[1])
        want = self._scores.gather(1, best).sort(dim=1).values
        rows = self.rows.long().sort(dim=1).values
        got = self._scores_by_row().gather(1, rows.clamp(min=0)).sort(dim=1).values
        is_distinct = (rows[:, :1] >= 0).all() and (rows.diff(dim=1) > 0).all()
        if not (is_distinct and torch.equal(got, want)):
            raise RuntimeError("SGLang's top-k differs from the reference's; nothing is timed")

    def _scores_by_row(self) -> Tensor:
        """Order the scores by row, `[batch, rows]`; NaN where a row belongs to another request."""
        entries = torch.arange(self._scores.shape[1], device=self._scores.device)
        rows = entry_rows(
            self._handle.tokens.block_table, self._slots[:, None], entries, self._page_rows
        )
        num_rows = int(rows.max()) + 1
        by_row = self._scores.new_full((len(rows), num_rows), torch.nan)
        return by_row.scatter_(1, rows, self._scores)


class SGLangQuery:
    """SGLang's FP8 index queries of a step, ready to be repeated."""

    def __init__(
        self, kernels: SGLangKernels, handle: LayerCacheHandle, query: Tensor, head_weights: Tensor
    ) -> None:
        self._kernels, self._handle = kernels, handle
        self._query, self._head_weights = query, head_weights
        self._factor = query.shape[2] ** -0.5 * query.shape[1] ** -0.5
        self._frequencies = complex_frequencies(handle)

    def run(self) -> tuple[Tensor, Tensor]:
        """Return codes `[batch, heads, dim]`, and head weights that include every scale."""
        return self._kernels.make_query(
            self._query, self._head_weights, self._factor, self._frequencies,
            self._handle.positions,
        )  # fmt: skip

    def check(self) -> None:
        """Refuse queries that differ from the reference's by more than two roundings."""
        keys = existing(self._handle.memory.index_keys)
        codes, weights = self.run()
        ready = index_query(
            self._query, keys.format, self._handle.rope,
            has_hadamard=self._handle.config.index_hadamard, global_scale=None,
        )  # fmt: skip
        want = ready * (self._head_weights.float() * self._factor)[:, :, None]
        if not are_rows_close(codes.float() * weights, want, bound=ROUNDED_TWICE):
            raise RuntimeError("SGLang's queries differ from the reference's; nothing is timed")


def complex_frequencies(handle: LayerCacheHandle) -> Tensor:
    """Make the RoPE table of a layer, `[positions, rope_dim / 2]` complex64."""
    rope = build_rope_table(
        handle.config, handle.layer.rope_base, num_positions=handle.plan.longest,
        device=handle.positions.device,
    )  # fmt: skip
    return torch.complex(rope.cos, rope.sin)


def are_rows_close(got: Tensor, want: Tensor, *, bound: float) -> bool:
    """Return whether the error of each row is at most `bound` of the row's norm."""
    error = (got - want).norm(dim=-1)
    return bool((error <= bound * want.norm(dim=-1)).all())
