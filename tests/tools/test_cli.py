"""The commands: output, JSON, exit codes."""

import json
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch

from dsv4.cache.memory.device_rows import DeviceRows
from dsv4.cache.memory.host_memory import HostMemory
from dsv4.integrations.transformers import PagedCache
from dsv4.model.random_hf import random_hf_model
from dsv4.tools.bench.command import BENCHES
from dsv4.tools.cli import main
from dsv4.tools.demo import command, memory_run
from tests.integrations.checkpoint import save_checkpoint

RANDOM = ["demo", "--model", "random"]
BOOK = ["demo", "--tokens", "512", "--questions", "16"]
ROOT = Path(__file__).parent.parent.parent


def without_speeds(text: str) -> str:
    return re.sub(r"(/\d+ +[0-9,]+)( +[0-9,]+){2}$", r"\1", text, flags=re.M)


def test_demo_answers_from_a_book(capsys):
    """The output is that of the docs on every CPU, but for the times; the README has a part."""
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    shown = re.findall(r"```text\n(.*?)```", (ROOT / "docs/quality.md").read_text(), re.DOTALL)[0]
    assert without_speeds(text) == without_speeds(shown)
    assert all(len(line) <= 80 for line in text.splitlines()) and text.isascii()
    readme = re.findall(r"^#         (  .*)$", (ROOT / "README.md").read_text(), re.M)
    assert len(readme) == 3 and set(readme) <= set(text.splitlines())


def test_demo_of_a_long_book_asks_this_cache_alone(capsys, monkeypatch):
    monkeypatch.setattr(memory_run, "MAX_OWN_TOKENS", 511)
    assert main([*BOOK, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["runs"].keys() == {"this cache, fp8 + mxfp4"} and len(result["after"]) == 4
    assert result["same_ids"] and {*result["after"].values()} == {16}


def test_demo_fails_on_a_wrong_answer(capsys, monkeypatch):
    from dsv4.kernels.reference import addressing

    monkeypatch.setattr(addressing, "visible_entries", lambda positions, m: positions // m // 2)
    assert main([*BOOK, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["ok"] and not result["same_ids"]
    right = {name: run["right"] for name, run in result["runs"].items()}
    assert right.pop("transformers' own") == 16 and max(right.values()) < 16
    main(BOOK)
    assert "MISMATCH" in capsys.readouterr().out


def test_demo_fails_on_a_draft_that_stays(capsys, monkeypatch):
    monkeypatch.setattr(PagedCache, "crop", lambda *_: None)
    assert main(BOOK) == 1
    text = capsys.readouterr().out
    assert re.search("in a fork +16/16\nafter a draft was rejected +15/16\n", text)
    assert "MISMATCH" in text


@pytest.mark.parametrize(
    ("memory", "copy", "move"),
    [
        (HostMemory, "copy_in", "after a swap to the host and back"),
        (DeviceRows, "write", "after a save and a load"),
    ],
)
def test_demo_fails_on_a_move_that_copies_nothing(memory, copy, move, capsys, monkeypatch):
    """The request gets the slot and the blocks that it left, so they must not have its bytes."""
    monkeypatch.setattr(memory, copy, lambda *_: None)
    assert main(BOOK) == 1
    text = capsys.readouterr().out
    assert re.search("after a draft was rejected +16/16\n", text)
    assert re.search(f"{move} +1/16\n", text), "only the name that the book lacks"


def test_demo_prints_tables(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main([*RANDOM, "--new-tokens", "6"]) == 0
    captured = capsys.readouterr()
    for text in ("6 new tokens for each of 4 prompts", "fp8 rows, mxfp4 keys", "hca_entries",
                 "Tokens per second", "equal: with fp32 rows"):  # fmt: skip
        assert text in captured.out


def test_demo_json_is_one_object(capsys):
    formats = ["--kv", "bf16", "--index", "fp8"]
    assert main([*RANDOM, "--json", *formats, "--new-tokens", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and result["kv_format"] == "bf16" and result["prompts"] == [300, 130, 37, 5]
    assert result["first_difference"]["fp32"] == [None] * 4
    assert result["first_difference"]["transformers_padded"][0] is None  # the row without padding
    assert result["first_difference"]["transformers_padded"] != [None] * 4
    assert max(result["logit_error"]["fp32"]) < 1e-4 < max(result["logit_error"]["formats"])
    assert all(len(errors) == 4 for errors in result["logit_error"].values())
    assert all(speed > 0 for speed in result["tokens_per_second"].values())
    components = {"csa_entries", "index_keys", "hca_entries", "window", "states"}
    assert all(components <= set(sizes) for sizes in result["memory"].values())


def test_demo_fails_on_a_mismatch(capsys, monkeypatch):
    from dsv4.kernels.reference import attention

    monkeypatch.setattr(attention, "unrotate", lambda output, rope: output)
    assert main([*RANDOM, "--new-tokens", "2"]) == 1
    assert "MISMATCH" in capsys.readouterr().out


def test_demo_of_a_checkpoint_folder(capsys, tmp_path):
    model = random_hf_model(seed=0, compress_ratios=[4, 128])
    save_checkpoint(model, tmp_path)
    prompts = ["--prompt", "w1 w2 w3", "--prompt", "w5 " * 40]
    arguments = ["demo", "--model", str(tmp_path), "--new-tokens", "3", "--json", *prompts]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompts"] == [3, 40] and result["model"] == str(tmp_path)
    assert all(text.startswith(("w", "<")) for text in result["texts"])


@pytest.mark.skipif(
    metadata.version("transformers").startswith("5.17."),
    reason="transformers 5.17 cannot run a model that it loads in bf16",
)
def test_demo_of_a_checkpoint_in_bf16(capsys, tmp_path):
    model = random_hf_model(seed=0, compress_ratios=[4, 128])
    save_checkpoint(model.to(torch.bfloat16), tmp_path)
    assert main(["demo", "--model", str(tmp_path), "--new-tokens", "3"]) == 0
    assert "bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ("demo --prompt hello", "--prompt needs --model FOLDER"),
        ("demo --serve --model random", "--serve needs the book: leave --model out"),
        ("demo --questions 3 --model random", "--questions needs the book: leave --model out"),
        ("demo --tokens 256 --model random", "--tokens needs the book: leave --model out"),
        ("demo --seed 0", "--seed needs --model random or --save"),
        ("demo --new-tokens 3", "--new-tokens needs --model"),
        ("demo --tokens x", "argument --tokens: expected a number of tokens such as 4096"),
        ("bench quality --tokens x", "argument --tokens: expected a number of tokens such as"),
        ("serve x --max-body x", "argument --max-body: expected a size such as 80GiB"),
        ("demo --device foo", "Invalid --device: expected cpu, cuda or cuda:N, got 'foo'"),
        ("demo --device cuda:x", "expected cpu, cuda or cuda:N, got 'cuda:x'"),
        ("bench quality --device meta", "expected cpu, cuda or cuda:N, got 'meta'"),
        ("bench quality --plot no/x.png", "expected a folder no, found none"),
        ("bench quality --questions 3", "expected at least 4, some of each kind, got 3"),
        ("bench index --ranks 2 --compare", "Invalid --compare: expected --ranks 1, got --ranks 2"),
        ("bench disk no", "Invalid FOLDER: expected a folder, got 'no'"),
        ("bench prefill --plot no/x.png", "expected a folder no, found none"),
        ("bench prefill --positions 1", "expected at least 2, both ends of a prompt, got 1"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other(arguments, refusal, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments.split())
    assert error.value.code == 2 and refusal in capsys.readouterr().err


COMMANDS = ["demo", "plan", "inspect", "serve", "info", "bench"]


@pytest.mark.parametrize("command", ["", *COMMANDS, *(f"bench {name}" for name in BENCHES)])
def test_help_has_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as error:
        main([*command.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert error.value.code == 0 and max(map(len, lines)) <= 80


def test_demo_of_one_question(capsys, monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert main(["demo", "--tokens", "128", "--questions", "1", "--device", "cpu:0"]) == 0
    assert "is asked 1 question.\n" in capsys.readouterr().out and threads == [1]


def test_demo_refusals(capsys, tmp_path):
    for words in (["demo", "--model"], ["serve"]):
        assert main([*words, str(tmp_path)]) == 1
        assert "expected a config.json" in capsys.readouterr().err
    assert main([*RANDOM, "--new-tokens", "1000000"]) == 1
    assert "expected an integer from 1 to 65236 (the model's positions" in capsys.readouterr().err
    assert main([*RANDOM, "--seed", str(10**30)]) == 1
    assert "Invalid seed: expected an integer from 0 to" in capsys.readouterr().err
    assert main(["demo", "--tokens", "2M"]) == 1
    assert "Invalid tokens: expected an integer from 128 to 1048576" in capsys.readouterr().err
    if not torch.cuda.is_available():
        for command in (["demo"], ["bench", "quality"]):
            assert main([*command, "--device", "cuda"]) == 1
            assert "--device cuda needs a CUDA device" in capsys.readouterr().err


def test_a_failure_is_one_sentence_on_stderr(capsys, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("the pool is on fire")

    monkeypatch.setattr(command, "run_memory", fail)
    assert main(["demo", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "dsv4: the pool is on fire\n" and captured.out == ""
    with pytest.raises(RuntimeError, match="on fire"):
        main(["--debug", "demo", "--json"])


@pytest.mark.parametrize(
    "arguments",
    [[], ["nothing"], ["demo", "--kv", "fp7"], ["bench"], ["bench", "plan", "--steps", "0"]],
    ids=" ".join,
)
def test_bad_usage_exits_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: dsv4" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "bench", ["swap", "write", "gather", "index", "attend", "step", "tune", "transformers"]
)
def test_benches_without_a_gpu(capsys, bench):
    assert main(["bench", bench]) == 1
    assert f"dsv4 bench {bench} needs a CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_bench_step(capsys):
    assert main(["bench", "step", "--requests", "8", "--steps", "5"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert set(result["median_us"]) == {"prepare_forward", "replay", "both"}
    assert result["median_us"]["both"] > result["median_us"]["replay"] > 0
    assert "Host time of a captured step" in "".join(lines)


def test_bench_plan(capsys):
    assert main(["bench", "plan", "--requests", "8", "--steps", "5"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert set(result["median_us"]) == {"43 layers", "4 layers"}
    assert "90th percentile" in "".join(lines)
    assert {"commit", "torch", "cpu"} <= set(result["environment"])


def test_bench_host(capsys):
    assert main(["bench", "host", "--requests", "2", "--steps", "3"]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert {"prepare", "accept", "note_and_publish", "layers"} <= set(result["mean_us"])
    assert all(time > 0 for time in result["mean_us"].values()) and not result["target_us"]


def test_bench_prefix(capsys):
    assert main(["bench", "prefix", "--tokens", "1000", "--rounds", "3"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert result["num_hit_tokens"] == 768
    assert set(result["median_us"]) == {"hit", "hit_without_copy", "hash_of_a_block"}
    assert all(0 < result["best_us"][name] <= value for name, value in result["median_us"].items())
    assert "A prefix hit of 768 tokens" in "".join(lines)


def test_bench_handover(capsys):
    assert main(["bench", "handover", "--tokens", "600", "--rounds", "2"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    names = {row["name"] for row in result["rows"]}
    assert names == {"one message", "hand-over", "hand-over without xxh3"}
    assert all(len(row["seconds"]) == 2 and row["ratio"] > 0 for row in result["rows"])
    assert not result["errors"] and "A request of 600 tokens" in "".join(lines)


def test_bench_disk(capsys, tmp_path):
    assert main(["bench", "disk", str(tmp_path), "--records", "3", "--rounds", "2"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert [row["name"] for row in result["rows"]] == ["dd", "xxh3-128", "HMAC-SHA-256"]
    assert all(len(row["gb_per_s"]) == 2 and row["ratio"] > 0 for row in result["rows"])
    assert "3 records of 912,384 bytes" in "".join(lines)
    assert not list(tmp_path.iterdir())
