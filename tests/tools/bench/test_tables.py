"""Tables of results: cells, alignment, and missing numbers."""

import io

from rich.console import Console

from dsv4.tools.bench.tables import build_table, show

COLUMNS = (("name", "{name}"), ("us", "{times[best]:.1f}"), ("of all", "{share:.0%}"))


def printed(table):
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    return [line.strip("│┃ ") for line in console.file.getvalue().splitlines() if "│" in line]


def test_cells_are_filled_in_and_stand_right():
    rows = [{"name": "a", "times": {"best": 1.26}, "share": 0.5}, {"name": "longer", "times": {}}]
    first, second = printed(build_table("", rows, COLUMNS, num_left=1))
    assert first.split("│") == ["a      ", " 1.3 ", "    50%"]
    assert second.split("│") == ["longer ", "   - ", "      -"]
    assert {column.justify for column in build_table("", rows, COLUMNS).columns} == {"right"}
    assert build_table("", rows, COLUMNS, caption="below").caption == "below"


def test_a_launch_that_could_not_be_used():
    used, other = {"num_warps": 2}, {"num_warps": 4, "rows": 8}
    choice = {"work": "csa decode", "size": 32, "present": other, "chosen": used,
              "times": [{"launch": used, "us": 3.456}]}  # fmt: skip
    result = {"architecture": "sm_90", "choices": [choice], "skipped": [], "written": "a.json"}
    shown = show("tune", result)
    (line,) = printed(shown.tables[0])
    cells = [cell.strip() for cell in line.split("│")]
    assert cells == ["csa decode", "32", "num_warps 4, rows 8", "unusable", "num_warps 2", "3.46"]
    assert shown.sentences == ["written to a.json"]
