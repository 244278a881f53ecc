"""The choice of launches by made-up times, and the check of their bytes."""

import json
import runpy

import pytest
import torch

from dsv4.kernels.triton import launch_table
from dsv4.kernels.triton.launch import (
    TUNED_WORKS,
    GatherLaunch,
    Launch,
    LaunchStep,
    committed_table,
    format_table,
    parse_table,
    pick,
    step_fields,
)
from dsv4.layer_schedule import AttentionType
from dsv4.tools.bench import command as bench_command
from dsv4.tools.bench import timing, tune, tune_cases
from dsv4.tools.bench.tune import (
    Choice,
    Trial,
    candidates,
    choose,
    chosen_steps,
    merge_steps,
    usable_launches,
)
from dsv4.tools.bench.tune_cases import (
    CANDIDATES,
    WRITES,
    Case,
    build_cases,
    problem_of,
    work_sizes,
)
from dsv4.tools.cli import main

A, B, C = Launch(1), Launch(2), Launch(4)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({A: 10.0, B: 5.0, C: 7.0}, B),
        ({A: 10.0, B: 9.81}, A),
        ({A: 10.0, B: 9.8}, A),
        ({A: 10.0, B: 9.79}, B),
        ({A: 10.0, B: 11.0}, A),
        ({A: 10.0}, A),
        ({B: 10.0, C: 9.99}, C),
    ],
    ids=["quickest", "1.9 %", "2 %", "2.1 %", "slower", "alone", "present unusable"],
)
def test_the_present_launch_stays_within_the_margin(times, chosen):
    assert choose(times, A) == chosen


@pytest.mark.parametrize(
    ("winners", "steps"),
    [
        ([(1, A)], [(None, A)]),
        ([(1, A), (32, A), (128, A)], [(None, A)]),
        ([(1, A), (32, B), (128, B), (256, C)], [(1, A), (128, B), (None, C)]),
        ([(1, A), (32, A), (128, B), (256, A)], [(32, A), (128, B), (None, A)]),
    ],
)
def test_neighbours_with_the_same_winner_are_one_step(winners, steps):
    merged = merge_steps(winners)
    assert merged == tuple(LaunchStep(*step) for step in steps)
    assert all(pick(merged, size) == launch for size, launch in winners)


def test_launches_in_use_are_candidates():
    in_use = Launch(16, channels=256)
    present = (LaunchStep(1, in_use), LaunchStep(None, Launch(4)))
    tried = candidates("csa decode", present)
    assert tried == (in_use, Launch(4), Launch(2), Launch(8))


def test_a_launch_with_a_problem_is_left_out():
    trials = [Trial("swa decode", A), Trial("swa decode", B), Trial("swa step", A)]
    usable = usable_launches(trials, {trials[0]: "spills 3 registers"})
    assert usable == {"swa decode": [B], "swa step": [A]}


def test_a_work_without_a_launch_is_refused():
    trials = [Trial("swa decode", A), Trial("swa decode", B)]
    with pytest.raises(RuntimeError, match="swa decode: no launch can be used: spills; threads"):
        usable_launches(trials, {trials[0]: "threads", trials[1]: "spills"})


def test_the_chosen_steps_are_a_table():
    choices = [
        Choice(work, size, committed_table()["sm_90"][work][0].launch, CANDIDATES[work][i % 2], {})
        for work in TUNED_WORKS
        for i, size in enumerate(work_sizes(work))
    ]
    steps = chosen_steps(choices)
    assert [step.up_to for step in steps["csa decode"]] == [1, 32, 128, None]
    assert [step.up_to for step in steps["gather"]] == [32 * 512, None]
    listed = {work: [step_fields(step) for step in found] for work, found in steps.items()}
    table = parse_table({**launch_table.LAUNCHES, "sm_100": listed})
    assert table["sm_100"] == steps


def test_every_work_has_candidates_and_sizes():
    assert CANDIDATES.keys() == TUNED_WORKS.keys()
    for work, launches in CANDIDATES.items():
        assert len(set(launches)) == len(launches) > 1
        assert all(type(launch) is TUNED_WORKS[work] for launch in launches)
        assert list(work_sizes(work)) == sorted(set(work_sizes(work)))


def wide_spills(work, launch):
    return "spills" if launch.num_warps == 4 else None


def test_launches_are_tried_in_processes_of_their_own(monkeypatch, capsys):
    monkeypatch.setattr(tune, "problem_of", wide_spills)
    monkeypatch.setattr(tune, "MAX_WORKERS", 1)
    trials = [Trial("swa decode", launch) for launch in (A, B, C)]
    assert tune._problems(trials) == {trials[2]: "spills"}
    assert capsys.readouterr().err == f"skipped swa decode, {C}: spills\n"


class FakeGPU:
    """Make up times that depend on the warps alone, and on whether a window closes."""

    def __init__(self, monkeypatch, path) -> None:
        path.write_text(format_table(launch_table.LAUNCHES))
        monkeypatch.setattr(tune, "TABLE_PATH", path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
        monkeypatch.setattr(bench_command, "environment", dict)
        monkeypatch.setattr(tune, "_problems", lambda trials: self.problems)
        monkeypatch.setattr(tune, "build_cases", self.build_cases)
        monkeypatch.setattr(timing, "replay_time", lambda run: 2 * run())
        self.problems: dict = {Trial("gather", GatherLaunch(1, 1)): "spills 2 registers"}

    def build_cases(self, work, size, *, is_rotating):
        assert is_rotating
        best = 2 if size <= 32 else 8
        yield Case(lambda launch: 10 + abs(launch.num_warps - best), 2, 1.0)
        yield Case(lambda launch: 0.0, 2, 0.25)


@pytest.fixture
def fake_gpu(monkeypatch, tmp_path):
    return FakeGPU(monkeypatch, tmp_path / "table.py")


def test_the_command_prints_a_table(fake_gpu, capsys):
    assert main(["bench", "tune"]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.strip().splitlines()[-1])
    assert result["table"]["csa decode"] == [
        {"up_to": 32, "num_warps": 2},
        {"up_to": None, "num_warps": 8},
    ]
    assert result["architecture"] == "sm_100" and result["written"] is None
    assert result["skipped"][0]["problem"] == "spills 2 registers"
    assert '      {"up_to": 32, "num_warps": 2},\n' in out and "Launches of sm_100" in out
    assert read_table() == launch_table.LAUNCHES


def test_the_command_writes_one_architecture(fake_gpu, capsys):
    assert main(["bench", "tune", "--write", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    written = read_table()
    assert list(written) == ["sm_80", "sm_90", "sm_100"]
    assert written["sm_90"] == launch_table.LAUNCHES["sm_90"]
    assert written["sm_100"] == {**launch_table.LAUNCHES["sm_100"], **result["table"]}
    parse_table(written)


def read_table() -> dict:
    """The table that the command may have written."""
    return runpy.run_path(str(tune.TABLE_PATH))["LAUNCHES"]


def test_times_are_weighted_and_the_quickest_of_the_rounds(monkeypatch):
    cases = [Case(lambda _: None, 2, 1.0), Case(lambda _: None, 4, 0.25)]
    measured = iter([8.0, 16.0, 80.0, 160.0, 6.0, 16.0, 80.0, 160.0, 8.0, 16.0, 80.0, 144.0])
    monkeypatch.setattr(timing, "replay_time", lambda _: next(measured))
    assert tune._times(cases, [A, B]) == {A: 6 / 2 + 16 / 4 / 4, B: 80 / 2 + 144 / 4 / 4}


@pytest.mark.parametrize(
    ("work", "size", "expected"),
    [
        ("swa decode", 3, [([253] * 3, [254] * 3, 1.0)]),
        ("csa decode", 1, [([255], [256], 1.0)]),
        (
            "hca decode",
            2,
            [
                ([253, 253], [254, 254], 1.0),
                ([255, 253], [256, 254], 1.0),
                ([255, 255], [256, 256], 0.25),
            ],
        ),
        ("csa step", 4, [([254, 254], [256, 256], 1.0)]),
        (
            "hca step",
            4,
            [
                ([252, 252], [254, 254], 1.0),
                ([254, 252], [256, 254], 1.0),
                ([254, 254], [256, 256], 0.25),
            ],
        ),
        ("csa chunk", 512, [([0], [512], 1.0)]),
    ],
)
def test_what_is_timed(monkeypatch, work, size, expected):
    built = []

    def write_case(config, before, after, *, device):
        layer, kind = WRITES[work]
        assert {spec.attention_type for spec in config.schedule} == {layer}
        assert config.num_layers == (4 if kind == "chunk" else 43)
        assert (config.drafts_per_step >= after[0] - before[0] - 1) == (kind != "chunk")
        built.append((before, after))
        return [None] * config.num_layers

    monkeypatch.setattr(tune_cases, "write_case", write_case)
    cases = list(build_cases(work, size, is_rotating=True))
    assert [(*args, case.weight) for args, case in zip(built, cases, strict=True)] == expected


@pytest.mark.parametrize(
    "work",
    [
        "swa decode",
        "csa decode",
        "hca decode",
        "swa step",
        pytest.param("csa chunk", marks=pytest.mark.slow),
    ],
)
def test_a_launch_that_stores_the_reference_s_bytes(monkeypatch, work):
    monkeypatch.setattr(tune_cases, "work_sizes", lambda work: (4,))
    assert problem_of(work, CANDIDATES[work][1], device=DEVICE) is None


def test_a_launch_that_does_not_run_has_a_problem(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of resource\nand more")

    monkeypatch.setattr(tune_cases, "work_sizes", lambda work: (1,))
    monkeypatch.setattr(tune_cases.flush_write, "write_layer", fail)
    problem = problem_of("swa decode", Launch(4), device=DEVICE)
    assert problem == "RuntimeError: out of resource"


def test_a_launch_that_spills_has_a_problem(monkeypatch):
    spills = iter([{1: 8}, {1: 8, 2: 0, 3: 5}])
    monkeypatch.setattr(tune_cases, "work_sizes", lambda work: ())
    monkeypatch.setattr(tune_cases, "_spills", lambda: next(spills))
    assert problem_of("swa decode", Launch(4)) == "spills 5 registers"


def test_a_launch_that_stores_other_bytes_raises(monkeypatch):
    monkeypatch.setattr(tune_cases, "work_sizes", lambda work: ())
    monkeypatch.setattr(tune_cases.flush_write, "write_layer", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match=r"swa decode, Launch.*the bytes differ"):
        problem_of("swa decode", Launch(4), device=DEVICE)


@pytest.mark.gpu
def test_a_gather_on_a_gpu():
    assert problem_of("gather", GatherLaunch(8, 4)) is None
    assert tune_cases._spills(), "kernels are found"


@pytest.mark.gpu
def test_hca_on_a_gpu():
    assert problem_of("hca decode", Launch(4, channels=32)) is None
    assert {layer for layer, _ in WRITES.values()} == set(AttentionType)
