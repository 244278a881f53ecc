"""`SplitContext`: every request's blocks over the ranks of a process group, in turn.

All ranks make the same calls of their managers, so their books are the same. A block of the books
is one block of each rank, under one id. Window and tails are on every rank. A rank scores its own
keys, and attends its own share of the entries. The ranks exchange candidates and partial results.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.memory.arrays import IntArray
from dsv4.cache.memory.capacity import Capacity
from dsv4.cache.memory.device_memory import DeviceMemory
from dsv4.cache.plan import ForwardPlan
from dsv4.cache.prefix.store import PrefixStore
from dsv4.config import CacheConfig
from dsv4.errors import RankLostError
from dsv4.kernels import ops
from dsv4.kernels.backends import BACKENDS, load_backend
from dsv4.kernels.contracts import AttentionResult, Selection, TokenMap
from dsv4.kernels.layer_memory import LayerMemory, existing
from dsv4.kernels.reference import addressing

NO_ENTRY = torch.iinfo(torch.int32).max  # behind all entries
JOINED_AT_ONCE = 1024  # tokens
LISTED_AT_ONCE = 1 << 22  # rows, to bound the temporaries
NO_KEY = torch.iinfo(torch.int64).min  # behind all candidates


def rank_config(
    config: CacheConfig,
    group: Any,
    *,
    backends: tuple[str | None, ...] = (),
    store: PrefixStore | None = None,
) -> CacheConfig:
    """Return the config of this rank; refuse what a split context does not have."""
    if not hasattr(group, "allgather"):
        raise ValueError("Invalid process_group: expected one that this process is a rank of")
    external = [name for name in backends if name not in (None, *BACKENDS)]
    for has_it, what in (
        (bool(external), f"the backend {external[0]!r}" if external else ""),
        (store is not None, "a store: the ranks would find records at different times"),
    ):
        if has_it:
            raise ValueError(f"A split context does not support {what}")
    return config.split_context(group.rank(), group.size())


class SplitContext:
    """One rank's part of select and attend, joined with those of the other ranks.

    The group's own timeout is the deadline of each exchange.

    Args:
        capacity: Sizes of the manager, the same on all ranks.
        memory: The manager's tensors.
        group: The ranks.
        choices: What else the books depend on, the same on all ranks.

    Attributes:
        can_capture: CUDA graphs can hold the exchanges: they do not go through the host.
    """

    def __init__(
        self, capacity: Capacity, memory: DeviceMemory, group: Any, *choices: object
    ) -> None:
        block_table = memory.block_table
        self._capacity, self._config = capacity, capacity.config
        self._memory, self._group = memory, group
        find = getattr(group, "_get_backend", lambda device: group)  # a group has some by device
        self._is_staged = block_table.is_cuda and find(block_table.device).name() == "gloo"
        self.can_capture = block_table.is_cuda and not self._is_staged
        self._is_lost = False
        self._place = [0, 0, 0]  # forwards, the last one's digest and exchanges
        # The current plan's tokens: as they see the rank's own entries, by ratio; as they attend.
        self._own_tokens: dict[int, TokenMap] = {}
        self.attending: TokenMap | None = None
        self._has_rows = False
        sizes = repr((replace(capacity, config=capacity.config.whole), *choices))
        digest = torch.frombuffer(
            bytearray(hashlib.sha256(sizes.encode()).digest()), dtype=torch.uint8
        )
        if not (self._gather(digest.to(block_table.device)) == digest.to(block_table.device)).all():
            raise ValueError(
                "Invalid process_group: expected the same config, sizes and choices on all ranks"
            )

    def start(self, plan: ForwardPlan, block_table: IntArray) -> None:
        """Find the rank's own entries that each token of a forward sees.

        Args:
            block_table: `[max_requests, max_blocks]`, the host's.
        """
        tokens = plan.tokens._replace(block_table=self._memory.block_table)
        self._own_tokens = {
            ratio: own_tokens(tokens, self._config, ratio)
            for ratio in {layer.ratio for layer in self._config.schedule if layer.ratio}
        }
        if self._config.rank > 0:  # a token before the first sees no window
            nowhere = torch.full_like(tokens.positions, -1)
            tokens = tokens._replace(positions=nowhere, chunk_ids=tokens.chunk_ids[:0])
        self.attending = tokens
        self._has_rows = False
        digest = 0 if self.can_capture else _digest(plan, block_table, self._config)
        self._place = [self._place[0] + 1, digest, 0]

    def select_entries(
        self, query: Tensor, head_weights: Tensor, memory: LayerMemory, plan: ForwardPlan,
        candidates: Tensor | None, *, backend: str,
    ) -> Selection:  # fmt: skip
        """Select the entries that one rank would; rows of other ranks' entries are -1.

        candidates are blocks as one rank has them. A source of them publishes the same on all.
        """
        layout, tokens = memory.layout, plan.tokens
        ratio, topk, size = layout.ratio, layout.index_topk, layout.entries_per_block
        most_blocks, per_block = layout.candidate_blocks, layout.candidate_size
        max_entries, most = plan.max_entries(ratio), self._most_entries(plan, ratio)
        if max_entries <= topk:  # all of them
            return ops.select_entries(
                query, head_weights, memory, tokens, max_entries=max_entries, backend=backend
            )
        with torch.no_grad():
            counts = addressing.visible_entries(tokens.positions.long(), ratio)
            num_blocks = -(-counts // per_block)
            listed, num_listed = None, counts
            if candidates is not None:
                listed = self._own_blocks(candidates, size // per_block)
                num_listed = counts - (num_blocks - candidates.shape[1]).clamp(min=0) * per_block
            scores = query.new_empty(len(query), topk, dtype=torch.float32)
            largest = query.new_empty(len(query), most_blocks, dtype=torch.float32)
            chosen = load_backend(backend).select_entries(
                query, head_weights, memory, self._own_tokens[ratio], max_entries=most,
                candidates=listed, chosen_scores=scores,
                block_scores=largest if most_blocks else None,
            )  # fmt: skip
            mine = [_pairs(self._number(chosen.entry_idx, size), scores)[:, :most]]
            best, blocks = counts.new_empty(len(query), topk), chosen.blocks
            if most_blocks:
                numbers = self._number(chosen.blocks, size // per_block)
                largest = torch.where(numbers == num_blocks[:, None] - 1, torch.inf, largest)
                mine.append(_pairs(numbers, largest)[:, : -(-most // per_block)])
                blocks = torch.empty_like(chosen.blocks)
            widths = [each.shape[1] for each in mine]
            for part in _joined_tokens(len(query)):
                of_all = self._gather(torch.cat([each[part] for each in mine], 1)).split(widths, 2)
                best[part] = _merge(of_all[0], num_listed[part], topk)
                if most_blocks:  # the newest is infinite
                    blocks[part] = _merge(of_all[1], num_blocks[part], most_blocks)
            slots = addressing.token_slots(tokens)[:, None]
            rows = addressing.entry_rows(tokens.block_table, slots, best, size)
        return Selection(best.int(), rows, (best >= 0).sum(dim=1).int(), blocks)

    def attend(
        self, query: Tensor, sinks: Tensor | None, memory: LayerMemory,
        selected_rows: Tensor | None, plan: ForwardPlan, *, max_entries: int, is_query_raw: bool,
        batch_invariant: bool, backend: str,
    ) -> AttentionResult:  # fmt: skip
        """Attend the window on rank 0, each entry on its rank, and join the results."""
        tokens, ratio = plan.tokens, memory.layout.ratio
        is_alone = not ratio or (not max_entries and not batch_invariant)
        if is_alone:
            memory, selected_rows = memory.window_alone, None
        else:
            tokens, max_entries = existing(self.attending), self._most_entries(plan, ratio)
            if batch_invariant:  # the same splits and the same joins in any batch
                max_entries = self._capacity.most_entries(ratio)
            if selected_rows is None:
                selected_rows = self._rows(ratio, max_entries)
        part = ops.attend(
            query, sinks if is_alone else None, memory, selected_rows, tokens,
            max_entries=max_entries, is_query_raw=is_query_raw, batch_invariant=batch_invariant,
            backend=backend,
        )  # fmt: skip
        if is_alone:
            return part
        for joined in _joined_tokens(len(query)):
            output, lse = (each[joined] for each in part)
            bits = lse[:, :, None].view(query.dtype)
            parts = self._gather(torch.cat((output, bits), dim=2))
            outputs, of_all = parts.split([query.shape[2], bits.shape[2]], dim=3)
            lses = of_all.contiguous().view(torch.float32).squeeze(-1)
            whole = _join(outputs, lses, sinks)
            output.copy_(whole.output)
            lse.copy_(whole.lse)
        return part

    def _most_entries(self, plan: ForwardPlan, ratio: int) -> int:
        """Return the most entries of one rank that a token sees."""
        return self._config.own_entries(plan.max_entries(ratio), ratio, rank=0)

    def _number(self, own: Tensor, size: int) -> Tensor:
        """Number the rank's own things, `size` of them in a block, as their request does.

        -1 stays.
        """
        in_request = (own // size * self._config.num_ranks + self._config.rank) * size + own % size
        return torch.where(own >= 0, in_request, -1)

    def _own_blocks(self, candidates: Tensor, size: int) -> Tensor:
        """List those of a request's candidate blocks that the rank stores, in its own numbers.

        Args:
            candidates: `[n, blocks]`, ascending, then -1.
            size: Candidate blocks in a block.
        """
        num_ranks, rank = self._config.num_ranks, self._config.rank
        is_own = (candidates >= 0) & (candidates // size % num_ranks == rank)
        own = candidates // (size * num_ranks) * size + candidates % size
        own = torch.where(is_own, own, NO_ENTRY).sort(dim=1).values
        return torch.where(own < NO_ENTRY, own, -1).int()

    def _rows(self, ratio: int, most: int) -> Tensor:
        """Flat rows `[num_tokens, most]` of all own entries that each token sees; then -1.

        The first layer that attends them lists them.
        """
        own = self._own_tokens[ratio]
        rows = self._memory.context_rows[: len(own.positions) * most].view(-1, most)
        if not self._has_rows:
            entry = torch.arange(most, device=rows.device)
            counts = addressing.visible_entries(own.positions, ratio)[:, None]
            slots = addressing.token_slots(own)[:, None]
            size, step = self._config.entries_per_block(ratio), max(1, LISTED_AT_ONCE // most)
            for first in range(0, len(rows), step):
                token = slice(first, first + step)
                listed = torch.where(entry < counts[token], entry, -1)
                rows[token] = addressing.entry_rows(own.block_table, slots[token], listed, size)
            self._has_rows = True
        return rows

    def _gather(self, mine: Tensor) -> Tensor:
        """Exchange tensors of one shape: `[ranks, ..]`, in the order of the ranks.

        gloo ends the process if sizes differ. So its ranks first compare where they are.
        """
        if self._is_lost:
            raise RankLostError("A rank of the split context was lost before: free its requests")
        staged = (mine.cpu() if self._is_staged else mine).contiguous().view(torch.uint8)
        self._place[2] += 1
        self._is_lost = True  # until both exchanges are over: the next one has another size
        if not staged.is_cuda:
            place = torch.tensor([*self._place, staged.nbytes])
            if (self._allgather(place.view(torch.uint8)).view(place.dtype) != place).any():
                raise RankLostError(
                    "A rank of the split context is elsewhere: it failed alone, or has other "
                    "requests"
                )
        parts = self._allgather(staged)
        self._is_lost = False
        return parts.to(mine.device).view(mine.dtype)

    def _allgather(self, mine: Tensor) -> Tensor:
        parts = mine.new_empty((self._config.num_ranks, *mine.shape))
        try:
            self._group.allgather([list(parts)], [mine]).wait()
        except RuntimeError as error:
            raise RankLostError(f"A rank of the split context is lost: {error}") from error
        return parts


def _digest(plan: ForwardPlan, block_table: IntArray, config: CacheConfig) -> int:
    """Return 63 bits that stand for a plan: slots, positions and blocks."""
    slots = plan.request_slots[plan.request_slots >= 0]
    blocks = block_table[slots, : -(-plan.longest // config.block_tokens)]
    digest = hashlib.blake2b(digest_size=8)
    for each in (plan.request_slots, plan.positions_before, plan.positions_after, blocks):
        digest.update(np.ascontiguousarray(each, dtype=np.int32).data)
    return int.from_bytes(digest.digest()) >> 1


def own_tokens(tokens: TokenMap, config: CacheConfig, ratio: int) -> TokenMap:
    """Return tokens, with the rank's own block table, as they see its own entries of a ratio."""
    size = config.entries_per_block(ratio)

    def count(entries: Tensor) -> Tensor:
        """`CacheConfig.own_entries` of many numbers."""
        rest = (entries % (size * config.num_ranks) - config.rank * size).clamp(0, size)
        return entries // (size * config.num_ranks) * size + rest

    return tokens._replace(
        positions=count((tokens.positions + 1) // ratio) * ratio - 1,
        positions_after=count(tokens.positions_after // ratio) * ratio,
    )


def _joined_tokens(num_tokens: int) -> Iterator[slice]:
    """Cut tokens into those whose parts of all ranks are held at once."""
    for first in range(0, num_tokens, JOINED_AT_ONCE):
        yield slice(first, first + JOINED_AT_ONCE)


def _pairs(numbers: Tensor, scores: Tensor) -> Tensor:
    """Candidates `[n, width, 2]` int32: a number, -1 for none, and the bits of its score."""
    return torch.stack((numbers.int(), scores.view(torch.int32)), 2)


def _merge(candidates: Tensor, counts: Tensor, topk: int) -> Tensor:
    """Choose among the ranks' candidates as `select_topk` does among all.

    Args:
        candidates: `[ranks, n, width, 2]`, see `_pairs`.
        counts: `[n]`, those that a token sees on all ranks.

    Returns:
        `[n, topk]` int64, ascending, then -1.
    """
    entries, bits = candidates.transpose(0, 1).flatten(1, 2).unbind(2)
    scores = bits.contiguous().view(torch.float32)
    has_few = counts[:, None] <= topk
    is_candidate = (entries >= 0) & (has_few | ~torch.isnan(scores))
    scores = torch.where(has_few, 0.0, scores) + 0.0  # one zero
    bits = scores.view(torch.int32).long()
    ranked = bits ^ ((bits >> 63) & 0x7FFFFFFF)  # in the order of the scores
    keys = torch.where(is_candidate, (ranked << 32) - entries, NO_KEY)  # of equal scores the first
    best = keys.topk(min(topk, keys.shape[1]), dim=1).values
    chosen = torch.where(best > NO_KEY, -best & 0xFFFFFFFF, NO_ENTRY).sort(dim=1).values
    chosen = torch.where(chosen < NO_ENTRY, chosen, -1)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[1]), value=-1)


def _join(outputs: Tensor, lses: Tensor, sinks: Tensor | None) -> AttentionResult:
    """Join softmaxes over parts of the rows, `[ranks, n, heads, ..]`, and add the sinks once."""
    largest = lses.amax(dim=0)
    base = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(lses - base)
    total, output = torch.zeros_like(base), torch.zeros_like(outputs[0], dtype=torch.float32)
    for weight, each in zip(weights, outputs, strict=True):  # in the order of the ranks
        total += weight
        output += weight[:, :, None] * each
    with_sink = total if sinks is None else total + torch.exp(sinks.float() - base)
    output = torch.where(total[:, :, None] > 0, output / with_sink[:, :, None], 0.0)
    return AttentionResult(output.to(outputs.dtype), total.log() + base)
