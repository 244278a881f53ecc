"""`dsv4 inspect --heatmap`: the entries that top-k chose over time, one map per CSA layer."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsv4.tools.inspector.selections import LayerSelections

MAX_CELLS = 240  # per side of a map


class ChoiceMap(NamedTuple):
    """Rates at which entries were chosen, in cells of token_step tokens and entry_step entries.

    rates is `[entry cells, token cells]`: of the tokens that see an entry, the share that chose
    it; NaN if no token sees any. The first cell starts at entry 0 and at first_token.
    """

    rates: NDArray[np.float64]
    first_token: int
    token_step: int
    entry_step: int


def map_choices(layer: LayerSelections) -> ChoiceMap:
    """Count the choices of a layer in at most `MAX_CELLS` cells per side."""
    positions = layer.positions.numpy().astype(np.int64)
    entries = layer.entries.numpy().astype(np.int64)
    visible = layer.visible.numpy()
    first, last = int(positions.min()), int(positions.max())
    token_step = -(-(last - first + 1) // MAX_CELLS)
    entry_step = max(1, -(-int(visible.max()) // MAX_CELLS))
    columns = (positions - first) // token_step
    shape = (max(1, -(-int(visible.max()) // entry_step)), (last - first) // token_step + 1)

    rows, tokens = entries // entry_step, np.broadcast_to(columns[:, None], entries.shape)
    is_chosen = entries >= 0
    cells = rows[is_chosen] * shape[1] + tokens[is_chosen]
    chosen = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
    starts = entry_step * np.arange(shape[0])
    seen = [np.clip(visible - start, 0, entry_step) for start in starts]
    possible = np.stack([np.bincount(columns, each, minlength=shape[1]) for each in seen])
    with np.errstate(invalid="ignore"):
        rates: NDArray[np.float64] = np.where(possible > 0, chosen / possible, np.nan)
    return ChoiceMap(rates, first, token_step, entry_step)


def draw_heatmap(selections: dict[int, LayerSelections], path: Path) -> None:
    """Draw one map for each layer: tokens from left to right, entries from bottom to top."""
    if not selections or not all(len(layer.positions) for layer in selections.values()):
        raise ValueError("Invalid selections: expected tokens in every layer, got none")
    from matplotlib.figure import Figure

    num_columns = min(len(selections), math.ceil(math.sqrt(len(selections))))
    num_rows = math.ceil(len(selections) / num_columns)
    figure = Figure(
        figsize=(max(5.5, 4.2 * num_columns), max(4.0, 3.4 * num_rows)), layout="constrained"
    )
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    maps = {idx: map_choices(layer) for idx, layer in selections.items()}
    rates = np.concatenate([chosen.rates.ravel() for chosen in maps.values()])
    # The first tokens choose all entries that they see; their rate would darken all others.
    highest = float(np.nanquantile(rates, 0.99)) or 1.0 if not np.isnan(rates).all() else 1.0
    for axes, (layer_idx, chosen) in zip(grid, maps.items(), strict=False):
        (rows, columns), first = chosen.rates.shape, chosen.first_token
        image = axes.imshow(
            chosen.rates, origin="lower", aspect="auto", interpolation="nearest",
            vmin=0.0, vmax=highest, cmap="viridis",
            extent=(first, first + columns * chosen.token_step, 0, rows * chosen.entry_step),
        )  # fmt: skip
        axes.set_title(f"layer {layer_idx}", fontsize=10)
        axes.set(xlabel="token", ylabel="entry")
    for axes in grid[len(selections) :]:
        axes.set_visible(False)
    figure.colorbar(
        image, ax=grid[: len(selections)], extend="max" if highest < 1 else "neither",
        label="share of tokens that chose the entry",
    )  # fmt: skip
    figure.suptitle("Entries that top-k chose", fontsize=12)
    figure.savefig(path, dpi=150)
