"""Read and check the masks and positions of padded batches.

The functions know columns and lengths alone, the cached tokens of each row, and no requests.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.integrations.transformers.columns import BoolArray, Columns, IntArray

NO_MASK = {"sliding_attention": None}  # transformers builds no 4D mask if it gets a dict


def read_mask(
    attention_mask: Any, columns: Columns, *, batch: int, num_columns: int
) -> BoolArray | None:
    """Find the new columns that hold tokens, after the cached `columns`.

    Args:
        attention_mask: `[batch, columns so far + num_columns]`, 0 for padding, or None.

    Returns:
        `[batch, num_columns]`, or None if every new column holds a token.
    """
    if attention_mask is None:
        return None
    expected = [batch, columns.count + num_columns]
    is_tensor = isinstance(attention_mask, Tensor)
    got = list(attention_mask.shape) if is_tensor else type(attention_mask).__name__
    if got != expected:
        raise ValueError(
            f"Invalid attention_mask: expected a tensor {expected}, one column for each of "
            f"the cache's {columns.count} and each new one, got {got}"
        )
    if num_columns == 1:  # a decode step; the earlier columns were checked when they were new
        attention_mask = attention_mask[:, -1:]
    mask: BoolArray = (attention_mask != 0).cpu().numpy()
    past, is_token = np.split(mask, [mask.shape[1] - num_columns], axis=1)
    if columns.count and past.size and not np.array_equal(past, columns.read(0, columns.count)):
        raise ValueError(
            "Invalid attention_mask: expected the padding that the cached columns were stored "
            "with, got another; what generate appends to a finished row is stored as tokens"
        )
    return None if is_token.all() else is_token


def check_last_column(is_token: BoolArray | None, lengths: IntArray) -> None:
    """Refuse right padding in `generate`, which reads the logits of the last column."""
    if is_token is None or not is_token.shape[1]:
        return
    is_padded = (is_token.any(axis=1) | (lengths > 0)) & ~is_token[:, -1]
    if is_padded.any():
        raise ValueError(
            "Right padding is not supported in generate, which takes the logits of the last "
            f"column: row {int(is_padded.argmax())} ends with padding; use left padding "
            "(tokenizer.padding_side = 'left')"
        )


def check_positions(
    position_ids: Tensor | None, is_token: BoolArray | None, lengths: IntArray, *, num_columns: int
) -> None:
    """Refuse positions that do not continue the rows."""
    if position_ids is None:
        return
    if is_token is None:
        is_token = np.ones((len(lengths), num_columns), dtype=np.bool_)
    expected = lengths[:, None] + np.cumsum(is_token, axis=1) - 1
    given = np.broadcast_to(position_ids.cpu().numpy(), expected.shape)
    is_wrong = (given != expected) & is_token
    if is_wrong.any():
        row, column = (int(idx[0]) for idx in np.nonzero(is_wrong))
        raise ValueError(
            f"Invalid position_ids: expected {expected[row, column]} in row {row}, column "
            f"{column}, got {given[row, column]}: a row's positions go on where the cache ends; "
            "leave position_ids out"
        )


def token_index(
    is_token: BoolArray | None, devices: Iterable[torch.device]
) -> dict[torch.device, Tensor] | None:
    """Return the flat indices of tokens among rows × columns by device; None without padding."""
    if is_token is None:
        return None
    index = torch.from_numpy(np.flatnonzero(is_token))
    return {each.device: each for each in map(index.to, devices)}
