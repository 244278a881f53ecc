"""Colours and progress on terminals, plain text elsewhere; every command's errors."""

import importlib
import json
import os
import pty
import subprocess
import sys

import pytest
import torch
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file

from dsv4.tools.bench.command import BENCHES
from dsv4.tools.cli import main
from dsv4.tools.console import make_console, printable, track, working
from dsv4.tools.demo.kept_run import keep_run

PLAN = ["plan", "--model", "v4-flash", "--context", "1M", "--gpu", "h200"]
COMMANDS = {
    "demo": (["demo"], "dsv4.tools.demo.command.run_command"),
    "plan": (PLAN, "dsv4.tools.planner.command.print_plan"),
    "plan --json": ([*PLAN, "--json"], "dsv4.tools.planner.command.as_json"),
    "plan --html": ([*PLAN, "--html", "FOLDER/a.html"], "dsv4.tools.planner.page.write_page"),
    "plan --plot": ([*PLAN, "--plot", "FOLDER/a.png"], "dsv4.tools.planner.plot.plot_plan"),
    "inspect": (["inspect", "FOLDER/file"], "dsv4.tools.inspector.report.RequestInspector"),
    "info": (["info"], "dsv4.tools.info.collect_info"),
    **{
        f"bench {name}": (
            ["bench", name, *{"disk": ["FOLDER"], "trace": ["FOLDER/file"]}.get(name, [])],
            f"dsv4.tools.bench.{name}.bench_{name}",
        )
        for name in BENCHES
    },
}
CALL = "import sys; from dsv4.tools.cli import main; sys.exit(main(sys.argv[1:]))"
COUNT = (
    "import sys, time\n"
    "from dsv4.tools.console import make_console, printable, track, working\n"
    "with working('thinking'):\n"
    "    time.sleep(0.3)\n"
    "for number in track(range(3), 'counting', total=3):\n"
    "    time.sleep(0.15)\n"
    "make_console().print('done', style='bold red')\n"
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
    make_console().print("done", style="bold red")
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
    with pytest.raises(SystemExit) as error:
        main([*PLAN, option, str(tmp_path / "missing" / f"plan{suffix}")])
    captured = capsys.readouterr()
    assert error.value.code == 2 and captured.out == ""
    assert f"expected a folder {tmp_path / 'missing'}, found none" in captured.err


def test_json_is_all_that_is_printed(capsys):
    assert main([*PLAN, "--json"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert captured.err == ""


HOSTILE = "a\x1b[31m\x1b]0;title\x07\x9b2J[bold]b[/bold][/nothing]:smile:\u202e\udc80"
SHOWN = "a[31m]0;title2J[bold]b[/bold][/nothing]:smile:"


def is_plain(text: str) -> bool:
    return not set("\x1b\x07\x9b\u202e\udc80") & set(text)


def test_text_from_outside_is_shown_as_it_is(capsys):
    assert printable(f"{HOSTILE}\nnext") == f"{SHOWN}\nnext"
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE, no_wrap=True)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    make_console().print(HOSTILE, table, soft_wrap=True)
    out = capsys.readouterr().out
    assert out.count(SHOWN) == 5 and is_plain(out)


def test_a_terminal_gets_no_escapes_from_outside():
    code = f"from dsv4.tools.console import make_console; make_console().print({HOSTILE!r})"
    shown = run_on_terminal("-c", code)
    assert "title" in shown and "\x1b]" not in shown and "\x9b" not in shown


@pytest.fixture
def hostile_folder(tmp_path):
    """A model folder with a name that terminals and rich would take for commands."""
    name = HOSTILE.replace("/", "|").replace("\udc80", "") + "$x_{$"
    (tmp_path / name).mkdir()
    config = {
        "num_hidden_layers": 1, "compress_ratios": [4], "head_dim": 512, "qk_rope_head_dim": 64,
        "num_attention_heads": 64, "sliding_window": 128, "index_n_heads": 64,
        "index_head_dim": 128, "index_topk": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "compress_rope_theta": 160000, "max_position_embeddings": 65536,
    }  # fmt: skip
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path / name


def test_hostile_names_of_models_and_gpus(hostile_folder, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(hostile_folder.parent)
    plan = ["plan", "--model", hostile_folder.name, "--context", "4k", "--gpu", "h200"]
    assert main([*plan, "--plot", "a.png", "--html", "a.html"]) == 0
    captured = capsys.readouterr()
    assert "[bold]b" in captured.out and is_plain(captured.out + captured.err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--model", HOSTILE, "--context", "4k", "--gpu", "h200"],
        ["plan", "--model", "v4-pro", "--context", HOSTILE, "--gpu", "h200"],
        ["plan", "--model", "v4-pro", "--context", "4k", "--gpu", HOSTILE],
        ["inspect", HOSTILE], ["info", HOSTILE], [HOSTILE], ["demo", "--kv", HOSTILE],
        ["demo", "--model", HOSTILE], ["bench", "write", "--peers", HOSTILE],
    ],
    ids=lambda arguments: " ".join(arguments)[:12],
)  # fmt: skip
def test_errors_are_plain_text(arguments, capsys):
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code in (1, 2) and captured.err and is_plain(captured.out + captured.err)


def test_a_hostile_file_is_refused_in_plain_text(capsys, tmp_path):
    path = tmp_path / "file"
    for metadata in ({"request": HOSTILE[:-1]}, {"request": json.dumps({"format": HOSTILE})}):
        save_file({"slot": torch.zeros(3)}, path, metadata)
        assert main(["inspect", str(path)]) == 1
        assert is_plain(capsys.readouterr().err)


def outputs(tmp_path) -> dict[str, tuple[list[str], str]]:
    """The commands that write a file, and the file."""
    return {
        "plot": ([*PLAN, "--plot", str(tmp_path / "a.png")], "a.png"),
        "html": ([*PLAN, "--html", str(tmp_path / "a.html")], "a.html"),
        "heatmap": (
            ["inspect", str(tmp_path / "run"), "--heatmap", str(tmp_path / "h.png")], "h.png",
        ),
        "save": (
            ["demo", "--model", "random", "--new-tokens", "1", "--save", str(tmp_path / "run")],
            "run/request.safetensors",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["plot", "html", "heatmap", "save"])
def test_files_are_replaced_only_by_force(name, capsys, tmp_path):
    if name in ("plot", "heatmap"):
        pytest.importorskip("matplotlib")
    keep_run(tmp_path / "run", kv_format="fp8", index_format="mxfp4", seed=0)
    arguments, file = outputs(tmp_path)[name]
    (tmp_path / file).write_text("mine")
    with pytest.raises(SystemExit) as error:
        main(arguments)
    message = capsys.readouterr().err
    assert error.value.code == 2 and f"{file} exists: --force replaces it" in message
    assert (tmp_path / file).read_text() == "mine"
    assert main([*arguments, "--force"]) == 0
    assert (tmp_path / file).read_bytes() != b"mine"
