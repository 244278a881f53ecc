"""`MemoryPlan`: the bytes of a cache on a GPU and how much fits, before anything is allocated.

Every byte comes from `Capacity.memory()`, which also sizes a manager. Nothing here adds up layers
or rows again.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np

from dsv4.cache.memory.capacity import Capacity, ComponentBytes, blocks_for
from dsv4.checks import check_int
from dsv4.config import MAX_POSITION, CacheConfig

TOKEN_COMPONENTS = ("csa_entries", "index_keys", "hca_entries", "block_padding")
SLOT_COMPONENTS = ("window", "csa_tails", "index_tails", "hca_tails", "slot_padding")
REQUEST_COMPONENTS = (*SLOT_COMPONENTS, "block_table")
# Components whose label is not their name with spaces.
LABELS = {
    "csa_entries": "CSA entries", "hca_entries": "HCA entries", "csa_tails": "CSA tails",
    "hca_tails": "HCA tails", "attention_partials": "attention parts",
    "rope_rows": "RoPE rows", "index_global_scale": "index scale",
}  # fmt: skip
MAX_BYTES = 2**53 - 1  # exact in the page's JavaScript too
# The least and the most of each number of a plan.
LIMITS = {
    "num_requests": (1, 10**6), "context_tokens": (1, MAX_POSITION), "gpu_bytes": (1, MAX_BYTES),
    "weights_bytes": (0, MAX_BYTES), "reserved_bytes": (0, MAX_BYTES), "num_ranks": (1, 10**6),
    "num_stages": (1, 4096), "max_forward_tokens": (1, 2**30), "num_checkpoints": (0, 10**6),
    "undo_slots": (0, 10**6),
}  # fmt: skip


@dataclass(frozen=True)
class MemoryPlan:
    """A number of requests of one length, on one GPU.

    Attributes:
        config: Geometry, formats and block size; that of a rank where a context is split.
        num_requests: Requests open at once.
        context_tokens: Tokens of each of them.
        gpu_bytes: Memory of one GPU.
        weights_bytes: Weights of the whole model, as many in each layer, divided among the ranks.
        reserved_bytes: Other memory of a rank: activations, the CUDA context, other pools.
        num_ranks: Tensor-parallel ranks, which divide the query heads. Each keeps all rows, since
            all query heads share one head of K = V.
        num_stages: Pipeline stages. Each has ranks of its own, and a cache of its layers. Cuts are
            those nearest to equal numbers of layers, longer stages first, that part no layers which
            share entries.
        max_forward_tokens: Tokens of one forward: the longest prefill chunk.
        num_checkpoints: Block boundaries at which the prefix cache can resume a request.
        undo_slots: Chunks of one forward that a cancelled plan brings back.
    """

    config: CacheConfig
    num_requests: int
    context_tokens: int
    gpu_bytes: int
    weights_bytes: int = 0
    reserved_bytes: int = 0
    num_ranks: int = 1
    num_stages: int = 1
    max_forward_tokens: int = 8192
    num_checkpoints: int = 0
    undo_slots: int = 1

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            check_int(name, getattr(self, name), at_least=least, at_most=most)
        if self.context_tokens > self.config.max_position:
            raise ValueError(
                f"Invalid context_tokens: expected at most {self.config.max_position} "
                f"(max_position), got {self.context_tokens}"
            )
        check_int(
            "num_stages", self.num_stages, at_least=1, at_most=1 + len(_possible_cuts(self.config)),
            limit="the most stages that share no entries",
        )  # fmt: skip
        if self.config.num_query_heads % self.num_ranks:
            raise ValueError(
                f"Invalid num_ranks: expected a divisor of {self.config.num_query_heads} query "
                f"heads, got {self.num_ranks}"
            )
        _ = self.capacity

    @property
    def context_ranks(self) -> int:
        """Ranks that divide each request's blocks."""
        return self.config.num_ranks

    @property
    def blocks_per_request(self) -> int:
        """Blocks of one request at the planned length."""
        return int(blocks_for(self.config, np.array([self.context_tokens]))[0])

    @cached_property
    def capacity(self) -> Capacity:
        """Sizes of a rank's manager for the plan."""
        heads = self.config.num_query_heads // self.num_ranks
        return Capacity(
            replace(self.config, num_query_heads=heads), max_requests=self.num_requests,
            num_blocks=self.num_requests * self.blocks_per_request,
            max_request_tokens=self.context_tokens, max_forward_tokens=self.max_forward_tokens,
            num_checkpoints=self.num_checkpoints, undo_slots=self.undo_slots,
        )  # fmt: skip

    @cached_property
    def memory(self) -> dict[str, ComponentBytes]:
        """Bytes by component, for all requests."""
        return self.capacity.memory()

    @cached_property
    def stages(self) -> dict[tuple[int, int], int]:
        """Bytes that the manager of each stage allocates, by its first layer and its end."""
        return self._stage_bytes(self.capacity)

    def _stage_bytes(self, capacity: Capacity) -> dict[tuple[int, int], int]:
        if self.num_stages == 1:
            return {self.stage_layers[0]: _allocated(capacity)}
        return {
            layers: _allocated(replace(capacity, config=capacity.config.cut_layers(*layers)))
            for layers in self.stage_layers
        }

    @cached_property
    def stage_layers(self) -> list[tuple[int, int]]:
        """The first layer and the end of each stage."""
        possible, cuts = _possible_cuts(self.config), [0]
        parts = np.array_split(np.arange(self.config.num_layers), self.num_stages)
        for stage, part in enumerate(parts[1:], 2):
            later = [cut for cut in possible if cut > cuts[-1]]
            free = later[: len(later) - (self.num_stages - stage)]  # one is left for each later cut
            cuts.append(min(free, key=lambda cut: abs(cut - int(part[0]))))
        return list(pairwise([*cuts, self.config.num_layers]))

    @property
    def most_layers(self) -> int:
        """Layers of the stage that has most of them."""
        return max(end - first for first, end in self.stage_layers)

    @property
    def cache_bytes(self) -> int:
        """Bytes that the manager allocates: that of the largest stage."""
        return max(self.stages.values())

    @property
    def rank_weights_bytes(self) -> int:
        """Weights of one rank of the stage that has most layers."""
        num_shares = self.num_ranks * self.config.num_layers
        return -(-self.weights_bytes * self.most_layers // num_shares)

    @property
    def needed_bytes(self) -> int:
        """Bytes that one GPU must hold in all."""
        return self.rank_weights_bytes + self.reserved_bytes + self.cache_bytes

    @property
    def budget_bytes(self) -> int:
        """Bytes that remain for the cache; negative if even the weights do not fit."""
        return self.gpu_bytes - self.rank_weights_bytes - self.reserved_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that the plan leaves free; negative if it does not fit."""
        return self.gpu_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0

    def per_token(self) -> dict[str, tuple[Fraction, Fraction]]:
        """Return payload and allocated bytes of a token in a full block, by component."""
        memory = replace(self.capacity, num_blocks=1).memory()
        tokens = self.config.block_tokens
        return {
            name: (Fraction(memory[name].payload, tokens), Fraction(memory[name].allocated, tokens))
            for name in TOKEN_COMPONENTS
        }

    def per_request(self) -> dict[str, ComponentBytes]:
        """Return the bytes of a request that do not depend on its length, by component."""
        memory = replace(self.capacity, max_requests=1).memory()
        return {name: memory[name] for name in REQUEST_COMPONENTS}

    def shared(self) -> dict[str, ComponentBytes]:
        """Return the bytes that all requests share, by component."""
        owned = (*TOKEN_COMPONENTS, *REQUEST_COMPONENTS)
        return {name: size for name, size in self.memory.items() if name not in owned}

    def one_request(self) -> ComponentBytes:
        """Return the bytes of one request of the planned length: its blocks and its slot."""
        memory = replace(self, num_requests=1).memory
        sizes = [memory[name] for name in (*TOKEN_COMPONENTS, *SLOT_COMPONENTS)]
        return ComponentBytes(*map(sum, zip(*sizes, strict=True)))

    @cached_property
    def max_requests(self) -> int:
        """The most requests of the planned length that fit; 0 if not even one does."""
        most = LIMITS["num_requests"][1]
        return largest(lambda number: replace(self, num_requests=number).fits, at_most=most)

    @cached_property
    def max_blocks(self) -> int | None:
        """The most blocks that fit beside the fixed part of `num_requests` requests.

        None if no layer is compressed: such requests need no blocks.
        """
        if not self.config.smallest_ratio:
            return None
        budget = self.budget_bytes

        def fits(number: int) -> bool:
            stages = self._stage_bytes(replace(self.capacity, num_blocks=number))
            return max(stages.values()) <= budget

        return largest(fits)

    @property
    def max_tokens(self) -> int | None:
        """The tokens of those blocks."""
        return None if self.max_blocks is None else self.max_blocks * self.config.block_tokens

    @cached_property
    def max_context(self) -> int:
        """The longest context of `num_requests` requests that fits; 0 if none does.

        A whole number of blocks, or the model's limit.
        """
        limit, step = self.config.max_position, self.config.block_tokens
        if replace(self, context_tokens=limit).fits:
            return limit

        def fits(number: int) -> bool:
            return replace(self, context_tokens=step * number).fits

        longest = largest(fits, at_most=limit // step)
        last = min(longest + self._blocks_past_a_gap(longest), limit // step)
        return step * next((n for n in range(last, longest, -1) if fits(n)), longest)

    def _blocks_past_a_gap(self, longest: int) -> int:
        """The most blocks from a context that does not fit to a longer one that does.

        The index's workspace holds a whole number of rows below a limit. With longer rows it can
        hold one row fewer, and so be smaller by less than a row.
        """
        block = replace(self.capacity, num_blocks=self.num_requests).memory()
        block_bytes = sum(block[name].allocated for name in TOKEN_COMPONENTS)
        gap = self.config.max_position // self.config.block_tokens - longest
        while block_bytes and 1 + self._row_bytes(longest + gap) // block_bytes < gap:
            gap = 1 + self._row_bytes(longest + gap) // block_bytes
        return gap if block_bytes else 0  # without entries there is no index

    def _row_bytes(self, num_blocks: int) -> int:
        """Bytes of a token in the index's workspace, at a context of so many blocks."""
        tokens = min(num_blocks * self.config.block_tokens, self.config.max_position)
        one = replace(self.capacity, max_forward_tokens=1, max_request_tokens=tokens)
        return one.index_bytes


def component_label(name: str) -> str:
    """Name a component for reading."""
    return LABELS.get(name, name.replace("_", " "))


def largest(fits: Callable[[int], bool], *, at_most: int = MAX_BYTES) -> int:
    """Find the largest number from 1 on that fits, if all smaller ones fit; 0 if none does."""
    return bisect_left(range(1, at_most + 1), True, key=lambda number: not fits(number))


def _possible_cuts(config: CacheConfig) -> list[int]:
    """List the layers that a stage can begin with: from there on none reads earlier entries."""
    possible, earliest = [], config.num_layers
    for layer in reversed(config.schedule[1:]):
        if layer.entries_of >= 0:
            earliest = min(earliest, layer.entries_of)
        if layer.layer_idx <= earliest:
            possible.append(layer.layer_idx)
    return possible[::-1]


def _allocated(capacity: Capacity) -> int:
    return sum(size.allocated for size in capacity.memory().values())
