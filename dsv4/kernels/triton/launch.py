"""Launch parameters by architecture, work and size; nothing is tuned at run time.

They are read from `launch_table.json`, which `dsv4 bench tune` measures and writes:

    {"sm_90": {"csa decode": [{"up_to": 32, "num_warps": 8}, {"up_to": null, "num_warps": 4}]}}

A work has steps of ascending size; a step's launch is used up to that many tokens, or rows of a
gather, and null is any number. Fields that a step leaves out have their defaults. An architecture
that is not listed uses the nearest older one, or else the oldest, without its bounds on registers;
the CPU, where the interpreter runs, uses sm_90's. Only sm_90 is listed: nothing was measured on
Blackwell yet.
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch

from dsv4.layer_schedule import AttentionType

Kind = Literal["decode", "step", "chunk"]
KINDS: tuple[Kind, ...] = ("decode", "step", "chunk")
TABLE_PATH = Path(__file__).with_name("launch_table.json")
INTERPRETED_AS = "sm_90"


class Launch(NamedTuple):
    """How one launch of the write path is cut into programs.

    channels are those of an HCA program, rows the entries that a CSA program pools at once in a
    forward with chunks, window_rows the window rows of a program.
    """

    num_warps: int
    channels: int = 64
    rows: int = 1
    window_rows: int = 1
    maxnreg: int | None = None


class GatherLaunch(NamedTuple):
    """How one gather is cut into programs. tile is output rows per program."""

    tile: int
    num_warps: int


AnyLaunch = Launch | GatherLaunch
L = TypeVar("L", bound=AnyLaunch)


class LaunchStep(NamedTuple, Generic[L]):
    """The launch of up to that many tokens or rows; None is any number."""

    up_to: int | None
    launch: L


Steps = tuple[LaunchStep[Any], ...]
LaunchTable = dict[str, dict[str, Steps]]  # by architecture and work


def work_name(ratio: int, kind: Kind) -> str:
    """The table's name of a layer's writes in a forward of that kind."""
    return f"{_LAYER_NAMES[ratio]} {kind}"


_LAYER_NAMES = {layer.ratio: layer.name.lower() for layer in AttentionType}
WORKS: dict[str, type[Launch] | type[GatherLaunch]] = {
    **{work_name(layer.ratio, kind): Launch for layer in AttentionType for kind in KINDS},
    "gather": GatherLaunch,
}


def launch_parameters(ratio: int, kind: Kind, num_tokens: int, device: torch.device) -> Launch:
    """For a layer of that ratio, in a forward of that kind."""
    return pick(launch_steps(ratio, kind, device), num_tokens)


def gather_launch(num_rows: int, device: torch.device) -> GatherLaunch:
    """For a gather of that many rows, whatever their source."""
    return pick(gather_steps(device), num_rows)


@functools.cache
def launch_steps(ratio: int, kind: Kind, device: torch.device) -> tuple[LaunchStep[Launch], ...]:
    """Every launch that `launch_parameters` can return, and up to how many tokens."""
    return device_steps(device)[work_name(ratio, kind)]


@functools.cache
def gather_steps(device: torch.device) -> tuple[LaunchStep[GatherLaunch], ...]:
    """Every launch that `gather_launch` can return, and up to how many rows."""
    return device_steps(device)["gather"]


def device_steps(device: torch.device) -> dict[str, Steps]:
    """The steps of every work on that device."""
    return architecture_steps(architecture(device))


def architecture_steps(name: str) -> dict[str, Steps]:
    """The steps of every work on that architecture.

    A kernel that fits a bound on registers where it was measured may spill on another architecture,
    which therefore takes over none.
    """
    table = committed_table()
    nearest = nearest_architecture(name, table)
    if nearest == name:
        return table[name]
    return {work: tuple(map(_without_bound, steps)) for work, steps in table[nearest].items()}


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


def nearest_architecture(name: str, listed: Iterable[str]) -> str:
    """The architecture itself, or the nearest older one that is listed, or the oldest."""
    by_age = sorted(listed, key=_version)
    older = [other for other in by_age if _version(other) <= _version(name)]
    return older[-1] if older else by_age[0]


@functools.cache
def committed_table() -> LaunchTable:
    """The table of `launch_table.json`, read once."""
    return parse_table(TABLE_PATH.read_text())


def parse_table(text: str) -> LaunchTable:
    """Read a table; every architecture must list every work."""
    try:
        listed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"Invalid launch table: expected JSON, got {error}") from error
    _check("launch table", listed, isinstance(listed, dict) and listed, "architectures by name")
    return {name: _parse_architecture(name, works) for name, works in listed.items()}


def format_table(table: LaunchTable) -> str:
    """The text of a table, one step a line, architectures by age."""
    architectures = [
        f"  {json.dumps(name)}: {{\n{_format_works(table[name])}\n  }}"
        for name in sorted(table, key=_version)
    ]
    return "{\n" + ",\n".join(architectures) + "\n}\n"


def step_fields(step: LaunchStep[Any]) -> dict[str, int | None]:
    """A step as the table lists it."""
    return {"up_to": step.up_to, **launch_fields(step.launch)}


def launch_fields(launch: AnyLaunch) -> dict[str, int | None]:
    """The fields of a launch that don't have their defaults."""
    defaults = launch._field_defaults
    return {k: v for k, v in launch._asdict().items() if k not in defaults or defaults[k] != v}


def _without_bound(step: LaunchStep[Any]) -> LaunchStep[Any]:
    if isinstance(step.launch, Launch):
        return step._replace(launch=step.launch._replace(maxnreg=None))
    return step


def _format_works(works: Mapping[str, Steps]) -> str:
    lines = []
    for work in WORKS:
        steps = ",\n".join(f"      {json.dumps(step_fields(step))}" for step in works[work])
        lines.append(f"    {json.dumps(work)}: [\n{steps}\n    ]")
    return ",\n".join(lines)


def _version(name: str) -> int:
    return int(name.removeprefix("sm_"))


def _parse_architecture(name: str, works: Any) -> dict[str, Steps]:
    _check("architecture", name, re.fullmatch(r"sm_\d+", name), "a name like 'sm_90'")
    _check(name, works, isinstance(works, dict), "works by name")
    _check(f"works of {name}", sorted(works), works.keys() == WORKS.keys(), f"{sorted(WORKS)}")
    return {
        work: _parse_steps(f"{name}, {work}", steps, WORKS[work]) for work, steps in works.items()
    }


def _parse_steps(where: str, steps: Any, kind: type[AnyLaunch]) -> Steps:
    _check(where, steps, isinstance(steps, list) and steps, "a list of steps")
    parsed = tuple(
        _parse_step(f"{where}, step {number}", step, kind) for number, step in enumerate(steps)
    )
    sizes = [step.up_to for step in parsed]
    bounds = [size for size in sizes if size is not None]
    is_ascending = bounds == sorted(set(bounds)) and sizes == [*bounds, None]
    _check(f"up_to of {where}", sizes, is_ascending, "ascending sizes and null at the end")
    return parsed


def _parse_step(where: str, step: Any, kind: type[AnyLaunch]) -> LaunchStep[Any]:
    _check(where, step, isinstance(step, dict), "an object of fields")
    defaults = kind._field_defaults
    known, needed = {"up_to", *kind._fields}, {"up_to", *kind._fields} - defaults.keys()
    is_complete = needed <= step.keys() <= known
    _check(f"fields of {where}", sorted(step), is_complete, f"{sorted(needed)} of {sorted(known)}")
    for name, value in step.items():
        can_be_null = name == "up_to" or (name in defaults and defaults[name] is None)
        is_valid = can_be_null if value is None else type(value) is int and value > 0
        _check(f"{name} of {where}", value, is_valid, "a whole number above 0")
    num_warps = step["num_warps"]
    is_power = num_warps & (num_warps - 1) == 0
    _check(f"num_warps of {where}", num_warps, is_power, "a power of two")
    fields = {name: value for name, value in step.items() if name != "up_to"}
    return LaunchStep(step["up_to"], kind(**fields))


def _check(where: str, value: Any, is_valid: object, expected: str) -> None:
    if not is_valid:
        raise ValueError(f"Invalid {where} in the launch table: expected {expected}, got {value!r}")
