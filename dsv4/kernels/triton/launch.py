"""Launch parameters by architecture, work and size; nothing is tuned at run time.

`launch_table` lists them:

    {"sm_90": {"csa decode": [{"up_to": 32, "num_warps": 8}, {"up_to": None, "num_warps": 4}]}}

A work has steps of ascending size. The size is tokens of a write or of index queries, rows of a
gather, scores of a top-k program, query heads or splits; None is any number. Fields that a step
leaves out have their defaults. A work that an architecture does not list comes from the nearest
older one that lists it, or else from the oldest. Bounds on registers are then left out. The CPU,
where the interpreter runs, uses sm_90's. `dsv4 bench tune` measures and writes the works of the
write path and the gathers. Nothing was measured on Blackwell yet.
"""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch

from dsv4.formats import INDEX_FORMATS
from dsv4.kernels.triton import launch_table
from dsv4.kernels.triton.operands import PLAN_PTRS
from dsv4.kernels.triton.primitives import EARLY_ARCH, INTERPRETED
from dsv4.layer_schedule import SHARED_RATIOS, AttentionType

Kind = Literal["decode", "step", "chunk"]
KINDS: tuple[Kind, ...] = ("decode", "step", "chunk")
TABLE_PATH = Path(launch_table.__file__)
INTERPRETED_AS = "sm_90"
ATTEND_SIZES = [
    "rows_stride", "row_stride", "pool_rows", "num_entries", "table_stride", "first_token",
    "num_splits", "split_step", "tile_step", "tiles_per_split",
]  # arguments that no attention kernel is compiled for  # fmt: skip
ATTEND_UNALIGNED = ["sinks_ptr", "rows_ptr", *PLAN_PTRS]  # its pointers of any alignment
LISTED_TYPE = "dict[str, dict[str, list[dict[str, int | None]]]]"
LINE_LENGTH = 100
INTERPRETED_MULTIPROCESSORS = 4  # few, since programs run one after the other


class Launch(NamedTuple):
    """Programs of one launch of the write path."""

    num_warps: int
    channels: int = 64  # of an HCA program
    rows: int = 1  # entries that a CSA program pools at once in a forward with chunks
    window_rows: int = 1
    maxnreg: int | None = None


class GatherLaunch(NamedTuple):
    """Programs of one gather."""

    tile: int  # output rows per program
    num_warps: int


class QueryLaunch(NamedTuple):
    """Programs that prepare index queries, with so many heads each."""

    heads: int
    num_warps: int


class ScoreLaunch(NamedTuple):
    """Programs that score index keys."""

    tile: int  # keys multiplied at a time
    num_warps: int
    stages: int  # tiles in flight: stages - 1 are loaded beside a product; mxfp4 always loads one
    programs_per_sm: int  # the most for each multiprocessor that keys are split over
    tokens: int = 1
    maxnreg: int | None = None  # bounds the registers of a thread


class GroupLaunch(NamedTuple):
    """Programs that find the largest of each group of scores, with so many scores each."""

    scores: int
    num_warps: int


class TopkLaunch(NamedTuple):
    """Programs that choose entries, by the scores that a program holds."""

    num_warps: int


class AttendLaunch(NamedTuple):
    """Programs of attention.

    Blocks of 64 heads need 576 columns of Blackwell's tensor memory, which has 512.
    """

    heads: int
    tile: int  # rows taken at once
    num_warps: int


class HopperLaunch(NamedTuple):
    """Programs of attention in `hopper`. Costs are in 1/64 of the time of a tile of 64 heads."""

    heads: int
    stages: int  # those that fit shared memory
    decoding_registers: int  # of a thread
    multiplying_registers: int
    start_cost: int = 120  # a program without tiles
    tile_cost: int = 64  # each tile
    tile: int = 64
    num_warps: int = 4  # of one of the two partitions that multiply


class DenseLaunch(NamedTuple):
    """Programs of attention over dense rows."""

    copying_registers: int  # of a thread
    multiplying_registers: int
    num_warps: int = 4  # of one of the two partitions that multiply


class CombineLaunch(NamedTuple):
    """Splits of attention, and the programs that combine them.

    Costs are in 1/64 of a tile's time. join_cost is that of storing the accumulators of 64 heads
    and loading them again. Where bits must not depend on the batch, tokens of up to whole_rows rows
    have one split, and a split of others has split_rows, or more if there is little room.
    """

    splits: int  # read at once
    num_warps: int
    channels: int = 512  # of a program, which has all where rows have no such parts
    combine_cost: int = 48  # of combining at all
    part_cost: int = 1  # of each split of 64 heads
    join_cost: int = 150
    whole_rows: int = 1152
    split_rows: int = 576


AnyLaunch = (
    Launch | GatherLaunch | QueryLaunch | ScoreLaunch | GroupLaunch | TopkLaunch | AttendLaunch
    | HopperLaunch | DenseLaunch | CombineLaunch
)  # fmt: skip
L = TypeVar("L", bound=AnyLaunch)


class LaunchStep(NamedTuple, Generic[L]):
    """The launch of up to that many tokens, rows, scores, heads or splits; None is any number."""

    up_to: int | None
    launch: L


Steps = tuple[LaunchStep[Any], ...]
LaunchTable = dict[str, dict[str, Steps]]  # by architecture and work
ListedTable = Mapping[str, Mapping[str, list[dict[str, int | None]]]]  # the same as a literal


def work_name(ratio: int, kind: Kind) -> str:
    """The table's name of a layer's writes in a forward of that kind."""
    return f"{_LAYER_NAMES[ratio]} {kind}"


_LAYER_NAMES = {
    **{layer.ratio: layer.name.lower() for layer in AttentionType},
    **dict.fromkeys(SHARED_RATIOS, "csa"),
}
TUNED_WORKS: dict[str, type[AnyLaunch]] = {
    **{work_name(layer.ratio, kind): Launch for layer in AttentionType for kind in KINDS},
    "gather": GatherLaunch,
}
WORKS: dict[str, type[AnyLaunch]] = {
    **TUNED_WORKS,
    "index query": QueryLaunch,
    **{f"score {name}": ScoreLaunch for name in INDEX_FORMATS},
    "score fp8 chunk": ScoreLaunch,
    "score mxfp4 chunk": ScoreLaunch,
    "top-k groups": GroupLaunch,
    "top-k": TopkLaunch,
    "attend fp32": AttendLaunch,
    "attend bf16": AttendLaunch,
    "attend hopper": HopperLaunch,
    "attend hopper chunk": HopperLaunch,
    "attend hopper dense": DenseLaunch,
    "combine": CombineLaunch,
}


def launch_parameters(ratio: int, kind: Kind, num_tokens: int, device: torch.device) -> Launch:
    """The launch of a layer of that ratio, in a forward of that kind."""
    return find_launch(Launch, work_name(ratio, kind), device, num_tokens)


def gather_launch(num_rows: int, device: torch.device) -> GatherLaunch:
    """The launch of a gather of that many rows, from any source."""
    return find_launch(GatherLaunch, "gather", device, num_rows)


def find_launch(kind: type[L], work: str, device: torch.device, count: int = 1) -> L:
    """The launch of a work for so many tokens, rows, scores, heads or splits."""
    launch = pick(work_steps(work, device), count)
    assert isinstance(launch, kind), (work, launch)
    return launch


@functools.cache
def work_steps(work: str, device: torch.device) -> Steps:
    """The steps of a work on that device, which is asked once."""
    return architecture_steps(architecture(device))[work]


def architecture_steps(name: str) -> dict[str, Steps]:
    """The steps of every work on that architecture.

    A kernel that fits a bound on registers where it was measured may spill on another architecture.
    Such a bound is therefore not taken over.
    """
    table = committed_table()
    return {work: _nearest_steps(name, work, table) for work in WORKS}


def pick(steps: Iterable[LaunchStep[L]], count: int) -> L:
    """The launch of the first step that is large enough."""
    for up_to, launch in steps:
        if up_to is None or count <= up_to:
            return launch
    raise AssertionError(f"the last step is for any number, also for {count}")


def architecture(device: torch.device) -> str:
    """A device's name in the table."""
    if device.type != "cuda":
        return INTERPRETED_AS
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def is_hopper(device: torch.device) -> bool:
    """Whether the kernels of `hopper` run on that device; the interpreter has none for them."""
    return not INTERPRETED and architecture(device) == "sm_90"


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether launches may begin beside the launch before, which older GPUs lack.

    `primitives.wait_for_launch_before` waits there, and there alone.
    """
    return bool(_version(architecture(device)) >= EARLY_ARCH.value)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a GPU; a few for the interpreter."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def nearest_architecture(name: str, listed: Iterable[str]) -> str:
    """The architecture itself, or the nearest older one that is listed, or the oldest."""
    by_age = sorted(listed, key=_version)
    older = [other for other in by_age if _version(other) <= _version(name)]
    return older[-1] if older else by_age[0]


@functools.cache
def committed_table() -> LaunchTable:
    """The table of `launch_table`."""
    return parse_table(launch_table.LAUNCHES)


def parse_table(listed: ListedTable) -> LaunchTable:
    """Make launches of a table; tests check the sizes and numbers of the committed one."""

    def parse(work: str, *, up_to: int | None, **fields: Any) -> LaunchStep[Any]:
        return LaunchStep(up_to, WORKS[work](**fields))

    return {
        name: {work: tuple(parse(work, **step) for step in works[work]) for work in works}
        for name, works in listed.items()
    }


def format_table(listed: ListedTable) -> str:
    """Write the module `launch_table`: architectures by age, works in the order of `WORKS`."""
    ordered = {
        name: {work: listed[name][work] for work in WORKS if work in listed[name]}
        for name in sorted(listed, key=_version)
    }
    start = f"LAUNCHES: {LISTED_TYPE} = "
    return f'"""{launch_table.__doc__}"""\n\n{start}{_format(ordered, used=len(start))}\n'


def _format(value: Any, *, indent: int = 0, used: int = 0) -> str:
    """Write a literal on one line if it fits after `used` columns, else an item a line.

    Steps of one work never share a line.
    """
    line = repr(value).replace("'", '"')
    is_short = indent + used + len(line) < LINE_LENGTH and "}, {" not in line
    if is_short or not isinstance(value, dict | list):
        return line
    items = value.items() if isinstance(value, dict) else [("", item) for item in value]
    body = ""
    for name, item in items:
        start = f'"{name}": ' if name else ""
        text = _format(item, indent=indent + 4, used=len(start))
        body += f"{' ' * (indent + 4)}{start}{text},\n"
    return f"{line[0]}\n{body}{' ' * indent}{line[-1]}"


def step_fields(step: LaunchStep[Any]) -> dict[str, int | None]:
    """A step as the table lists it."""
    return {"up_to": step.up_to, **launch_fields(step.launch)}


def launch_fields(launch: AnyLaunch) -> dict[str, int | None]:
    """The fields of a launch that don't have their defaults."""
    defaults = launch._field_defaults
    return {k: v for k, v in launch._asdict().items() if k not in defaults or defaults[k] != v}


def _nearest_steps(name: str, work: str, table: LaunchTable) -> Steps:
    nearest = nearest_architecture(name, [other for other in table if work in table[other]])
    steps = table[nearest][work]
    if nearest == name or "maxnreg" not in WORKS[work]._fields:
        return steps
    return tuple(step._replace(launch=step.launch._replace(maxnreg=None)) for step in steps)


def _version(name: str) -> int:
    return int(name.removeprefix("sm_"))
