"""Layers of DeepSeek-V4.1: shared entries and choices through handles, refusals, mistakes."""

import pytest
import torch

from dsv4 import KVCacheManager
from dsv4.cache.memory import layout
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.kernels.contracts import CompressorInputs, CompressorWeights, LayerWeights
from dsv4.kernels.layer_memory import LayerLayout
from dsv4.kernels.reference import flush_write, indexer
from dsv4.kernels.reference.arithmetic import rms_norm, rotate
from dsv4.kernels.reference.codec import read_rows
from dsv4.rope import build_rope_table
from dsv4.testing import Row, forward_inputs, forward_layer, model_projections, model_weights
from tests.dense import dense_layers
from tests.v41 import tiny_v41

NUM_TOKENS = 150
OWNERS = (1, 3)


class Case:
    """A prefill of one request; its oracle is made before a test changes anything."""

    def __init__(self, config=None, scale=1.0, norm_scale=1.0, key_scale=1.0):
        self.config = config or tiny_v41()
        self.weights = [
            learned._replace(kv_norm=norm_scale * learned.kv_norm)
            for learned in model_weights(self.config, seed=5)
        ]
        for learned in self.weights:
            if learned.indexer is not None:
                learned.indexer.projection.mul_(key_scale)
        self.inputs = model_projections(
            self.config,
            NUM_TOKENS,
            seed=9,
            draw=lambda *a, **given: scale * torch.randn(*a, **given),
        )
        self.manager = KVCacheManager(self.config, max_requests=1, num_blocks=16)
        self.ropes = {
            base: build_rope_table(
                self.config, base, num_positions=NUM_TOKENS, device=self.manager.device
            )
            for base in ("main", "compress")
        }
        self.oracle = dense_layers(self.config, self.inputs, self.weights, self.ropes)
        self.slot, self.chosen = self.manager.open_request(), {}

    def plan(self):
        self.chosen = {}
        return prepare_forward(self.manager, [self.slot], [0], [NUM_TOKENS])

    def run(self, plan, layers=None):
        rows = [Row(self.slot, self.inputs, 0, NUM_TOKENS)]
        for idx in range(self.config.num_layers) if layers is None else layers:
            handle = self.manager.acquire(idx, plan)
            forward_layer(handle, forward_inputs(rows, idx), self.weights[idx], self.chosen)
        return plan

    def wrong_parts(self):
        """Run everything; name what is not as the oracle has it."""
        self.run(self.plan())
        wrong = set()
        for idx in range(self.config.num_layers):
            ring = self.manager.state.layer(idx).ring
            live = torch.arange(NUM_TOKENS - ring.rows_per_page, NUM_TOKENS)
            stored = read_rows(ring, self.slot * ring.rows_per_page + live % ring.rows_per_page)
            expected = self.oracle[idx].window
            if not all(torch.equal(a, b[live]) for a, b in zip(stored, expected, strict=True)):
                wrong.add("window")
        for idx in OWNERS:
            pages, entry = self.manager.paged.layer(idx), self.manager.schemas[idx].ratio
            entry = torch.arange(NUM_TOKENS // entry)
            for name in ("entries", "index_keys"):
                rows = getattr(pages, name)
                blocks = self.manager.block_table[self.slot].long()[entry // rows.rows_per_page]
                stored = read_rows(rows, blocks * rows.rows_per_page + entry % rows.rows_per_page)
                expected = getattr(self.oracle[idx], name)
                if not all(torch.equal(*pair) for pair in zip(stored, expected, strict=True)):
                    wrong.add(name)
        for idx, selection in self.chosen.items():
            if not torch.equal(selection.entry_idx.long(), self.oracle[idx].selected):
                wrong.add(f"choice of layer {idx}")
        return wrong


def test_nothing_is_wrong():
    assert not Case().wrong_parts()


def test_key_after_rope(monkeypatch):
    case, kept = Case(), {}
    windows, project = flush_write.latent_windows, flush_write.project

    def remember(rows, kv, tail, weight, tokens, **sizes):
        closed = windows(rows, kv, tail, weight, tokens, **sizes)
        owner = case.manager.device_memory.memories[OWNERS[sizes["ratio"] == 1]]
        kept["rotated"] = flush_write.rotate_entries(closed, owner.entry_rope)
        return closed

    monkeypatch.setattr(flush_write, "latent_windows", remember)
    monkeypatch.setattr(flush_write, "project", lambda _, w: project(kept["rotated"].entries, w))
    wrong = case.wrong_parts()
    assert "index_keys" in wrong and "entries" not in wrong


def test_bias_added(monkeypatch):
    case, tail_rows = Case(), flush_write.tail_rows
    monkeypatch.setattr(
        flush_write, "tail_rows",
        lambda kv, gate, bias, positions, dtype: tail_rows(
            kv, gate, torch.tensor([[0.5], [0.0]]), positions, dtype
        ),
    )  # fmt: skip
    assert {"entries", "index_keys"} <= case.wrong_parts()


def test_eps_of_v4():
    """Small rows have a norm of 1 with V4.1's epsilon, and are lost in V4's."""
    rows, weight = (
        torch.randn(5, 96, generator=torch.Generator().manual_seed(1)) * 1e-6,
        torch.ones(96),
    )
    for eps, expected in ((1e-20, 1.0), (1e-6, 1e-3)):
        assert abs(float(rms_norm(rows, weight, eps).pow(2).mean().sqrt()) / expected - 1) < 0.1
    case, of_v4 = Case(scale=1e-4, key_scale=1e-4), tiny_v41(rms_norm_eps=1e-6)
    assert not case.wrong_parts()
    case.manager = KVCacheManager(of_v4, max_requests=1, num_blocks=16)
    case.slot = case.manager.open_request()
    assert {"window", "entries", "index_keys"} <= case.wrong_parts()
    assert of_v4.format_fingerprint != tiny_v41().format_fingerprint


@pytest.mark.parametrize("is_normed", [False, True])
def test_query_normed(monkeypatch, is_normed):
    """A raw query is rotated alone, in SWA layers too."""
    if is_normed:
        monkeypatch.setattr(
            layout, "LayerLayout", lambda **given: LayerLayout(**{**given, "norms_query": True})
        )
    case = Case()
    plan = case.plan()
    for idx, weights in enumerate(case.weights):
        handle = case.manager.acquire(idx, case.run(plan, layers=(idx,)))
        raw, sinks = case.inputs[idx].query, weights.sinks
        selection = case.chosen.get(handle.layer.choice_of)
        cos, sin = (rows[:NUM_TOKENS, None] for rows in case.ropes[handle.layer.rope_base])
        expected = handle.attend(rotate(raw, cos, sin), sinks, selection)
        got = handle.attend(raw, sinks, selection, is_query_raw=True)
        assert torch.equal(got.output, expected.output) != is_normed


def test_newest_block_not_pinned(monkeypatch):
    case = Case()

    def unpinned(scores, counts, num_blocks, size):
        idx = torch.arange(scores.shape[1])
        used = torch.where(idx < counts[:, None], scores, -torch.inf)
        used = torch.nn.functional.pad(used, (0, -len(idx) % size), value=-torch.inf)
        largest = used.unflatten(1, (-1, size)).amax(dim=2)
        return indexer.select_topk(largest, -(-counts // size), num_blocks)

    monkeypatch.setattr(indexer, "select_blocks", unpinned)
    wrong = case.wrong_parts()
    assert "choice of layer 4" in wrong and "choice of layer 3" not in wrong


def test_mask_in_the_candidate_source_itself():
    """Its own top-k is of all entries, and not of the blocks that it publishes."""
    case = Case()
    case.run(case.plan())
    chosen = case.chosen[3]
    size = case.config.candidate_block_size
    inside = (chosen.entry_idx[:, :, None] // size == chosen.blocks[:, None]).any(dim=2)
    assert (~inside & (chosen.entry_idx >= 0)).any()


def test_later_sources_stay_inside_of_the_candidates():
    case = Case()
    case.run(case.plan())
    blocks, size = case.chosen[3].blocks, case.config.candidate_block_size
    for idx in (4, 6):
        entries = case.chosen[idx].entry_idx
        inside = (entries[:, :, None] // size == blocks[:, None]).any(dim=2)
        assert (inside | (entries < 0)).all()
        assert (case.chosen[idx].counts == torch.arange(1, NUM_TOKENS + 1).clamp(max=8)).all()
    assert (blocks >= 0).sum(dim=1).max() == 4
    assert case.chosen[1].blocks.shape == (NUM_TOKENS, 0)


@pytest.mark.parametrize("change", [{"page_arrangement": "split"}, {"scale_floor": "scale"}])
def test_rows_of_another_arrangement_or_floor(change, tmp_path):
    """The bytes differ, so a file of one is refused by the other."""
    case, other = Case(norm_scale=1e-3), Case(tiny_v41(**change), norm_scale=1e-3)
    assert not case.wrong_parts() and not other.wrong_parts()
    mine, theirs = case.manager, other.manager
    assert not torch.equal(mine.state.storage, theirs.state.storage)
    assert torch.equal(mine.paged.storage, theirs.paged.storage) == ("scale_floor" in change)
    for source, target in ((mine, theirs), (theirs, mine)):
        source.save_request(0, tmp_path / "file")
        before = [target.state.storage.clone(), target.paged.storage.clone()]
        with pytest.raises(ValueError, match=r"expected config_fingerprint .*, as this cache has"):
            target.load_request(tmp_path / "file")
        assert torch.equal(target.state.storage, before[0])
        assert torch.equal(target.paged.storage, before[1])


def test_floor_swapped():
    """The oracle has the other rule; only rows of small values tell."""
    for norm_scale, expected in ((1.0, set()), (1e-3, {"window"})):
        case = Case(norm_scale=norm_scale)
        case.manager = KVCacheManager(tiny_v41(scale_floor="scale"), max_requests=1, num_blocks=16)
        case.slot = case.manager.open_request()
        assert case.wrong_parts() == expected


def test_forward_takes_the_selection_of_its_source():
    case = Case()
    plan = case.plan()
    case.run(plan, layers=(0, 1))
    result = case.manager.acquire(2, plan).forward(case.inputs[2], case.weights[2], case.chosen[1])
    assert torch.allclose(result.output, case.oracle[2].output, atol=1e-5)
    case.run(plan, layers=(3,))
    result = case.manager.acquire(4, plan).forward(case.inputs[4], case.weights[4], case.chosen[3])
    assert torch.allclose(result.output, case.oracle[4].output, atol=1e-5)


def attend_with(source):
    return lambda case, handle: handle.attend(case.inputs[5].query, None, case.chosen.get(source))


def select_with(source, change=lambda chosen: chosen):
    def select(case, handle):
        index = case.inputs[6].indexer
        handle.select_entries(index.query, index.head_weights, change(case.chosen.get(source)))

    return select


READS = {
    "other_choice": (5, attend_with(3), r"layer 5 \(CSA\): expected the result of layer 4's"),
    "earlier_choice": (5, attend_with(1), "expected the result of layer 4's select_entries"),
    "no_choice": (5, attend_with(9), r"Invalid selection of layer 5 \(CSA\): expected the result "
                                     "of layer 4's select_entries in this forward, got None"),
    "no_candidates": (6, select_with(9), r"Invalid candidates of layer 6 \(CSA\): expected the "
                                         "result of layer 3's select_entries .*, got None"),
    "needless_candidates": (3, select_with(1), "Invalid candidates of layer 3 .*: expected None, "
                                               "got Selection"),
    "other_candidates": (6, select_with(4), "expected the result of layer 3's select_entries"),
    "selects": (5, select_with(3), "Layer 5 attends the choice of layer 4: it selects no entries"),
}  # fmt: skip


@pytest.mark.parametrize(("layer_idx", "read", "message"), READS.values(), ids=READS)
def test_reads_of_another_layers_choice_are_refused(layer_idx, read, message):
    case = Case()
    plan = case.run(case.plan(), layers=range(layer_idx))
    handle = case.manager.acquire(layer_idx, plan)
    handle.write(case.inputs[layer_idx], case.weights[layer_idx])
    with pytest.raises(ValueError, match=message):
        read(case, handle)


BLOCKS = {
    "none": lambda blocks: None,
    "narrow": lambda blocks: blocks[:, :2],
    "few": lambda blocks: blocks[:3],
    "float": torch.Tensor.float,
    "beyond": lambda blocks: torch.full_like(blocks, 10**6),
    "copy": torch.Tensor.clone,
}


@pytest.mark.parametrize("change", BLOCKS.values(), ids=BLOCKS)
def test_candidates_are_the_sources_own_blocks(change):
    case = Case()
    plan = case.run(case.plan(), layers=range(4))
    handle, chosen = case.manager.acquire(4, plan), case.chosen[3]
    handle.write(case.inputs[4], case.weights[4])
    select = select_with(3, lambda chosen: chosen._replace(blocks=change(chosen.blocks)))
    with pytest.raises(ValueError, match=r"Invalid candidates of layer 4 .*, got another one"):
        select(case, handle)
    select_with(3, lambda chosen: chosen._replace(counts=None))(case, handle)
    assert chosen.blocks.shape == (NUM_TOKENS, 4)


@pytest.mark.parametrize("given", [(1, 2), {"rows": 1}, 5, "3"])
def test_a_selection_is_no_other_type(given):
    case = Case()
    plan = case.run(case.plan(), layers=range(4))
    handle, kind = case.manager.acquire(4, plan), type(given).__name__
    with pytest.raises(TypeError, match=rf"Invalid candidates of layer 4 .*, got {kind}"):
        handle.forward(case.inputs[4], case.weights[4], given)
    handle.write(case.inputs[4], case.weights[4])
    with pytest.raises(TypeError, match=rf"Invalid candidates of layer 4 .*, got {kind}"):
        select_with(3, lambda _: given)(case, handle)
    with pytest.raises(TypeError, match=rf"Invalid selection of layer 4 .*, got {kind}"):
        handle.attend(case.inputs[4].query, None, given)


def test_a_choice_of_another_forward_is_refused():
    case = Case()
    case.run(case.plan())
    old = case.chosen[4]
    case.manager.truncate(case.slot, 0)
    plan = case.run(case.plan(), layers=range(5))
    handle = case.manager.acquire(5, plan)
    handle.write(case.inputs[5], case.weights[5])
    with pytest.raises(ValueError, match="expected the result of layer 4's select_entries in this"):
        handle.attend(case.inputs[5].query, None, old)


def test_entries_are_read_after_their_owner_is_written():
    case = Case()
    plan = case.run(case.plan(), layers=(0,))
    handle = case.manager.acquire(2, plan)
    handle.write(case.inputs[2], case.weights[2])
    with pytest.raises(RuntimeError, match="Layer 2 reads the entries of layer 1 before they are"):
        handle.gather_all_compressed_kv()


def wrong_inputs(case, layer_idx, **changes):
    return case.inputs[layer_idx]._replace(**changes), case.weights[layer_idx]


WRITES = {
    "gate_of_one_token": (
        3, lambda c: wrong_inputs(c, 3, compressor=CompressorInputs(*[c.inputs[3].kv] * 2)),
        "Invalid gate of layer 3 .*: expected None, an entry has one token, got Tensor",
    ),
    "bias": (
        1, lambda c: (c.inputs[1], c.weights[1]._replace(
            compressor=CompressorWeights(torch.zeros(2, 96), c.weights[1].compressor.norm_weight))),
        "Invalid position_bias of layer 1 .*: expected None, got Tensor",
    ),
    "entries_of_another": (
        2, lambda c: wrong_inputs(c, 2, compressor=c.inputs[1].compressor),
        "Invalid inputs of layer 2 .*: expected no compressor projections and weights, got proj",
    ),
    "no_entries": (
        1, lambda c: wrong_inputs(c, 1, compressor=None),
        "Invalid inputs of layer 1 .*: expected compressor projections and weights, got weights",
    ),
    "index_of_swa": (
        0, lambda c: wrong_inputs(c, 0, indexer=c.inputs[1].indexer),
        "Invalid inputs of layer 0 .*: expected no index inputs, got 2 of 3",
    ),
    "keys_of_swa": (
        0, lambda c: (c.inputs[0], c.weights[0]._replace(indexer=c.weights[1].indexer)),
        "Invalid inputs of layer 0 .*: expected no index inputs, got 1 of 3",
    ),
    "keys_of_another": (
        2, lambda c: (c.inputs[2], c.weights[2]._replace(indexer=c.weights[1].indexer)),
        "Invalid weights of layer 2 .*: expected no indexer, got KeyWeights",
    ),
    "index_of_another": (
        2, lambda c: wrong_inputs(c, 2, indexer=c.inputs[1].indexer),
        "Invalid inputs of layer 2 .*: expected no index inputs, got IndexInputs",
    ),
    "no_query": (
        1, lambda c: wrong_inputs(c, 1, indexer=None),
        "Invalid inputs of layer 1 .*: expected an index query and head weights, got None",
    ),
    "index_kv": (
        1, lambda c: wrong_inputs(c, 1, indexer=c.inputs[1].indexer._replace(kv=c.inputs[1].kv)),
        "Invalid index_kv of layer 1 .*: expected None, .*, got Tensor",
    ),
    "no_key_weights": (
        1, lambda c: (c.inputs[1], LayerWeights(*c.weights[1][:3])),
        "Invalid weights of layer 1 .*: expected KeyWeights as indexer, got None",
    ),
    "key_shape": (
        1, lambda c: (c.inputs[1], c.weights[1]._replace(
            indexer=c.weights[1].indexer._replace(projection=torch.zeros(64, 95)))),
        r"Invalid shape of index_projection: expected \[64, 96\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layer_idx", "given", "message"), WRITES.values(), ids=WRITES)
def test_writes_are_refused_before_anything_is_written(layer_idx, given, message):
    case = Case()
    plan = case.run(case.plan(), layers=range(layer_idx))
    before = case.manager.state.storage.clone()
    handle = case.manager.acquire(layer_idx, plan)
    with pytest.raises(ValueError, match=message):
        handle.write(*given(case))
    assert torch.equal(case.manager.state.storage, before) and plan.is_live


def test_flush_compression_of_shared_entries():
    case = Case()
    plan = case.run(case.plan(), layers=(0,))
    handle, inputs, weights = case.manager.acquire(1, plan), case.inputs[1], case.weights[1]
    handle.write_swa(inputs.kv, weights.kv_norm)
    handle.flush_compression(*inputs.compressor, weights.compressor, index_weights=weights.indexer)
    chosen = handle.select_entries(inputs.indexer.query, inputs.indexer.head_weights)
    assert torch.equal(chosen.entry_idx.long(), case.oracle[1].selected)
    with pytest.raises(ValueError, match="Layer 2 reads the entries of layer 1: it has nothing to"):
        case.manager.acquire(2, plan).flush_compression(*inputs.compressor, weights.compressor)


FLUSHES = {
    "index_gate": ({"index_gate": torch.zeros(3, 3)}, "Invalid index_gate of layer 1 .*got Tensor"),
    "index_kv": ({"index_kv": torch.zeros(3, 3)}, "Invalid index_kv of layer 1 .*got Tensor"),
    "no_keys": ({"index_weights": None}, "index_weights of layer 1 .*: expected KeyWeights, got N"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "message"), FLUSHES.values(), ids=FLUSHES)
def test_flushes_are_refused(given, message):
    case = Case()
    plan = case.run(case.plan(), layers=(0,))
    handle, inputs, weights = case.manager.acquire(1, plan), case.inputs[1], case.weights[1]
    given = {"index_weights": weights.indexer, **given}
    with pytest.raises(ValueError, match=message):
        handle.flush_compression(*inputs.compressor, weights.compressor, **given)
    assert plan.is_live


def test_views_of_rows_without_a_rope_field():
    case = Case()
    plan = case.run(case.plan())
    handle = case.manager.acquire(5, plan)
    window, entries = handle.read_swa_view(), handle.read_classical_view()
    assert window.rope is None and entries.entries_rope is None
    assert window.fp8.shape[-1] == 96 and entries.entries_fp8.shape[-1] == 48
    assert entries.inv_scale.shape[-1] == 6
    assert torch.equal(entries.entries_fp8, case.manager.paged.layer(3).entries_fp8)
