"""`dsv4 bench tune`: finds the launch parameters of this GPU's architecture.

For each work and size, graph replay times the candidates of `tune_cases` and the present launch.
The present launch stays unless another is quicker by more than 2 %. A size stands for all sizes
down to the next smaller one, and the largest for all above it.

Steps of CSA are timed with windows that close: every fourth token closes one, and these steps are
the slowest. Steps of HCA are timed with open windows, plus a quarter of the time of windows that
close. Only one of 128 tokens closes an HCA window, so by frequency the slow steps would not count.
Chunks are timed on one request from its start, gathers on listed rows.
"""

import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

import torch

from dsv4.kernels.triton import launch_table
from dsv4.kernels.triton.launch import (
    TABLE_PATH,
    TUNED_WORKS,
    AnyLaunch,
    LaunchStep,
    Steps,
    architecture,
    architecture_steps,
    format_table,
    launch_fields,
    pick,
    step_fields,
)
from dsv4.tools.bench import timing
from dsv4.tools.bench.environment import require_cuda
from dsv4.tools.bench.tune_cases import CANDIDATES, Case, build_cases, problem_of, work_sizes
from dsv4.tools.console import printable, track

MARGIN = 0.02
NUM_ROUNDS = 3
MAX_WORKERS = 16  # each holds a CUDA context

L = TypeVar("L", bound=AnyLaunch)


class Trial(NamedTuple):
    """A launch of a work to try."""

    work: str
    launch: AnyLaunch


class Choice(NamedTuple):
    """The present launch of a work at a size, the chosen one, and every time in microseconds."""

    work: str
    size: int
    present: AnyLaunch
    chosen: AnyLaunch
    times: Mapping[AnyLaunch, float]

    def as_json(self) -> dict[str, Any]:
        launches = {name: launch_fields(getattr(self, name)) for name in ("present", "chosen")}
        times = [{"launch": launch_fields(each), "us": us} for each, us in self.times.items()]
        return {**self._asdict(), **launches, "times": times}


def bench_tune(*, is_written: bool) -> dict[str, Any]:
    """Tune every work; `is_written` updates the committed table in place."""
    require_cuda("tune")
    device = torch.device("cuda", torch.cuda.current_device())
    name = architecture(device)
    present = architecture_steps(name)
    trials = [
        Trial(work, launch) for work in TUNED_WORKS for launch in candidates(work, present[work])
    ]
    problems = _problems(trials)
    choices = _choose_all(usable_launches(trials, problems), present)
    chosen = {work: list(map(step_fields, steps)) for work, steps in chosen_steps(choices).items()}
    if is_written:
        listed = launch_table.LAUNCHES
        TABLE_PATH.write_text(format_table({**listed, name: {**listed.get(name, {}), **chosen}}))
    return {
        "architecture": name,
        "choices": [choice.as_json() for choice in choices],
        "skipped": [
            {"work": work, "launch": launch_fields(launch), "problem": problem}
            for (work, launch), problem in problems.items()
        ],
        "table": chosen,
        "written": str(TABLE_PATH) if is_written else None,
    }


def candidates(work: str, present: Steps) -> tuple[AnyLaunch, ...]:
    """List the launches to try, the present ones first."""
    return tuple(dict.fromkeys([*(step.launch for step in present), *CANDIDATES[work]]))


def usable_launches(
    trials: Sequence[Trial], problems: Mapping[Trial, str]
) -> dict[str, list[AnyLaunch]]:
    """List the launches of each work that have no problem; every work needs one."""
    usable: dict[str, list[AnyLaunch]] = {trial.work: [] for trial in trials}
    for trial in trials:
        if trial not in problems:
            usable[trial.work].append(trial.launch)
    for work, launches in usable.items():
        if not launches:
            reasons = {text for trial, text in problems.items() if trial.work == work}
            raise RuntimeError(f"{work}: no launch can be used: {'; '.join(sorted(reasons))}")
    return usable


def choose(times: Mapping[L, float], present: L) -> L:
    """Choose the quickest launch, but the present one if it is slower by at most the margin."""
    quickest = min(times, key=times.__getitem__)
    if present in times and times[quickest] >= (1 - MARGIN) * times[present]:
        return present
    return quickest


def merge_steps(winners: Sequence[tuple[int, L]]) -> tuple[LaunchStep[L], ...]:
    """Build steps from the winner of each size, ascending; merge neighbours with the same one."""
    runs = itertools.groupby(winners, key=itemgetter(1))
    *steps, last = [LaunchStep([*run][-1][0], launch) for launch, run in runs]
    return (*steps, LaunchStep(None, last.launch))


def chosen_steps(choices: Sequence[Choice]) -> dict[str, Steps]:
    """Build the table of an architecture; the choices of a work come one after the other."""
    return {
        work: merge_steps([(choice.size, choice.chosen) for choice in of_work])
        for work, of_work in itertools.groupby(choices, key=attrgetter("work"))
    }


def _problems(trials: Sequence[Trial]) -> dict[Trial, str]:
    """Compile every launch in parallel; return the unusable ones and why.

    Triton's cache on disk keeps the compiled kernels for the timing.
    """
    problems = {}
    num_workers = min(len(trials), os.cpu_count() or 1, MAX_WORKERS)
    with ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        running = {pool.submit(problem_of, *trial): trial for trial in trials}
        for finished in track(as_completed(running), "compile", total=len(trials)):
            problem, trial = finished.result(), running[finished]
            if problem is not None:
                problems[trial] = problem
                text = f"skipped {trial.work}, {trial.launch}: {problem}"
                print(printable(text), file=sys.stderr)
    return problems


def _choose_all(
    usable: Mapping[str, Sequence[AnyLaunch]], present: Mapping[str, Steps]
) -> list[Choice]:
    work_and_size = [(work, size) for work in usable for size in work_sizes(work)]
    choices = []
    for work, size in track(work_and_size, "time"):
        times = _times(list(build_cases(work, size, is_rotating=True)), usable[work])
        launch: AnyLaunch = pick(present[work], size)
        choices.append(Choice(work, size, launch, choose(times, launch), times))
    return choices


def _times(cases: Sequence[Case], launches: Sequence[AnyLaunch]) -> dict[AnyLaunch, float]:
    """Weighted microseconds per layer: the quickest of several rounds, launches alternating."""
    times = dict.fromkeys(launches, math.inf)
    for _, launch in itertools.product(range(NUM_ROUNDS), launches):
        time = sum(
            case.weight * timing.replay_time(partial(case.run, launch)) / case.num_layers
            for case in cases
        )
        times[launch] = min(times[launch], time)
    return times
