"""Colours and progress on terminals, plain text elsewhere; every command's errors."""

import importlib
import json
import os
import pty
import subprocess
import sys

import pytest

from dsv4.tools.bench.command import BENCHES
from dsv4.tools.cli import main
from dsv4.tools.console import make_console, track, working

PLAN = ["plan", "--model", "v4-flash", "--context", "1M", "--gpu", "h200"]
COMMANDS = {
    "demo": (["demo"], "dsv4.tools.demo.command.run_command"),
    "plan": (PLAN, "dsv4.tools.cli.print_plan"),
    "plan --json": ([*PLAN, "--json"], "dsv4.tools.cli.as_json"),
    "plan --html": ([*PLAN, "--html", "FOLDER/a.html"], "dsv4.tools.planner.page.write_page"),
    "plan --plot": ([*PLAN, "--plot", "FOLDER/a.png"], "dsv4.tools.planner.plot.plot_plan"),
    "inspect": (["inspect", "FOLDER/file"], "dsv4.tools.inspector.report.RequestInspector"),
    "info": (["info"], "dsv4.tools.info.collect_info"),
    **{
        f"bench {name}": (["bench", name], f"dsv4.tools.bench.{name}.bench_{name}")
        for name in BENCHES
    },
}
CALL = "import sys; from dsv4.tools.cli import main; sys.exit(main(sys.argv[1:]))"
COUNT = (
    "import sys, time\n"
    "from dsv4.tools.console import make_console, track, working\n"
    "with working('thinking'):\n"
    "    time.sleep(0.3)\n"
    "for number in track(range(3), 'counting', total=3):\n"
    "    time.sleep(0.15)\n"
    "make_console().print('[bold red]done[/]')\n"
)


SWAP = (
    "import functools\n"
    "from dsv4.tools.bench import swap\n"
    "from dsv4.tools.cli import main\n"
    "swap.bench_swap = functools.partial(swap.bench_swap, device='cpu')\n"
    "main(['bench', 'swap', '--tokens', '300', '--rounds', '2'])\n"
)


def run_on_terminal(*arguments: str, **environment: str) -> str:
    """Run a Python command on a terminal; return its output."""
    ours, theirs = pty.openpty()
    names = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        names.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
        env=names | environment,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait() == 0
    return shown.decode()


def test_a_terminal_sees_progress_and_colours():
    shown = run_on_terminal("-c", COUNT)
    assert "thinking" in shown and "counting" in shown and "3/3" in shown
    assert "\x1b[" in shown and "done" in shown


def test_a_bench_says_how_many_cases_are_done():
    shown = run_on_terminal("-c", SWAP)
    assert "blocks in a row" in shown and "blocks scattered" in shown and "3/3" in shown


def test_no_color_is_plain_text():
    shown = run_on_terminal("-c", COUNT, NO_COLOR="1")
    assert shown.replace("\r", "") == "thinking ...\ncounting ...\ndone\n"


def test_no_color_on_a_terminal_for_a_command():
    plain = run_on_terminal("-c", CALL, *PLAN, NO_COLOR="1")
    assert "\x1b" not in plain and "It fits" in plain
    assert "\x1b[" in run_on_terminal("-c", CALL, *PLAN)


def test_what_is_no_terminal_gets_no_progress(capsys):
    with working("thinking"):
        assert list(track(range(3), "counting", total=3)) == [0, 1, 2]
    make_console().print("[bold red]done[/]")
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out == "done\n"


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["tables", "json"])
def test_a_closed_pipe_is_no_traceback(options):
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-c", CALL, *PLAN, *options],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert process.stderr == "" and process.returncode == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_failures_are_one_sentence(name, capsys, monkeypatch, tmp_path):
    arguments, target = COMMANDS[name]
    if name == "plan --plot":
        pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    arguments = [argument.replace("FOLDER", str(tmp_path)) for argument in arguments]

    def fail(*_, **__):
        raise RuntimeError("the pool\n  is on fire")

    module, _, function = target.rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), function, fail)
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err == "dsv4: the pool is on fire\n" and captured.out == ""
    with pytest.raises(RuntimeError, match="on fire"):
        main(["--debug", *arguments])


@pytest.mark.parametrize("name", COMMANDS)
def test_unknown_options_exit_with_2(name, capsys):
    with pytest.raises(SystemExit) as error:
        main([*COMMANDS[name][0], "--no-such-option"])
    captured = capsys.readouterr()
    assert error.value.code == 2 and captured.out == ""
    assert "usage: dsv4" in captured.err and "--no-such-option" in captured.err


def test_interrupts_and_silent_errors(capsys, monkeypatch):
    for error, message in ((KeyboardInterrupt(), "interrupted"), (OSError(), "OSError")):

        def fail(error=error):
            raise error

        monkeypatch.setattr("dsv4.tools.info.collect_info", fail)
        assert main(["info"]) == 1
        assert capsys.readouterr().err == f"dsv4: {message}\n"


@pytest.mark.parametrize("option", ["--html", "--plot"])
def test_files_that_cannot_be_written(option, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    suffix = {"--html": ".html", "--plot": ".png"}[option]
    assert main([*PLAN, option, str(tmp_path / "missing" / f"plan{suffix}")]) == 1
    captured = capsys.readouterr()
    assert "No such file or directory" in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_json_is_all_that_is_printed(capsys):
    assert main([*PLAN, "--json"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert captured.err == ""
