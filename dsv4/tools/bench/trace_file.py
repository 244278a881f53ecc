"""Traces of prompts in Mooncake's format, and what an ideal cache would find of them."""

import gzip
import json
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from dsv4.cache.prefix.token_store import LARGEST_ID

HASH_TOKENS = 512  # of one hash id
FIELDS = ("timestamp", "input_length", "output_length")


class TracePrompt(NamedTuple):
    """A prompt of a trace: its tokens, and the hashes of its whole blocks."""

    num_tokens: int
    hashes: tuple[int, ...]


def read_trace(path: Path, *, first: int, count: int) -> list[TracePrompt]:
    """Read `count` lines of a trace, plain or `.gz`, from number `first` on; the first is 1.

    The last id of a prompt may stand for less than a block, and changes with the next turn. So
    a prompt keeps the ids of its whole blocks.
    """
    open_text = gzip.open if path.suffix == ".gz" else open
    try:
        with open_text(path, "rt", encoding="utf-8") as lines:
            prompts = [
                _read_prompt(line, f"line {number} of {path}")
                for number, line in islice(enumerate(lines, 1), first - 1, first - 1 + count)
            ]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"Invalid trace: cannot read {path}: {error}") from error
    if len(prompts) < count:
        raise ValueError(
            f"Invalid trace: expected {count} requests from line {first} on, "
            f"got {len(prompts)} in {path}"
        )
    if not any(prompt.hashes for prompt in prompts):
        raise ValueError(f"Invalid trace: expected a prompt of {HASH_TOKENS} tokens in {path}")
    return prompts


def _read_prompt(line: str, where: str) -> TracePrompt:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Invalid trace: expected JSON in {where}: {error}") from error
    if not isinstance(request, dict):
        got = type(request).__name__
        raise ValueError(f"Invalid trace: expected an object in {where}, got {got}")
    for name in FIELDS:
        _check_count(name, request.get(name), where)
    hashes, num_tokens = request.get("hash_ids"), request["input_length"]
    if not isinstance(hashes, list):
        got = type(hashes).__name__
        raise ValueError(f"Invalid hash_ids: expected a list in {where}, got {got}")
    for each in hashes:
        _check_count("hash_ids", each, where)
    num_blocks = num_tokens // HASH_TOKENS
    if len(hashes) < num_blocks:
        raise ValueError(
            f"Invalid hash_ids: expected at least {num_blocks} for an input_length of "
            f"{num_tokens} in {where}, got {len(hashes)}"
        )
    return TracePrompt(num_tokens, tuple(hashes[:num_blocks]))


def _check_count(name: str, value: Any, where: str) -> None:
    if type(value) is not int or not 0 <= value <= LARGEST_ID:
        raise ValueError(
            f"Invalid {name}: expected an integer from 0 to {LARGEST_ID} in {where}, "
            f"got {value!r:.40}"
        )


def found_by_lru(prompts: Sequence[TracePrompt], max_blocks: int) -> int:
    """Count the blocks that a cache of full attention finds, which drops the least recently used.

    A prompt uses its first block last, so that blocks go from a prompt's end.
    """
    known: OrderedDict[int, None] = OrderedDict()
    num_found = 0
    for prompt in prompts:
        num_found += next(
            (depth for depth, each in enumerate(prompt.hashes) if each not in known),
            len(prompt.hashes),
        )
        for each in reversed(prompt.hashes):
            known[each] = None
            known.move_to_end(each)
        while len(known) > max_blocks:
            known.popitem(last=False)
    return num_found
