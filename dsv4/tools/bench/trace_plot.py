"""`dsv4 bench trace --plot`: the share of prompt tokens that is found over memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

STYLES = {
    "bound": ("#8c8c8c", ":"),
    "lru": ("black", "--"),
    "checkpoints on the host": ("#1b9e77", "-"),
    "one budget": ("#3573b1", "-"),
    "one budget, no branches": ("#e6ab02", "-"),
    "one budget, none along prompts": ("#d95f02", "-"),
    "one budget, ends of prompts": ("#6b4c9a", "-"),
    "halo only": ("#a6761d", "-"),
}
LABELS = {"bound": "unlimited, at whole blocks", "lru": "plain LRU, full attention"}


def plot_trace(result: Mapping[str, Any], path: Path) -> None:
    """Draw a line for each policy; the last point of each holds everything."""
    from matplotlib.figure import Figure

    rows = result["rows"]
    sizes = sorted({row["blocks"] for row in rows if row["blocks"]})
    labels = [f"{size:,}" for size in sizes] + ["all"]
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    for name, (color, line) in STYLES.items():
        if name in LABELS:
            found = {row["blocks"]: row[name] for row in rows}
        else:
            found = {row["blocks"]: row["found"] for row in rows if row["policy"] == name}
        shares = [100 * found[size] for size in (*sizes, 0)]
        axes.plot(labels, shares, line, color=color, label=LABELS.get(name, name), marker=".")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"memory, in blocks of V4-Flash ({result['block_bytes']:,} bytes)")
    axes.set_ylabel("found, % of the prompt tokens")
    last = result["first"] + result["num_requests"] - 1
    axes.set_title(f"{result['file']}, requests {result['first']:,} to {last:,}", parse_math=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=150)
