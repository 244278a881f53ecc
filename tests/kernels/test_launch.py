"""The committed table of launch parameters: look-up, nearest architecture, refusals."""

import itertools
import runpy

import pytest
import torch

from dsv4.kernels.triton import launch, launch_table
from dsv4.kernels.triton.launch import (
    TABLE_PATH,
    WORKS,
    AttendLaunch,
    GatherLaunch,
    Launch,
    LaunchStep,
    ScoreLaunch,
    committed_table,
    find_launch,
    format_table,
    gather_launch,
    launch_parameters,
    nearest_architecture,
    parse_table,
    starts_early,
    work_steps,
)

CPU = torch.device("cpu")
HOPPER, BLACKWELL = torch.device("cuda", 0), torch.device("cuda", 1)


def listed(changes: dict | None = None, architecture: str = "sm_90") -> dict:
    """A table of one architecture, with some works replaced."""
    works = {
        work: [
            {
                "up_to": None,
                **{name: 4 for name in kind._fields if name not in kind._field_defaults},
            }
        ]
        for work, kind in WORKS.items()
    }
    return {architecture: {**works, "gather": [GATHER], **(changes or {})}}


GATHER = {"up_to": None, "tile": 8, "num_warps": 4}


@pytest.fixture
def two_architectures(monkeypatch):
    """sm_90 in two steps and sm_100 in one, on two devices."""
    old = parse_table(
        listed(
            {
                "csa decode": [
                    {"up_to": 1, "num_warps": 8},
                    {"up_to": 32, "num_warps": 4, "rows": 2},
                    {"up_to": None, "num_warps": 2, "maxnreg": 128},
                ],
                "gather": [
                    {"up_to": 100, "tile": 2, "num_warps": 1},
                    {"up_to": None, "tile": 8, "num_warps": 4},
                ],
            }
        )
    )
    new = parse_table(listed(architecture="sm_100"))
    monkeypatch.setattr(launch, "committed_table", lambda: {**old, **new})
    capability = {HOPPER: (9, 0), BLACKWELL: (10, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability.__getitem__)
    launch.work_steps.cache_clear()
    yield
    launch.work_steps.cache_clear()


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (1, Launch(num_warps=8)),
        (2, Launch(num_warps=4, rows=2)),
        (32, Launch(num_warps=4, rows=2)),
        (33, Launch(num_warps=2, maxnreg=128)),
        (1 << 20, Launch(num_warps=2, maxnreg=128)),
    ],
)
def test_a_launch_is_that_of_the_first_step_that_is_large_enough(
    two_architectures, num_tokens, expected
):
    assert launch_parameters(4, "decode", num_tokens, HOPPER) == expected
    assert launch_parameters(4, "decode", num_tokens, CPU) == expected
    assert launch_parameters(4, "decode", num_tokens, BLACKWELL) == Launch(num_warps=4)
    assert launch_parameters(128, "decode", num_tokens, HOPPER) == Launch(num_warps=4)


def test_an_architecture_that_is_not_listed_has_no_bounds_on_registers(two_architectures):
    listed, older = (launch.architecture_steps(name) for name in ("sm_90", "sm_80"))
    assert listed["csa decode"][-1] == LaunchStep(None, Launch(num_warps=2, maxnreg=128))
    assert older["csa decode"][-1] == LaunchStep(None, Launch(num_warps=2))
    assert older["csa decode"][:-1] == listed["csa decode"][:-1]
    assert older["gather"] == listed["gather"]


def test_gathers_are_looked_up_by_rows(two_architectures):
    assert gather_launch(100, HOPPER) == GatherLaunch(tile=2, num_warps=1)
    assert gather_launch(101, HOPPER) == GatherLaunch(tile=8, num_warps=4)


def test_every_launch_of_a_work_is_known_beforehand(two_architectures):
    assert [step.up_to for step in work_steps("csa decode", HOPPER)] == [1, 32, None]
    assert [step.up_to for step in work_steps("csa decode", BLACKWELL)] == [None]
    assert [step.up_to for step in work_steps("gather", HOPPER)] == [100, None]


def test_a_device_is_asked_once(two_architectures, monkeypatch):
    launch_parameters(4, "decode", 1, HOPPER)
    monkeypatch.delattr(torch.cuda, "get_device_capability")
    assert launch_parameters(4, "decode", 33, HOPPER).num_warps == 2


@pytest.mark.parametrize(
    ("name", "listed", "nearest"),
    [
        ("sm_90", ["sm_90", "sm_100"], "sm_90"),
        ("sm_100", ["sm_100", "sm_90"], "sm_100"),
        ("sm_120", ["sm_90", "sm_100"], "sm_100"),
        ("sm_103", ["sm_90", "sm_120"], "sm_90"),
        ("sm_80", ["sm_100", "sm_90"], "sm_90"),
    ],
)
def test_nearest_architecture(name, listed, nearest):
    assert nearest_architecture(name, listed) == nearest


def test_the_committed_table():
    text = TABLE_PATH.read_text()
    assert format_table(launch_table.LAUNCHES) == text, "as dsv4 bench tune would write it"
    assert committed_table()["sm_90"].keys() == WORKS.keys()
    works = itertools.chain(*(table.values() for table in committed_table().values()))
    for steps in works:
        launches = [step.launch for step in steps]
        assert all(a != b for a, b in itertools.pairwise(launches)), "merged"
        *sizes, last = [step.up_to for step in steps]
        assert last is None and sizes == sorted(set(sizes)), "ascending"
        for each in launches:
            numbers = [number for number in each if number is not None]
            assert all(type(number) is int and number > 0 for number in [*sizes, *numbers])
            assert each.num_warps.bit_count() == 1
            assert all(each._field_defaults.get(n) is None for n, v in each._asdict().items()
                       if v is None)  # fmt: skip


def test_a_table_survives_the_round_trip(tmp_path):
    steps = (LaunchStep(7, Launch(2, channels=32, maxnreg=64)), LaunchStep(None, Launch(8)))
    changes = {"hca chunk": [launch.step_fields(step) for step in steps]}
    table = listed(architecture="sm_120") | listed(changes)
    path = tmp_path / "table.py"
    path.write_text(format_table(table))
    read = runpy.run_path(str(path))["LAUNCHES"]
    assert read == table and parse_table(read)["sm_90"]["hca chunk"] == steps
    assert list(read) == ["sm_90", "sm_120"], "by age"
    assert '{"up_to": 7, "num_warps": 2, "channels": 32, "maxnreg": 64},\n' in path.read_text()
    assert max(map(len, path.read_text().splitlines())) <= 100


def test_a_work_comes_from_the_nearest_architecture_that_lists_it(monkeypatch):
    score = [{"up_to": None, "tile": 64, "num_warps": 4, "stages": 2, "programs_per_sm": 5}]
    attend = [{"up_to": None, "heads": 32, "tile": 32, "num_warps": 8}]
    old = listed({"score fp8": [{**score[0], "maxnreg": 96}]})
    table = parse_table(old | {"sm_100": {"attend bf16": attend}})
    monkeypatch.setattr(launch, "committed_table", lambda: table)
    steps = launch.architecture_steps("sm_120")
    assert steps["attend bf16"] == (LaunchStep(None, AttendLaunch(32, 32, 8)),)
    assert steps["score fp8"] == (LaunchStep(None, ScoreLaunch(64, 4, 2, 5)),)
    assert launch.architecture_steps("sm_80")["attend bf16"] == table["sm_90"]["attend bf16"]


@pytest.mark.parametrize(
    ("name", "num_heads", "expected"),
    [
        ("sm_80", 64, AttendLaunch(32, 32, 8)),
        ("sm_90", 8, AttendLaunch(16, 32, 8)),
        ("sm_90", 17, AttendLaunch(32, 32, 8)),
        ("sm_90", 128, AttendLaunch(64, 64, 8)),
        ("sm_100", 16, AttendLaunch(16, 32, 8)),
        ("sm_120", 128, AttendLaunch(32, 32, 8)),
    ],
)
def test_attention_by_architecture(name, num_heads, expected, monkeypatch):
    monkeypatch.setattr(launch, "architecture", lambda device: name)
    device = torch.device("cuda", 7)
    assert find_launch(AttendLaunch, "attend bf16", device, num_heads) == expected
    launch.work_steps.cache_clear()


@pytest.mark.parametrize("fields", [{"warps": 4}, {"num_warps": 4}, {"up_to": None}], ids=str)
def test_a_step_with_other_fields_is_refused(fields):
    with pytest.raises(TypeError, match="argument"):
        parse_table(listed({"csa decode": [fields]}))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), False), ((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 3), True),
     ((12, 0), True)],
)  # fmt: skip
def test_early_launches_by_capability(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    starts_early.cache_clear()
    assert starts_early(torch.device("cuda", 0)) is expected
    starts_early.cache_clear()


def test_one_place_decides_about_early_launches():
    """Every launch asks `starts_early`; none says yes for itself."""
    sources = [path.read_text() for path in TABLE_PATH.parent.rglob("*.py")]
    asked = [line for text in sources for line in text.splitlines() if "launch_pdl" in line]
    assert len(asked) >= 10
    assert [line for line in asked if "starts_early(" not in line] == []
