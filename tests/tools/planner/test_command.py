"""`dsv4 plan`: tables, JSON, refusals."""

import json
import signal
import sys

import pytest

from dsv4.tools.cli import main

FLASH = ["plan", "--model", "v4-flash", "--context", "1M", "--gpu", "h200"]
HF_CONFIG = {
    "num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0], "head_dim": 512,
    "qk_rope_head_dim": 64, "num_attention_heads": 64, "sliding_window": 128,
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "compress_rope_theta": 160000, "max_position_embeddings": 65536,
}  # fmt: skip


def run_json(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def words(text: str) -> str:
    return " ".join(text.split())


def test_tables(capsys):
    assert main([*FLASH, "--requests", "8"]) == 0
    out = words(capsys.readouterr().out)
    for part in ("3,514.25", "3,564.00", "CSA entries", "index keys", "HCA entries", "window",
                 "HCA tails", "block table", "RoPE rows", "window workspace"):  # fmt: skip
        assert part in out
    assert "One request: 3.439 GiB of payload, 3.487 GiB allocated" in out
    assert "It fits: 8 requests of 1,048,576 tokens" in out
    assert "Weights are not counted" in out and "as marketed" in out
    assert "Tensor parallelism" not in out


def test_a_plan_that_does_not_fit(capsys):
    assert main([*FLASH, "--requests", "8", "--weights", "160GB", "--tp", "2", "--kv", "bf16",
                 "--gpu", "120GB"]) == 0  # fmt: skip
    out = words(capsys.readouterr().out)
    assert "It does not fit" in out and "Nearest change: " in out
    assert "ranks instead of 2" in out and "requests instead of 8" in out
    assert "Tensor parallelism divides the weights and the query heads" in out
    assert "as marketed" not in out


def test_json(capsys):
    result = run_json(capsys, *FLASH, "--requests", "8")
    assert result["bytes_per_token"]["hca_entries"] == {"payload": 91.25, "allocated": 135.0}
    assert result["num_mtp_layers"] == 1 and result["fits"] and result["changes"] == []
    assert f"{result['one_request']['payload'] / 2**30:.3f}" == "3.439"
    assert result["cache_bytes"] == sum(s["allocated"] for s in result["bytes_of_all"].values())
    assert result["max_requests"] >= 8
    more = run_json(capsys, *FLASH, "--requests", str(result["max_requests"] + 1))
    assert not more["fits"] and more["changes"][0]["fits"]


def test_options_reach_the_plan(capsys):
    result = run_json(
        capsys, *FLASH, "--kv", "bf16", "--index", "fp8", "--tails", "bfloat16",
        "--block-tokens", "512", "--page-align", "16", "--drafts", "3", "--chunk", "4k",
        "--no-mtp", "--weights", "160GB", "--reserve", "1GiB", "--tp", "4",
    )  # fmt: skip
    expected = {
        "kv_format": "bf16", "index_format": "fp8", "tail_dtype": "bfloat16",
        "block_tokens": 512, "page_align": 16, "drafts_per_step": 3, "max_forward_tokens": 4096,
        "num_mtp_layers": 0, "weights_bytes_per_rank": 40 * 10**9, "reserved_bytes": 2**30,
        "num_ranks": 4, "gpu_bytes": 141 * 10**9, "context_tokens": 2**20,
    }  # fmt: skip
    assert {name: result[name] for name in expected} == expected


def test_pipeline_stages(capsys, tmp_path):
    assert main([*FLASH, "--pp", "2", "--tp", "2", "--weights", "160GB"]) == 0
    out = words(capsys.readouterr().out)
    assert "each of 4 ranks" in out and "weights of 22 of 44 layers / 2" in out
    assert "cache of the largest stage" in out
    assert "The cache of each pipeline stage" in out and "0 to 21" in out and "22 to 43" in out
    result = run_json(capsys, *FLASH, "--pp", "2")
    assert [stage["layers"] for stage in result["stages"]] == [[0, 22], [22, 44]]
    assert result["cache_bytes"] == max(stage["cache_bytes"] for stage in result["stages"])
    with pytest.raises(SystemExit):
        main([*FLASH, "--pp", "2", "--html", str(tmp_path / "page.html")])
    assert "expected --pp 1" in capsys.readouterr().err


def test_a_split_context(tmp_path, capsys):
    one, two = (run_json(capsys, *FLASH, "--context-parallel", n) for n in ("1", "2"))
    assert (one["context_ranks"], two["context_ranks"]) == (1, 2)
    for name, size in one["bytes_per_request"].items():
        assert name == "block_table" or two["bytes_per_request"][name] == size
    half = {name: size["payload"] / 2 for name, size in one["bytes_per_token"].items()}
    assert half == {name: size["payload"] for name, size in two["bytes_per_token"].items()}
    assert main([*FLASH, "--context-parallel", "2", "--tp", "2", "--pp", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "each of 8 ranks" in shown and "split over 2 ranks" in shown
    with pytest.raises(SystemExit):
        main([*FLASH, "--context-parallel", "2", "--html", str(tmp_path / "page.html")])
    assert "argument --context-parallel" in capsys.readouterr().err


def test_ranks_have_whole_candidate_blocks(capsys):
    model = ("plan", "--model", "v41-flash", "--context", "1M", "--gpu", "H200")
    one, two = (run_json(capsys, *model, "--context-parallel", n) for n in ("1", "2"))
    half = {name: size["payload"] / 2 for name, size in one["bytes_per_token"].items()}
    assert half == {name: size["payload"] for name, size in two["bytes_per_token"].items()}
    with pytest.raises(SystemExit):
        main([*model, "--context-parallel", "2", "--block-tokens", "4"])
    assert "candidate_block_size" in capsys.readouterr().err


@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_a_config_of_transformers(capsys, tmp_path, is_folder):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HF_CONFIG))
    arguments = ["plan", "--model", str(tmp_path if is_folder else path), "--context", "64k",
                 "--gpu", "80GiB"]  # fmt: skip
    assert run_json(capsys, *arguments)["num_mtp_layers"] == 1
    assert run_json(capsys, *arguments, "--no-mtp")["num_mtp_layers"] == 0
    path.write_text(json.dumps(HF_CONFIG | {"compress_ratios": [0, 4, 128]}))
    assert run_json(capsys, *arguments)["num_mtp_layers"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "1G"], "expected a number of tokens such as 4096, 128k or 1M, got '1G'"),
        (["--context", "2M"], "argument --context: expected at most 1048576 (max_position), got"),
        (["--gpu", "80"], "expected a size such as 80GiB or 141GB, or one of a100"),
        (["--weights", "80"], "expected a size such as 80GiB or 141GB, got '80'"),
        (["--requests", "0"], "expected a whole number from 1 to 1,048,576, got '0'"),
        (["--tp", "3"], "argument --tp: expected a divisor of 64 query heads, got 3"),
        (["--pp", "45"], "argument --pp: expected an integer from 1 to 44"),
        (["--model", "v41-flash", "--pp", "10"], "--pp: expected an integer from 1 to 9 (the most"),
        (["--drafts", "-1"], "expected a whole number, got '-1'"),
        (["--drafts", "x"], "expected a whole number, got 'x'"),
        (["--block-tokens", "100"], "expected a multiple of the largest ratio (128), got 100"),
        (["--page-align", "24"], "expected a multiple of 16, got 24"),
        (["--model", "v5"], "expected v4-flash, v4-pro, v41-flash or the path of a config"),
        (["--kv", "fp7"], "invalid choice: 'fp7'"),
        (["--plot", "plan.pdf"], "expected .png or .svg, got 'plan.pdf'"),
        (["--html", "plan.pdf"], "expected .html, got 'plan.pdf'"),
    ],
)
def test_bad_usage_exits_with_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        main([*FLASH, *arguments])
    assert error.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_a_config_that_is_no_json(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SystemExit) as error:
        main([*FLASH, "--model", str(tmp_path)])
    assert error.value.code == 2
    assert "Invalid config.json: expected JSON in" in capsys.readouterr().err


def test_mtp_of_a_model_without(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG | {"compress_ratios": [0, 4, 128]}))
    with pytest.raises(SystemExit) as error:
        main([*FLASH, "--context", "1k", "--model", str(tmp_path), "--mtp"])
    assert error.value.code == 2
    assert "the model config has no MTP layer" in capsys.readouterr().err


def test_plot_without_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*FLASH, "--plot", str(tmp_path / "plan.png")]) == 1
    captured = capsys.readouterr()
    assert captured.err == "dsv4: --plot needs matplotlib: pip install 'dsv4[plot]'\n"
    assert captured.out == ""


def test_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    assert main([*FLASH, "--plot", str(path)]) == 0
    assert path.read_text().startswith("<?xml")
    assert "It fits" in capsys.readouterr().out


def test_a_page_of_layers_that_share_is_refused_first(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    files = ["--plot", str(tmp_path / "a.png"), "--html", str(tmp_path / "b.html")]
    with pytest.raises(SystemExit) as error:
        main([*FLASH, "--model", "v41-flash", *files])
    captured = capsys.readouterr()
    assert error.value.code == 2 and captured.out == ""
    assert "argument --html: expected a model whose layers own all that they read" in captured.err
    assert "--plot and --json take others, got 'v41-flash'" in captured.err
    assert not list(tmp_path.iterdir())


def test_a_plan_has_80_columns(capsys):
    assert main([*FLASH, "--model", "v41-flash"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("v41-flash, fp8_32 rows, nvfp4_16 entries")
    assert max(map(len, lines)) <= 80


def test_plain_text_where_there_is_no_terminal(capsys):
    assert main(FLASH) == 0
    assert "\x1b" not in capsys.readouterr().out


ABSURD = [str(10**6), str(10**9), str(10**18), "9" * 400, "-1", "0"]


@pytest.fixture
def ten_seconds():
    """Fail a test that takes longer; some of these plans once took hours."""

    def fail(*_):
        raise TimeoutError("ten seconds are over")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def planned_or_refused(*arguments: str) -> None:
    """Run a plan: it ends with 0, or with 2 for bad usage."""
    try:
        assert main([*arguments, "--json"]) == 0
    except SystemExit as error:
        assert error.code == 2


@pytest.mark.parametrize(
    "option",
    ["context", "requests", "gpu", "weights", "reserve", "tp", "block-tokens", "page-align",
     "drafts", "chunk", "checkpoints", "undo-slots"],
)  # fmt: skip
def test_absurd_options(option, ten_seconds):
    unit = "GB" if option in ("gpu", "weights", "reserve") else ""
    for number in ABSURD:
        planned_or_refused(*FLASH, "--requests", "500", f"--{option}={number}{unit}")


def test_a_million_drafts_are_refused(capsys, ten_seconds):
    with pytest.raises(SystemExit):
        main([*FLASH, "--requests", "500", "--drafts", "1000000"])
    assert "drafts_per_step: expected an integer from 0 to 256, got 1000000" in (
        capsys.readouterr().err
    )


OTHER_KEYS = ["num_nextn_predict_layers", "layer_types", "rope_parameters", "rope_scaling",
              "partial_rotary_factor"]  # fmt: skip


@pytest.mark.parametrize("key", [*HF_CONFIG, *OTHER_KEYS])
def test_absurd_configs(key, tmp_path, ten_seconds):
    values = [
        10**6,
        10**9,
        10**18,
        10**400,
        -1,
        0,
        2.5,
        float("inf"),
        "x",
        [],
        {},
        [10**9],
        {"a": 1},
    ]
    for value in values:
        changed = {**HF_CONFIG, key: value}
        if key == "num_nextn_predict_layers":
            changed["compress_ratios"] = [0, 4, 128]
        (tmp_path / "config.json").write_text(json.dumps(changed))
        planned_or_refused("plan", "--model", str(tmp_path), "--context", "4k", "--gpu", "1GB")


def test_a_small_model_of_a_long_context(tmp_path, ten_seconds):
    """Its longest context was once searched block by block."""
    small = {"compress_ratios": [4], "num_hidden_layers": 1, "head_dim": 32, "index_head_dim": 32,
             "qk_rope_head_dim": 16, "max_position_embeddings": 2**31 - 1}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG | small))
    assert main(["plan", "--model", str(tmp_path), "--context", "4k", "--gpu", "1GB", "--kv",
                 "bf16"]) == 0  # fmt: skip


def test_a_config_of_deep_json(capsys, tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(tmp_path), "--context", "4k", "--gpu", "1GB"])
    assert "Invalid config.json: expected JSON" in capsys.readouterr().err
