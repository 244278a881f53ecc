"""A small model of DeepSeek-V4.1's kind: two groups that share entries, and candidates."""

import random
from typing import Any

from dsv4.config import CacheConfig, YarnScaling
from dsv4.formats import KV_FORMATS

ROWS = {"kv_format": "fp8_32", "entry_format": "nvfp4_16", "page_arrangement": "joined"}


def tiny_v41(**choices: Any) -> CacheConfig:
    """Make layers 1 and 3 own entries, and layers 4 and 6 choose among candidates of layer 3."""
    fields: dict[str, Any] = {
        "compress_ratios": (0, 2, 2, 1, 1, 1, 1), "kv_source_layer_ids": (1, 3),
        "index_source_layer_ids": (1, 3, 4, 6), "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 4, "candidate_block_size": 3, "num_query_heads": 4,
        "head_dim": 96, "rope_dim": 32, "index_num_heads": 16, "index_head_dim": 64,
        "index_topk": 8, "max_position": 65536, "yarn": YarnScaling(original_max_position=4096),
        "sliding_window": 16, "rms_norm_eps": 1e-20, "index_hadamard": False, "page_align": 16,
        "block_tokens": 16,
    }  # fmt: skip
    rows = {} if "kv_format" in choices else ROWS
    return CacheConfig(**{**fields, **rows, **choices})


def random_v41_choices(choose: random.Random) -> dict[str, Any]:
    """Draw groups of layers that share, candidates and rows of DeepSeek-V4.1."""
    first = {"compress_ratios": (2, 1, 1), "kv_source_layer_ids": (0, 1)}
    second = {"compress_ratios": (0, 1, 1, 1), "kv_source_layer_ids": (1,)}
    groups = choose.choice([first, second])
    last = groups["kv_source_layer_ids"][-1]
    later = choose.choice([(), (last + 1,)])
    return {
        **groups, "index_source_layer_ids": groups["kv_source_layer_ids"] + later,
        "candidate_source_layer_id": choose.choice([-1, last]),
        "candidate_topk_blocks": choose.choice([4, 5]),
        "candidate_block_size": choose.choice([1, 3]),
        "entry_format": choose.choice([None, *KV_FORMATS]),
        "page_arrangement": choose.choice(["split", "joined"]),
        "scale_floor": choose.choice(["amax", "scale"]),
        "tail_dtype": choose.choice(["float32", "bfloat16"]),
    }  # fmt: skip
