"""`--compare`: external kernels beside ours, with stand-ins for them and for the clock."""

import functools
import json

import pytest
import torch

from dsv4 import CacheConfig
from dsv4.kernels import ops
from dsv4.kernels.layer_memory import existing
from dsv4.kernels.reference.gather import gather_rows, visible_entry_rows
from dsv4.layer_schedule import AttentionType
from dsv4.tools.bench import attend, attend_case, index, timing, write
from dsv4.tools.bench.attend import AttendShape, PrefillShape, count_visible, prefill_case
from dsv4.tools.bench.attend_case import check_result
from dsv4.tools.bench.external.sglang_write import check_sglang
from dsv4.tools.cli import main
from tests.kernels.fake_external import FakeDeepGEMM, FakeFlashMLA, FakePrefill, FakeSGLang
from tests.v41 import tiny_v41

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins run on the CPU")


CHUNKS = (
    PrefillShape("CSA", CacheConfig.v4_flash, 4, 64, 300.0),
    PrefillShape("HCA", CacheConfig.v4_flash, 128, 0, 350.0),
)


@pytest.fixture
def few_layers(clock, monkeypatch):
    for module in (attend, index):
        monkeypatch.setattr(module, "NUM_LAYERS", 2)
    monkeypatch.setattr(index, "NUM_TURNS", 1)


@pytest.fixture
def small_attend(few_layers, monkeypatch):
    shapes = (
        AttendShape(attend.FLASH, CacheConfig.v4_flash, 4, 8, 300, 64, (1, 2),
                    targets_us={1: 4.0, 2: 3.9}, invariant_target=0.9),
        AttendShape("4 tokens", CacheConfig.v4_flash, 4, 8, 300, 64, (2,), 4,
                    of_flash_targets={2: 1.0}),
        AttendShape("HCA", CacheConfig.v4_flash, 128, 64, 300, 2, (1,)),
        AttendShape("SWA", CacheConfig.v4_flash, 0, 64, 200, 0, (1,)),
        AttendShape(attend.V41, attend.v41_layers, 2, 64, 200, 64, (1,),
                    of_flash_targets={1: 0.9}),
    )  # fmt: skip
    monkeypatch.setattr(attend, "SHAPES", shapes)
    monkeypatch.setattr(attend, "DEVICE", "cpu")
    load = ops.load_backend  # only the reference, since the interpreter is slow
    monkeypatch.setattr(ops, "load_backend", lambda name: load("reference"))


@pytest.fixture
def small_chunk(monkeypatch):
    """Use positions 508 to 513: from the fourth query on, one more HCA entry is visible."""
    monkeypatch.setattr(attend, "CONTEXT", 514)
    monkeypatch.setattr(attend, "CHUNK", 6)
    monkeypatch.setattr(attend, "CHECKED_QUERIES", 4)
    monkeypatch.setattr(attend, "PREFILL_SHAPES", CHUNKS)


def test_attend(small_attend, small_chunk, monkeypatch, capsys):
    fake, prefill = FakeFlashMLA(), FakePrefill()
    monkeypatch.setattr(attend, "load_flash_mla", lambda: fake)
    monkeypatch.setattr(attend, "load_flash_mla_prefill", lambda: prefill)
    assert main(["bench", "attend", "--compare"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert sum("Beside others' kernels" in line for line in table) == 2
    assert any("FlashMLA" in line and "1.00" in line for line in table)
    result = json.loads(last)
    assert result["peers"] == {"FlashMLA": "compared", "FlashMLA's prefill": "compared"}
    *rows, v41 = result["rows"]
    for row in rows:
        assert row["flashmla_us"] == 4.0 and row["ratio"] == 1.0
    assert [row["batch"] for row in rows] == [1, 2, 2, 1, 1]
    assert v41["of_flash"] == 1.0 and "flashmla_us" not in v41
    assert [row.get("verdict") for row in result["rows"]] == ["met", "missed"] + [None] * 4
    for row in result["rows"]:
        judged = (1.0, 0.9, "missed") if row["layer"] == attend.FLASH else (1.0, None, None)
        keys = ("ratio", "target", "verdict")
        assert tuple(row.get(f"invariant_{key}") for key in keys) == judged
    beside = {row["layer"]: row["of_flash_verdict"] for row in result["rows"] if "of_flash" in row}
    assert beside == {"4 tokens": "met", attend.V41: "missed"}
    num_bytes = 128 * 528 + 64 * 288 + 2 * 64 * 512 * 2
    assert v41["floor_us"] == pytest.approx(timing.floor_us(num_bytes))
    assert {tuple(call.query.shape) for call in fake.calls} == {
        (1, 1, 64, 512), (2, 1, 64, 512), (8, 1, 64, 512),
    }  # fmt: skip
    num_rows = [6 * (128 + 64), 6 * 128 + 3 * 3 + 3 * 4]
    for row, shape, count in zip(result["prefill"], CHUNKS, num_rows, strict=True):
        assert (row["layer"], row["tokens"], row["context"]) == (shape.name, 6, 514)
        assert row["tflops"] == row["flashmla_tflops"] == 4 * 64 * count * 512 / 8.0 / 1e6
        assert (row["rows"], row["us"], row["flashmla_us"], row["ratio"]) == (count, 8.0, 8.0, 1.0)
        assert (row["target"], row["verdict"]) == (shape.target_tflops, "missed")
    assert any("prefill chunk" in line for line in table)
    assert [call.counts is None for call in prefill.calls] == [True, True, False, False]
    assert prefill.calls[2].counts.tolist() == [128 + 3] * 3 + [128 + 4] * 3


@pytest.mark.parametrize("shape", CHUNKS, ids=lambda shape: shape.name)
def test_our_kernel_attends_a_chunk(small_chunk, shape):
    case = prefill_case(shape, device="cpu")
    queries = torch.tensor([0, 3, 5])
    check_result(case, attend_case.attend(case, 0), "the output", queries=queries)
    assert case.handles[0].tokens.workspace_starts.tolist() == [0]


def test_selected_entries_are_distinct_visible_and_ascending(small_chunk):
    case = prefill_case(CHUNKS[0], device="cpu")
    (handle,), (rows,) = case.handles, case.rows
    blocks = handle.block_table[0].long().tolist()
    entries = [[blocks.index(row // 64) * 64 + row % 64 for row in line] for line in rows.tolist()]
    for position, line in enumerate(entries, start=508):
        assert line == sorted(set(line)) and len(line) == 64
        assert line[0] >= 0 and (position + 1) // 4 - 3 <= line[-1] < (position + 1) // 4
    assert entries[0] != entries[1] and count_visible(case) == 6 * (128 + 64)


@pytest.mark.parametrize("wrong", ["ours", "FlashMLA's"])
def test_a_chunk_that_is_wrong_is_not_timed(small_attend, small_chunk, wrong, monkeypatch, capsys):
    fake, right = FakePrefill(), attend.attend

    def shifted(inputs):
        return fake(inputs._replace(rows=inputs.rows.where(inputs.rows < 0, inputs.rows + 1)))

    def spoiled(case, layer_idx):
        result = right(case, layer_idx)
        result.output[-1] = 0
        return result

    monkeypatch.setattr(attend, "SHAPES", ())
    monkeypatch.setattr(attend, "load_flash_mla", refuse)
    monkeypatch.setattr(attend, "load_flash_mla_prefill", lambda: shifted)
    if wrong == "ours":
        monkeypatch.setattr(attend, "attend", spoiled)
    assert main(["bench", "attend", "--compare"]) == 1
    what = {"ours": "the output", "FlashMLA's": "FlashMLA's output"}[wrong]
    assert f"CSA: {what} of a chunk differs from the reference's" in capsys.readouterr().err


def test_attend_that_is_wrong_is_not_timed(small_attend, monkeypatch, capsys):
    fake = FakeFlashMLA()

    def wrong(inputs, schedule):
        return fake(inputs._replace(window_rows=inputs.window_rows.flip(-1) * 0 - 1), schedule)

    monkeypatch.setattr(attend, "load_flash_mla", lambda: wrong)
    assert main(["bench", "attend", "--compare"]) == 1
    assert "Flash CSA: FlashMLA's output differs from the reference's" in capsys.readouterr().err


def refuse():
    raise ImportError("nothing here: pip install 'dsv4[extra]'")


def test_attend_without_flashmla(small_attend, small_chunk, monkeypatch, capsys):
    monkeypatch.setattr(attend, "load_flash_mla", refuse)
    monkeypatch.setattr(attend, "load_flash_mla_prefill", refuse)
    assert main(["bench", "attend", "--compare"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert "FlashMLA is not compared: nothing here: pip install 'dsv4[extra]'" in table
    assert "FlashMLA's prefill is not compared: nothing here: pip install 'dsv4[extra]'" in table
    for row in (json.loads(last)[part][0] for part in ("rows", "prefill")):
        assert "flashmla_us" not in row


@pytest.fixture
def small_index(few_layers, monkeypatch):
    monkeypatch.setattr(timing, "replay_time", lambda step, **_: 8.0)  # the interpreter is slow
    monkeypatch.setattr(index, "SCORED", ((600, 2),))
    monkeypatch.setattr(index, "CHOSEN", ())
    monkeypatch.setattr(index, "CHUNK_TOKENS", 4)
    chunks = {"fp8": {1100: 0.1, 1101: 9e9}, "mxfp4": {1100: 9e9}}
    monkeypatch.setattr(index, "CHUNK_TARGETS", chunks)
    targets = {("all", 600, 2): 4.0, ("top-k", 600, 2): 0.3}  # rotating 4, top-k 8 of 20
    monkeypatch.setattr(index, "STEP_TARGETS_US", targets)
    tiny = {"v4-flash": CacheConfig.tiny(compress_ratios=(4, 0, 4)), "v41-flash": tiny_v41()}
    presets = {name: functools.partial(lambda config: config, each) for name, each in tiny.items()}
    monkeypatch.setattr(index, "PRESETS", presets)
    monkeypatch.setattr(index, "MODEL_CONTEXT", 61)
    for name in ("index_case", "measure_model"):
        monkeypatch.setattr(index, name, functools.partial(getattr(index, name), device="cpu"))


def test_index(small_index, monkeypatch, capsys):
    fake = FakeDeepGEMM()
    monkeypatch.setattr(index, "load_deep_gemm", fake.logits)
    assert main(["bench", "index", "--compare"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any("DeepGEMM" in line and "score" in line for line in table)
    rows = json.loads(last)["rows"]
    assert [(row["step"], row["format"], "ratio" in row) for row in rows] == [
        ("query", "fp8", False), ("score", "fp8", True), ("all", "fp8", False),
        ("query", "mxfp4", False), ("score", "mxfp4", True), ("all", "mxfp4", False),
    ]  # fmt: skip
    assert [row.get("verdict") for row in rows] == [None, None, "met"] * 2
    row, config = rows[-1], CacheConfig.v4_flash()
    assert row["bytes"] == 2 * (64 * 128 * 2 + 600 * config.index_row.row_bytes)
    chunks = json.loads(last)["prefill"]
    assert [(row["format"], row["entries"], row["verdict"]) for row in chunks] == [
        ("fp8", 1100, "met"), ("fp8", 1101, "missed"), ("mxfp4", 1100, "missed"),
    ]  # fmt: skip
    assert {(row["ascending_ratio"], row["ascending_verdict"]) for row in chunks} == {(1.0, "met")}
    assert set(fake.sizes) == {2}
    models = json.loads(last)["models"]
    assert [row["kinds"] for row in models] == ["2 x 0.0", "1 x 0.0, 1 x 0.0, 2 x 0.0"]
    assert [(row["layers"], row["of_flash"]) for row in models] == [(2, 1.0), (4, 2.0)]


def test_index_of_a_rank(small_index, monkeypatch, capsys):
    monkeypatch.setattr(index, "FORMATS", ("fp8",))
    monkeypatch.setattr(index, "RANK_CASES", ((2, 1),))
    monkeypatch.setattr(index, "MODEL_CONTEXT", 8192)
    sizes, times, measure = [], iter([8.0, 4.5]), index._time_scores

    def time_scores(case):
        assert measure(case) == 8.0 / index.RANK_LAUNCHES
        sizes.append((len(case.handles), case.num_entries))
        assert case.tokens.positions.tolist() == [4 * case.num_entries - 1] * 2
        return next(times)

    monkeypatch.setattr(index, "_time_scores", time_scores)
    assert main(["bench", "index", "--ranks", "2"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any("one of 2" in line for line in table)
    assert sizes == [(2, 2048), (4, 1024)]
    (row,) = json.loads(last)["ranks"]
    assert (row["share"], row["target"], row["verdict"]) == (0.5625, 0.6, "met")


@pytest.mark.parametrize(("name", "num_steps"), [("fp8", 1200), ("mxfp4", 27)])
def test_keys_that_ascend(few_layers, name, num_steps):
    case = index.index_case(name, 1200, 1, device="cpu")
    keys = existing(case.handles[1].memory.index_keys)
    index.make_ascending(keys, name)
    rows = visible_entry_rows(keys, case.tokens, slice(0, 1), ratio=4, max_entries=1200)[0]
    sizes = gather_rows(keys, rows).double().norm(dim=1)
    assert (sizes.diff() >= 0).all() and len(sizes.unique()) >= 0.9 * num_steps


def test_an_index_that_is_wrong_is_not_timed(small_index, monkeypatch, capsys):
    right = index.indexer.select_entries

    def wrong(*arguments, **options):
        selection = right(*arguments, **options)
        return selection._replace(entry_idx=selection.entry_idx.flip(0))

    monkeypatch.setattr(index.indexer, "select_entries", wrong)
    assert main(["bench", "index"]) == 1
    assert "The chosen entries differ from the reference's" in capsys.readouterr().err


def test_index_that_is_wrong_is_not_timed(small_index, monkeypatch, capsys):
    right = FakeDeepGEMM().logits()
    wrong = right._replace(score=lambda *arguments: right.score(*arguments) * 1.1)
    monkeypatch.setattr(index, "load_deep_gemm", lambda: wrong)
    assert main(["bench", "index", "--compare"]) == 1
    assert "The scores differ from the reference's" in capsys.readouterr().err


def test_choices_of_a_model_that_are_wrong_are_not_timed(small_index, monkeypatch):
    right = ops.select_entries

    def wrong(*arguments, backend, **options):
        selection = right(*arguments, backend="reference", **options)
        blocks = selection.blocks + (backend == "triton")
        return selection._replace(blocks=blocks)

    monkeypatch.setattr(ops, "select_entries", wrong)
    with pytest.raises(RuntimeError, match="blocks differs from the reference's"):
        index.measure_model("v41-flash", 61)


def test_a_folder_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "attend", "--compare", "--peers", "no/such/folder"])
    assert stopped.value.code == 2
    assert "expected a folder, got no/such/folder" in capsys.readouterr().err


@pytest.fixture
def sglang(monkeypatch):
    fake = FakeSGLang()
    for module in (index, write):
        monkeypatch.setattr(module, "load_sglang", fake.kernels)
    return fake


def test_index_by_sglang(small_index, sglang, monkeypatch, capsys):
    monkeypatch.setattr(index, "CHOSEN", ((600, 2),))
    monkeypatch.setattr(index, "load_deep_gemm", refuse)
    assert main(["bench", "index", "--compare"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any("Beside others' kernels" in line for line in table)
    assert any("SGLang" in line for line in table)
    result = json.loads(last)
    assert result["peers"]["SGLang"] == "compared" != result["peers"]["DeepGEMM"]
    assert result["rows"][-1]["verdict"] == "missed"
    compared = [(row["step"], row["format"]) for row in result["rows"] if "sglang_us" in row]
    assert compared == [("query", "fp8"), ("top-k", "fp32")]
    assert sglang.calls == ["make_query", "choose_entries"]  # a check each


def drop_one(kernels):
    def choose_entries(scores, lengths, table, rows, page_rows, plan):
        kernels.choose_entries(scores, lengths, table, rows, page_rows, plan)
        rows[-1, 0] = rows[-1, 1]

    return kernels._replace(choose_entries=choose_entries)


def choose_another(kernels):
    def choose_entries(scores, lengths, table, rows, page_rows, plan):
        kernels.choose_entries(-scores, lengths, table, rows, page_rows, plan)

    return kernels._replace(choose_entries=choose_entries)


def forget_position(kernels):
    def make_query(query, weights, factor, frequencies, positions):
        return kernels.make_query(query, weights, factor, frequencies, positions * 0)

    return kernels._replace(make_query=make_query)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [(drop_one, "top-k"), (choose_another, "top-k"), (forget_position, "queries")],
)
def test_sglang_that_is_wrong_is_not_timed(spoil, what, small_index, sglang, monkeypatch, capsys):
    monkeypatch.setattr(index, "CHOSEN", ((600, 2),))
    monkeypatch.setattr(index, "load_deep_gemm", refuse)
    monkeypatch.setattr(index, "load_sglang", lambda: spoil(sglang.kernels()))
    assert main(["bench", "index", "--compare"]) == 1
    assert f"SGLang's {what} differ" in capsys.readouterr().err


@pytest.fixture
def small_write(clock, monkeypatch):
    monkeypatch.setattr(write, "write_layer", lambda *_: None)  # the interpreter is slow
    monkeypatch.setattr(write, "NUM_LAYERS", 2)
    monkeypatch.setattr(write, "PREFILL_TOKENS", 8)
    monkeypatch.setattr(write, "check_bytes", lambda kind: None)  # it needs a GPU
    for name in ("write_case", "check_sglang"):
        on_cpu = functools.partial(getattr(write, name), device="cpu")
        monkeypatch.setattr(write, name, on_cpu)
    monkeypatch.setattr(write, "bench_write", functools.partial(write.bench_write, batches=(2,)))


def test_write(small_write, sglang, capsys):
    assert main(["bench", "write", "--compare"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any("Beside others' kernels" in line for line in table)
    assert any("SGLang" in line for line in table)
    result = json.loads(last)
    assert result["peers"] == {"SGLang": "compared"}
    assert [(row["sglang_us"], row["ratio"]) for row in result["rows"]] == [(4.0, 1.0)] * 5
    one, entry = ["store_window"], ["pool", "store_entries"]
    csa, hca = [*one, *entry, *entry], [*one, *entry]
    checks, steps = [*one, *csa, *hca], [*one * 2, *csa * 4, *hca * 4]  # 2 layers rotating
    assert sglang.calls == checks + steps


def test_write_without_sglang(small_write, monkeypatch, capsys):
    monkeypatch.setattr(write, "load_sglang", refuse)
    assert main(["bench", "write", "--compare"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert "SGLang is not compared: nothing here: pip install 'dsv4[extra]'" in table
    assert "sglang_us" not in json.loads(last)["rows"][0]


def test_write_alone(small_write, monkeypatch, capsys):
    assert main(["bench", "write"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "peers" not in result and "sglang_us" not in result["rows"][0]


def keep_no_window(kernels):
    return kernels._replace(store_window=lambda *_: None)


def swap_biases(kernels):
    return kernels._replace(
        pool=lambda state, projections, bias, plan: kernels.pool(
            state, projections, bias.flip(0), plan
        )
    )


def shift_keys(kernels):
    def store_entries(pooled, *rest):
        kernels.store_entries(pooled.roll(2, 1) if pooled.shape[1] == 128 else pooled, *rest)

    return kernels._replace(store_entries=store_entries)


def forget_history(kernels):
    return kernels._replace(
        pool=lambda state, projections, bias, plan: kernels.pool(
            state.zero_(), projections, bias, plan
        )
    )


@pytest.mark.parametrize(
    ("kind", "rows", "spoil"),
    [
        ("SWA", "fp8", keep_no_window), ("CSA", "fp8", swap_biases), ("CSA", "mxfp4", shift_keys),
        ("HCA", "fp8", forget_history), ("HCA", "fp8", swap_biases),
    ],
)  # fmt: skip
def test_writes_of_sglang_that_are_wrong_are_not_timed(kind, rows, spoil):
    config = write.write_config(AttentionType[kind])
    right = FakeSGLang().kernels()
    check_sglang(right, config, device="cpu")
    with pytest.raises(RuntimeError, match=f"{kind}: SGLang's {rows} rows differ from the ref"):
        check_sglang(spoil(right), config, device="cpu")
