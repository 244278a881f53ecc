"""`dsv4 plan --html`: the planner as one page that needs neither a server nor a network.

`page.js` repeats the arithmetic of `dsv4.cache.memory.capacity` from numbers that this module
writes into the page. `tests/tools/planner/test_page.py` compares both in a browser.
"""

import json
from collections import Counter
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from dsv4.cache.memory.capacity import HEAD_BLOCK, SPLIT_PROGRAMS
from dsv4.config import MAX_DRAFTS, TAIL_DTYPES, CacheConfig
from dsv4.formats import BYTE_ALIGN, KV_FORMATS
from dsv4.kernels import index_scratch
from dsv4.tools.planner.changes import row_bytes
from dsv4.tools.planner.memory_plan import LIMITS, MemoryPlan, component_label
from dsv4.tools.planner.plot import COLORS, component_groups
from dsv4.tools.planner.sizes import GPU_BYTES, short_bytes, short_tokens

# Controls with a limit of their own, by the plan's name of their number.
LIMITED = {
    "requests": "num_requests", "ranks": "num_ranks", "chunk": "max_forward_tokens",
    "checkpoints": "num_checkpoints", "undo": "undo_slots",
}  # fmt: skip


# Constants of `index_scratch`, and fields of a model by their names in the page.
SCRATCH_CONSTANTS = (
    "SCRATCH_LIMIT", "DENSE_LIMIT", "DENSE_HEADS", "DENSE_WORKS", "WHOLE_ENTRIES",
    "NARROW_ENTRIES", "GROUP", "MIN_HEADS", "QUERY_BYTES",
)  # fmt: skip
MODEL_FIELDS = {
    "headDim": "head_dim", "ropeDim": "rope_dim", "window": "sliding_window",
    "heads": "num_query_heads", "indexHeads": "index_num_heads", "indexDim": "index_head_dim",
    "topk": "index_topk", "maxPosition": "max_position",
}  # fmt: skip


def write_page(
    plan: MemoryPlan, path: Path, *, model: str, gpu: str, models: dict[str, CacheConfig]
) -> None:
    """Write the page; it opens with the choices of `plan`.

    Args:
        model, gpu: Names of the plan's model and GPU, as the user gave them.
        models: Models to choose from, by name, with their MTP layers.
    """
    data = {
        "models": {name: _model(config) for name, config in models.items()},
        "gpus": GPU_BYTES,
        "tails": {name: dtype.itemsize for name, dtype in TAIL_DTYPES.items()},
        "constants": {
            **{_camel_case(name): getattr(index_scratch, name) for name in SCRATCH_CONSTANTS},
            "headBlock": HEAD_BLOCK, "splitPrograms": SPLIT_PROGRAMS, "byteAlign": BYTE_ALIGN,
        },
        "limits": {control: LIMITS[name][1] for control, name in LIMITED.items()}
        | {"drafts": MAX_DRAFTS},
        "groups": [
            {"name": name, "color": COLORS[name], "components": components}
            for name, components in component_groups(plan).items()
        ],
        "labels": {name: component_label(name) for name in plan.memory},
        "choice": _choice(plan, model=model, gpu=gpu),
    }  # fmt: skip
    path.write_text(_fill(json.dumps(data)), encoding="utf-8")


def _fill(data: str) -> str:
    folder = resources.files("dsv4.tools.planner")
    page = (folder / "page.html").read_text(encoding="utf-8")
    # A name with </script> in it must not end the element.
    sections = {
        "STYLE": (folder / "page.css").read_text(encoding="utf-8"),
        "SCRIPT": (folder / "page.js").read_text(encoding="utf-8"),
        "DATA": data.replace("<", "\\u003c"),
    }
    for name, text in sections.items():
        page = page.replace(f"/*{name}*/", text.rstrip("\n"))
    return page


def _camel_case(name: str) -> str:
    first, *others = name.lower().split("_")
    return "".join((first, *(word.capitalize() for word in others)))


def _model(config: CacheConfig) -> dict[str, Any]:
    num_main = config.num_layers - config.num_mtp_layers
    main = replace(config, compress_ratios=config.compress_ratios[:num_main], num_mtp_layers=0)
    sizes = {"head_dim": config.head_dim, "rope_dim": config.rope_dim,
             "num_heads": index_scratch.DENSE_HEADS}  # fmt: skip
    return {
        **{name: getattr(config, field) for name, field in MODEL_FIELDS.items()},
        "kvRows": row_bytes(config, "kv_format"), "indexRows": row_bytes(config, "index_format"),
        # Rows that attention of chunks may make dense, of enough heads.
        "denseFormats": [n for n in KV_FORMATS if index_scratch.has_dense_rows(n, **sizes)],
        "hasMtp": config.num_mtp_layers > 0,
        "withMtp": _layers(config), "withoutMtp": _layers(main),
    }  # fmt: skip


def _layers(config: CacheConfig) -> dict[str, int]:
    counts = Counter(layer.attention_type.name for layer in config.schedule)
    return {name.lower(): counts[name] for name in ("SWA", "CSA", "HCA")}


def _choice(plan: MemoryPlan, *, model: str, gpu: str) -> dict[str, Any]:
    """Return the first values of the page's controls, as a user would type them."""
    config = plan.config
    name = gpu.strip().lower()
    return {
        "model": model, "context": short_tokens(plan.context_tokens),
        "requests": str(plan.num_requests),
        "kv": config.kv_format, "index": config.index_format, "tails": config.tail_dtype,
        "gpu": name if name in GPU_BYTES else "other", "size": short_bytes(plan.gpu_bytes),
        "weights": short_bytes(plan.weights_bytes), "reserve": short_bytes(plan.reserved_bytes),
        "ranks": str(plan.num_ranks), "block": config.block_tokens, "align": config.page_align,
        "drafts": str(config.drafts_per_step), "chunk": short_tokens(plan.max_forward_tokens),
        "checkpoints": str(plan.num_checkpoints), "undo": str(plan.undo_slots),
        "mtp": config.num_mtp_layers > 0,
    }  # fmt: skip
