"""The backends' functions as PyTorch ops: `torch.ops.dsv4.*`.

A schema lists the fields of the contracts' structs and marks the mutated ones. A fake gives the
results' shapes and dtypes. The functions below take the structs themselves. They call the op if
`torch.compile`, a dispatch mode or a profiler has to see it. Otherwise they call the backend
directly, with the same result, which saves tens of microseconds a call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dsv4.kernels.backends import load_backend
from dsv4.kernels.contracts import (
    AttentionResult,
    CheckpointPoints,
    CompressorWeights,
    EntryInputs,
    Gathered,
    KeyWeights,
    LayerWrites,
    Selection,
    TokenMap,
    WindowInputs,
)
from dsv4.kernels.layer_memory import LayerLayout, LayerMemory

_TOKENS = "Tensor[] tokens, SymInt max_step"
_CHECKPOINTS = "Tensor points, Tensor(a!) checkpoints"

_library = torch.library.Library("dsv4", "DEF")


def make_rope(memory: LayerMemory, positions: Tensor, *, backend: str) -> None:
    """Compute cos and sin of a forward's tokens, `[num_tokens]` int32, once for all layers."""
    _run("make_rope", backend, memory=memory, positions=positions)


def write_layer(
    writes: LayerWrites, memory: LayerMemory, tokens: TokenMap, *, backend: str
) -> None:
    """Store a layer's rows."""
    _run("write_layer", backend, memory=memory, tokens=tokens, writes=writes)


def select_entries(
    query: Tensor,
    head_weights: Tensor,
    memory: LayerMemory,
    tokens: TokenMap,
    *,
    max_entries: int,
    candidates: Tensor | None = None,
    backend: str,
) -> Selection:
    """Select the `index_topk` best visible entries of each token.

    With candidates, the `blocks` that V4.1's candidate source returned, those of its blocks alone.
    """
    chosen = _run(
        "select_entries", backend,
        memory=memory, tokens=tokens, query=query, head_weights=head_weights,
        max_entries=max_entries, candidates=candidates,
    )  # fmt: skip
    return Selection(*chosen)


def attend(
    query: Tensor,
    sinks: Tensor | None,
    memory: LayerMemory,
    selected_rows: Tensor | None,
    tokens: TokenMap,
    *,
    max_entries: int,
    is_query_raw: bool = False,
    batch_invariant: bool,
    backend: str,
) -> AttentionResult:
    """Attend over each token's window and entries."""
    attended = _run(
        "attend", backend,
        memory=memory, tokens=tokens, query=query, sinks=sinks, selected_rows=selected_rows,
        max_entries=max_entries, is_query_raw=is_query_raw, batch_invariant=batch_invariant,
    )  # fmt: skip
    return AttentionResult(*attended)


def gather_compressed_kv(memory: LayerMemory, rows: Tensor, *, backend: str) -> Gathered:
    """Gather the entries at flat rows."""
    return Gathered(*_run("gather_compressed_kv", backend, memory=memory, rows=rows))


def gather_all_compressed_kv(
    memory: LayerMemory, tokens: TokenMap, *, max_entries: int, backend: str
) -> Gathered:
    """Gather all closed entries of each request."""
    gathered = _run(
        "gather_all_compressed_kv", backend, memory=memory, tokens=tokens, max_entries=max_entries
    )
    return Gathered(*gathered)


def gather_swa_kv(memory: LayerMemory, tokens: TokenMap, *, backend: str) -> Gathered:
    """Gather the window of each token."""
    return Gathered(*_run("gather_swa_kv", backend, memory=memory, tokens=tokens))


def checkpoint_window(
    boundaries: CheckpointPoints, memory: LayerMemory, tokens: TokenMap, *, backend: str
) -> None:
    """Copy window rows at block boundaries to checkpoints."""
    _run("checkpoint_window", backend, boundaries=boundaries, memory=memory, tokens=tokens)


def checkpoint_tails(
    boundaries: CheckpointPoints,
    memory: LayerMemory,
    tokens: TokenMap,
    writes: LayerWrites,
    *,
    backend: str,
) -> None:
    """Store tail rows at block boundaries in checkpoints."""
    _run(
        "checkpoint_tails", backend,
        boundaries=boundaries, memory=memory, tokens=tokens, writes=writes,
    )  # fmt: skip


def _run(name: str, backend: str, **arguments: Any) -> Any:
    """Call a backend's function or its op; the arguments have the order of the op's schema."""
    is_watched = is_compiling() or is_in_torch_dispatch_mode()
    if not is_watched and not profiler._is_profiler_enabled:
        function = getattr(load_backend(backend), name)
        if not torch.is_grad_enabled():
            return function(**arguments)
        with torch.no_grad():  # an op has no gradient either
            return function(**arguments)
    flat: list[Any] = []
    for key, value in arguments.items():
        flatten = _FLATTENERS.get(key)
        flat += (value,) if flatten is None else flatten(value)
    return getattr(torch.ops.dsv4, name).default(backend, *flat)


def _flat_writes(writes: LayerWrites) -> list[Tensor | None]:
    """List ten tensors: the window's two, the entries' four, the index keys' four."""
    flat: list[Tensor | None] = [None, None] if writes.window is None else [*writes.window]
    for part in (writes.entries, writes.index_keys):
        if isinstance(part, KeyWeights):
            flat += [None, None, *part]
        else:
            flat += [None] * 4 if part is None else [part.kv, part.gate, *part.weights]
    return flat


_FLATTENERS: dict[str, Callable[[Any], Sequence[Any]]] = {
    "boundaries": tuple,
    "memory": lambda memory: (*memory[:-1], memory.layout.key),
    "tokens": lambda tokens: (tokens[:-1], tokens.max_step),
    "writes": lambda writes: (_flat_writes(writes),),
}


def _structs(flat: dict[str, Any]) -> dict[str, Any]:
    """Turn an op's arguments into those of a backend's function."""
    flat["layout"] = LayerLayout.from_key(flat["layout"])
    flat["memory"] = LayerMemory._make([flat.pop(name) for name in LayerMemory._fields])
    if "tokens" in flat:
        flat["tokens"] = TokenMap._make([*flat["tokens"], flat.pop("max_step")])
    if "points" in flat:
        flat["boundaries"] = CheckpointPoints(flat.pop("points"), flat.pop("checkpoints"))
    if "writes" in flat:
        flat["writes"] = _writes(flat["writes"])
    return flat


def _writes(flat: list[Any]) -> LayerWrites:
    def entries(first: int) -> EntryInputs | None:
        kv, gate, bias, norm_weight = flat[first : first + 4]
        return None if kv is None else EntryInputs(kv, gate, CompressorWeights(bias, norm_weight))

    window = None if flat[0] is None else WindowInputs(flat[0], flat[1])
    is_latent = flat[6] is None and flat[8] is not None
    return LayerWrites(window, entries(2), KeyWeights(*flat[8:]) if is_latent else entries(6))


def _fake_select(*, query: Tensor, layout: str, **_: Any) -> tuple[Tensor, ...]:
    kept = LayerLayout.from_key(layout)
    shape, blocks = (query.shape[0], kept.index_topk), (query.shape[0], kept.candidate_blocks)
    return (
        query.new_empty(shape, dtype=torch.int32),
        query.new_empty(shape, dtype=torch.int64),
        query.new_empty(shape[:1], dtype=torch.int32),
        query.new_empty(blocks, dtype=torch.int32),
    )


def _fake_attend(*, query: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


def _fake_gather(
    *, layout: str, rows: Tensor | None = None, tokens: Sequence[Tensor] = (),
    max_entries: int | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Values and presence of listed rows, of each request's entries, or of each token's window."""
    kept = LayerLayout.from_key(layout)
    row = kept.kv_row if rows is None and max_entries is None else kept.entry_row
    if rows is None:
        plan = TokenMap._make([*tokens, 0])
        rows = plan.positions if max_entries is None else plan.request_slots
        width = kept.window if max_entries is None else max_entries
        rows = rows[:, None].expand(-1, width)
    values = rows.new_empty((*rows.shape, row.dim), dtype=row.value_dtype)
    return values, rows.new_empty(rows.shape, dtype=torch.bool)


def _register(
    name: str, arguments: str, fake: Callable[..., Any] = lambda **_: None, *, outputs: int = 0
) -> None:
    """Define the op that calls the function `name` of the backend that it is given."""
    results = ", ".join(["Tensor"] * outputs)
    _library.define(f"{name}(str backend, {arguments}) -> ({results})")
    schema = getattr(torch.ops.dsv4, name).default._schema
    names = tuple(argument.name for argument in schema.arguments[1:])

    def run(backend: str, *flat: Any) -> Any:
        function = getattr(load_backend(backend), name)
        return function(**_structs(dict(zip(names, flat, strict=False))))  # defaults may miss

    def run_fake(backend: str, *flat: Any) -> Any:
        return fake(**dict(zip(names, flat, strict=False)))

    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"dsv4::{name}", run_fake, lib=_library)


def _memory(*mutated: str) -> str:
    """Write the schema of a layer's memory; mutated are the storages that the op writes."""
    alias = {name: f"({letter}!)" for name, letter in zip(mutated, "abcde", strict=False)}
    kinds = {name: f"Tensor{alias.get(name, '')}" for name in LayerMemory._fields}
    kinds |= {"global_scale": "Tensor?", "layout": "str"}
    return ", ".join(f"{kind} {name}" for name, kind in kinds.items())


_register("make_rope", f"{_memory('rope_rows')}, Tensor positions")
_written = _memory("slots", "blocks", "workspace", "pooled", "arrivals")
_register("write_layer", f"{_written}, {_TOKENS}, Tensor?[] writes")
_register(
    "select_entries",
    f"{_memory('index_scratch')}, {_TOKENS}, Tensor query, Tensor head_weights, "
    "SymInt max_entries, Tensor? candidates=None",
    _fake_select,
    outputs=4,
)
_register(
    "attend",
    f"{_memory('partials', 'index_scratch')}, {_TOKENS}, Tensor query, Tensor? sinks, "
    "Tensor? selected_rows, SymInt max_entries, bool is_query_raw, bool batch_invariant",
    _fake_attend,
    outputs=2,
)
_register("gather_compressed_kv", f"{_memory()}, Tensor rows", _fake_gather, outputs=2)
_read = f"{_memory()}, {_TOKENS}"
_register("gather_all_compressed_kv", f"{_read}, SymInt max_entries", _fake_gather, outputs=2)
_register("gather_swa_kv", _read, _fake_gather, outputs=2)
_register("checkpoint_window", f"{_CHECKPOINTS}, {_read}")
_register("checkpoint_tails", f"{_CHECKPOINTS}, {_read}, Tensor?[] writes")
