"""`dsv4 bench trace`: what is found of small traces, and files that are refused."""

import gzip
import json

import pytest

from dsv4.cache.memory.checkpoints import Checkpoints
from dsv4.config import CacheConfig
from dsv4.tools.bench import trace
from dsv4.tools.bench.trace_file import TracePrompt, found_by_lru, read_trace
from dsv4.tools.cli import main

WHOLE = list(range(20))
TURN = [*WHOLE, 20, 21, 22]
OTHER = [*WHOLE[:9], *range(30, 40)]


def write_trace(path, prompts, *, tail=100):
    """Write prompts of whole blocks, each with some tokens of one more."""
    lines = [
        {"timestamp": 0, "input_length": 512 * len(ids) + tail, "output_length": 5,
         "hash_ids": [*ids, 1000 + number]}
        for number, ids in enumerate(prompts)
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def run(capsys, *arguments):
    assert main(["bench", "trace", *map(str, arguments)]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    return json.loads(lines[-1]), "".join(lines[:-1])


@pytest.mark.parametrize("name", ["small.jsonl", "small.jsonl.gz"])
def test_known_prompts_are_found(capsys, tmp_path, name):
    prompts = [WHOLE, TURN, TURN, OTHER]
    path = write_trace(tmp_path / name, prompts)
    result, shown = run(capsys, path, "--requests", 4)
    tokens = sum(512 * len(ids) + 100 for ids in prompts)
    found = {row["policy"]: row for row in result["rows"]}
    assert result["num_tokens"] == tokens and "plain LRU" in shown
    bound = (20 + 23 + 9) * 512 / tokens
    for row in found.values():
        assert row["blocks"] == 0 and row["bound"] == row["lru"] == pytest.approx(bound)
    # The end of each prompt, then the boundary at 8 of 9 blocks.
    ours = (20 + 23 + 8) * 512 / tokens
    for policy in (trace.ON_HOST, trace.ONE_BUDGET):
        assert found[policy]["found"] == pytest.approx(ours)
        assert found[policy]["ratio"] == pytest.approx(51 / 52)
        assert found[policy]["num_hits"] == 3
    halo = narrow_halo()
    assert found[trace.HALO_ONLY]["found"] == pytest.approx((23 - halo) * 512 / tokens)
    assert found[trace.HALO_ONLY]["replayed_blocks_per_hit"] == pytest.approx(halo)


def narrow_halo():
    config = trace.narrow_config()
    return config.halo_tokens / config.block_tokens


def test_a_stretch_of_a_trace(capsys, tmp_path):
    path = write_trace(tmp_path / "small.jsonl", [WHOLE, TURN, OTHER])
    result, _ = run(capsys, path, "--requests", 2, "--first", 2, "--blocks", 80)
    first = result["rows"][0]
    assert (first["blocks"], first["device_blocks"], first["host_blocks"]) == (80, 80, 80)
    assert first["lru"] == pytest.approx(9 * 512 / result["num_tokens"])
    assert {row["blocks"] for row in result["rows"]} == {80, 0}


def test_memory_is_that_of_v4_flash():
    narrow, flash = trace.narrow_config(), CacheConfig.v4_flash()
    case = trace.Case(300, 300, 20, 1, 1)
    replay = trace.Replay(trace.SETTINGS[trace.ONE_BUDGET], case)
    checkpoints: Checkpoints = replay.manager._books.checkpoints
    assert checkpoints.blocks_each == trace.block_sizes(flash)[1] == 6
    assert replay.num_device + replay.num_host + 8 * 6 == 300
    assert narrow_halo() == pytest.approx(flash.halo_tokens / flash.block_tokens, abs=0.1)
    assert narrow.num_layers == len(replay.manager.schedule) == 2
    with pytest.raises(ValueError, match="Too few blocks"):
        trace.Replay(trace.SETTINGS[trace.ONE_BUDGET], case._replace(num_blocks=60))


def test_bytes_by_tier_stay_within_the_budget(capsys, tmp_path):
    prompts = [[100 * number + each for each in range(20)] for number in range(12)]
    path = write_trace(tmp_path / "small.jsonl", prompts)
    result, _ = run(capsys, path, "--requests", 12, "--blocks", 300)
    row = next(each for each in result["rows"] if each["policy"] == trace.ONE_BUDGET)
    assert row["blocks"] == 300 and all(row["bytes"].values())
    assert sum(row["bytes"].values()) <= 300 * result["block_bytes"]


def test_an_lru_drops_the_ends_of_old_prompts_first():
    prompts = [TracePrompt(0, ids) for ids in ((1, 2, 3), (4, 5), (1, 2, 3), (1, 2, 9))]
    assert found_by_lru(prompts, 100) == 3 + 2
    assert found_by_lru(prompts, 4) == 2 + 2
    assert found_by_lru(prompts, 1) == 0 + 1


def test_the_plot_is_not_replaced(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path, plot = write_trace(tmp_path / "small.jsonl", [WHOLE, TURN]), tmp_path / "found.svg"
    arguments = [path, "--requests", 2, "--plot", plot]
    result, _ = run(capsys, *arguments)
    assert {row["policy"] for row in result["rows"]} == set(trace.PLOTTED)
    assert all(name in plot.read_text() for name in ("plain LRU", *trace.PLOTTED))
    with pytest.raises(SystemExit):
        main(["bench", "trace", *map(str, arguments)])
    assert "--force replaces it" in capsys.readouterr().err
    run(capsys, *arguments, "--force")


GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "expected JSON in line 2"),
        ("[" * 100_000, "expected JSON in line 2"),
        ("[]", "expected an object in line 2 .*got list"),
        (GOOD | {"input_length": "600"}, "input_length: .* line 2 .*got '600'"),
        (GOOD | {"input_length": True}, "input_length: .* line 2 .*got True"),
        (GOOD | {"output_length": -1}, "output_length: .* line 2 .*got -1"),
        ({"input_length": 600, "output_length": 5, "hash_ids": [1]}, "timestamp: .* got None"),
        (GOOD | {"hash_ids": 7}, "hash_ids: expected a list in line 2 .*got int"),
        (GOOD | {"hash_ids": [1.5, 2]}, "hash_ids: .* line 2 .*got 1.5"),
        (GOOD | {"hash_ids": [2**31, 2]}, "hash_ids: .* line 2"),
        (GOOD | {"hash_ids": []}, "hash_ids: expected at least 1 .*600 in line 2 .*got 0"),
    ],
    ids=str,
)
def test_bad_lines_are_refused(tmp_path, line, match):
    text = line if isinstance(line, str) else json.dumps(line)
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{text}\n")
    assert read_trace(path, first=1, count=1) == [TracePrompt(600, (1,))]
    with pytest.raises(ValueError, match=match):
        read_trace(path, first=1, count=2)


def test_bad_files_are_refused(tmp_path):
    path = tmp_path / "good.jsonl"
    path.write_text(json.dumps(GOOD | {"input_length": 500}))
    with pytest.raises(ValueError, match="expected 2 requests from line 1 on, got 1"):
        read_trace(path, first=1, count=2)
    with pytest.raises(ValueError, match="expected a prompt of 512 tokens"):
        read_trace(path, first=1, count=1)
    with pytest.raises(ValueError, match="cannot read"):
        read_trace(tmp_path / "none.jsonl", first=1, count=1)
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 100)[:60])
    with pytest.raises(ValueError, match="cannot read"):
        read_trace(packed, first=1, count=1)
    packed.write_bytes(b"not packed")
    with pytest.raises(ValueError, match="cannot read"):
        read_trace(packed, first=1, count=1)
