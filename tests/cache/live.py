"""All that a request can still read: what a comparison of two requests is about."""

from typing import NamedTuple

import numpy as np
import torch

from dsv4.kernels.reference.arithmetic import sum_groups


class Live(NamedTuple):
    """Positions whose window rows and tail rows are still read, groups whose sums are, and all
    closed entries that the rank stores.
    """

    window: np.ndarray
    tail: np.ndarray
    groups: np.ndarray
    entries: np.ndarray


def live_parts(config, schema, length):
    """What a layer of a request of some length reads."""
    ratio = schema.ratio or 1
    is_hca = ratio == 128
    span = 16 if is_hca else ratio
    tail_start = max(0, length // span * span - schema.tail_buffer_size_b)
    entries = np.arange(length // ratio)
    owners = entries // max(1, schema.entries_per_block) % config.num_ranks
    return Live(
        np.arange(max(0, length - config.sliding_window + 1), length),
        np.arange(tail_start, length),
        np.arange(length // 128 * 8, length // 16) if is_hca else np.arange(0),
        entries[owners == config.rank],
    )


def live_bytes(manager, slot):
    """The rows that a request can read, layer by layer, where it keeps them."""
    length, parts = int(manager.lengths[slot]), []
    for idx, schema in enumerate(manager.schemas):
        state, pages = manager._layers[idx].state, manager._layers[idx].paged
        live = live_parts(manager.config, schema, length)
        parts += _stored(state.ring, slot, live.window % schema.ring_rows)
        if pages is None:
            continue
        tails = (state.tail, state.index_tail)
        parts += [tail[slot, live.tail % schema.tail_rows] for tail in tails if tail is not None]
        if state.sums is not None:
            parts.append(state.sums[slot, live.groups % max(8, schema.sum_rows)])
        per_block = schema.entries_per_block * manager.config.num_ranks
        blocks = manager._books.requests.block_table[slot, live.entries // per_block]
        rows = live.entries % schema.entries_per_block
        parts += _stored(pages.entries, blocks, rows)
        if pages.index_keys is not None:
            parts += _stored(pages.index_keys, blocks, rows)
    return parts


def dense_bytes(config, schemas, layers, length):
    """The same rows of uncached layers."""
    parts = []
    for schema, layer in zip(schemas, layers, strict=True):
        live = live_parts(config, schema, length)
        parts += [rows[live.window] for rows in layer.window]
        if layer.entries is None:
            continue
        tails = (layer.tails, layer.index_tails)
        parts += [
            torch.stack([rows[live.tail] for rows in tail], dim=1)
            for tail in tails if tail is not None
        ]  # fmt: skip
        if schema.sum_rows:
            rows = [
                part[: length // 16 * 16].float().unflatten(0, (-1, 16)) for part in layer.tails
            ]
            is_present = torch.ones(rows[0].shape[:2], dtype=torch.bool)
            parts.append(sum_groups(*rows, is_present)[live.groups, 0])
        for rows in (layer.entries, layer.index_keys):
            if rows is not None:
                parts += [part[live.entries] for part in rows]
    return parts


def assert_same(mine, other):
    """Two lists of rows are the same, byte for byte."""
    for got, want in zip(mine, other, strict=True):
        assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


def _stored(pages, page, rows):
    return [pages.data[page, rows], pages.scales[page, rows]]
