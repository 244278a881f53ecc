"""`dsv4 plan --plot`: memory over context length, stacked by component, and the GPU's limit."""

from dataclasses import replace
from pathlib import Path

from dsv4.tools.console import printable
from dsv4.tools.planner.memory_plan import REQUEST_COMPONENTS, MemoryPlan
from dsv4.tools.planner.sizes import short_tokens

NUM_POINTS = 65
GIB = 2**30
COLORS = {
    "weights": "#8c8c8c", "reserved": "#bdbdbd", "shared": "#6b4c9a", "fixed state": "#d95f02",
    "HCA entries": "#e6ab02", "index keys": "#1b9e77", "CSA entries": "#3573b1",
}  # fmt: skip


def component_groups(plan: MemoryPlan) -> dict[str, list[str]]:
    """List the components of each group of the stack, from the bottom."""
    return {
        "weights": ["weights"], "reserved": ["reserved"],
        "shared": [name for name in plan.shared() if name != "undo_slots"],
        "fixed state": [*REQUEST_COMPONENTS, "undo_slots"], "HCA entries": ["hca_entries"],
        "index keys": ["index_keys"], "CSA entries": ["csa_entries", "block_padding"],
    }  # fmt: skip


def stack(plan: MemoryPlan, contexts: list[int]) -> dict[str, list[int]]:
    """Return the bytes of one GPU at each context length, by group; padding included."""
    groups = component_groups(plan)
    series: dict[str, list[int]] = {name: [] for name in groups}
    for context in contexts:
        memory = replace(plan, context_tokens=context).memory
        sizes = {name: size.allocated for name, size in memory.items()}
        sizes |= {"weights": plan.rank_weights_bytes, "reserved": plan.reserved_bytes}
        for name, components in groups.items():
            series[name].append(sum(sizes[component] for component in components))
    return {name: sizes for name, sizes in series.items() if any(sizes)}


def plot_plan(plan: MemoryPlan, path: Path, *, title: str) -> None:
    """Draw memory up to twice the plan's context length, or up to the model's limit."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    contexts = _contexts(plan)
    series = stack(plan, contexts)
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    heights = [[size / GIB for size in sizes] for sizes in series.values()]
    colors = [COLORS[name] for name in series]
    axes.stackplot(contexts, heights, labels=list(series), colors=colors, linewidth=0)
    limit = plan.gpu_bytes / GIB
    axes.axhline(limit, color="black", linewidth=1.2, label=f"GPU: {limit:,.1f} GiB")
    axes.axvline(
        plan.context_tokens, color="black", linewidth=0.8, linestyle=":",
        label=f"the plan: {plan.context_tokens:,} tokens",
    )  # fmt: skip
    if 0 < plan.max_context < contexts[-1]:
        axes.plot(
            plan.max_context, limit, "v", color="black", clip_on=False,
            label=f"fits up to {plan.max_context:,} tokens",
        )  # fmt: skip
    axes.set_xlim(contexts[0], contexts[-1])
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: short_tokens(round(tokens))))
    axes.set_xticks([contexts[-1] * eighth // 8 for eighth in range(9)])
    axes.set(xlabel="tokens of each request", ylabel="GiB on one GPU")
    axes.set_title(printable(title), fontsize=11, parse_math=False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=150)


def _contexts(plan: MemoryPlan) -> list[int]:
    step = plan.config.block_tokens
    last = min(plan.config.max_position, max(2 * plan.context_tokens, 64 * step))
    inner = {last * point // (NUM_POINTS - 1) // step * step for point in range(1, NUM_POINTS)}
    return sorted({1, *inner, last} - {0})
