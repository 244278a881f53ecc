"""A captured step of the whole model: the logits of the eager one, refusals, and fallbacks."""

import gc
import random
import weakref

import pytest
import torch

from dsv4 import prepare_forward
from dsv4.integrations.transformers import PackedModel, attach, detach
from dsv4.integrations.transformers.captured_step import CapturedStep
from tests.integrations.generation import poisoned, prompts, share_of_scale, small_model

PROMPTS = (1, 3, 124, 127, 130, 250)
OPTIONS = {"batch_invariant": True, "drafts_per_step": 3, "max_requests": 16, "max_tokens": 512}


EVERY_MODEL = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
    indirect=["device"],
    ids=["cpu", "cuda-fp32", "cuda-bf16"],
)


def hashed_model(device, dtype=torch.float32, **overrides):
    """Make a model whose first layer routes by ids, with experts that can be captured."""
    model = small_model(5, 4, 128, 0, num_hash_layers=1, **overrides).to(device, dtype)
    model.model.layers[0].mlp.gate.tid2eid.random_(0, 4)
    model.set_experts_implementation("batched_mm")
    return model


@pytest.fixture(scope="module")
def models():
    return {}


@pytest.fixture
def dtype():
    return torch.float32


@pytest.fixture
def model(models, device, dtype):
    if (device, dtype) not in models:
        models[device, dtype] = hashed_model(device, dtype)
    return models[device, dtype]


def run_eagerly(model, cache, ids, plan):
    """Run the model over the tokens of a plan, launch by launch."""
    return PackedModel(model, cache)(ids, plan, torch.arange(len(ids), device=ids.device))


class Twins:
    """Two caches of one model with the same requests; one replays a captured step."""

    def __init__(self, model, **sizes):
        self.model, self.device = model, model.device
        formats = {} if model.dtype == torch.float32 else {"kv_format": "bf16"}
        self.captured, self.eager = (poisoned(model, **OPTIONS, **formats) for _ in range(2))
        self.step = CapturedStep(model, self.captured, **sizes)
        self.lengths = {}

    def open(self, length):
        slots = [cache.manager.open_request() for cache in (self.captured, self.eager)]
        assert slots[0] == slots[1]
        ids = prompts(length, length)[0].to(self.device)
        for cache in (self.captured, self.eager):
            plan = prepare_forward(cache.manager, slots[:1], [0], [length])
            run_eagerly(self.model, cache, ids, plan)
        self.lengths[slots[0]] = length

    def truncate(self, slot, length):
        for cache in (self.captured, self.eager):
            cache.manager.truncate([slot], [length])
        self.lengths[slot] = length

    def advance(self, slots, counts):
        """Run one forward of both; the eager one is padded to the captured size."""
        before = [self.lengths[slot] for slot in slots]
        after = [length + count for length, count in zip(before, counts, strict=True)]
        num_tokens, size = sum(counts), len(self.step.ids)
        ids = torch.randint(1, 128, (size,), device=self.device)
        plan = prepare_forward(self.captured.manager, slots, before, after)
        assert self.step.fits(plan)
        self.step.ids.copy_(ids)
        mine = self.step.run(plan)[:num_tokens]
        assert plan.is_complete
        padding = [1] * (size - num_tokens)
        if self.step.max_chunks and padding:
            padding = [sum(padding)]  # one row, since there may be more tokens than requests
        rows, starts = [*slots, *[-1] * len(padding)], [*before, *[0] * len(padding)]
        plan = prepare_forward(self.eager.manager, rows, starts, after + padding)
        theirs = run_eagerly(self.model, self.eager, ids, plan)[:num_tokens]
        self.lengths.update(zip(slots, after, strict=True))
        return mine, theirs

    def close(self):
        for cache in (self.captured, self.eager):
            cache.manager.free_requests(list(self.lengths))
            cache.manager.check_integrity()
            cache.close()


def check_equal(mine, theirs):
    """Compare bits on a GPU; on a CPU they may depend on where a tensor begins."""
    if mine.device.type == "cuda":
        assert torch.equal(mine, theirs)
    else:
        assert share_of_scale(mine, theirs) <= 1e-5


@EVERY_MODEL
@pytest.mark.parametrize("num_requests", [1, 3, 8])
def test_decode_steps_equal_eager_ones(model, num_requests):
    twins, batch = Twins(model, batch=max(4, num_requests)), random.Random(num_requests)
    for _ in range(num_requests):
        twins.open(batch.choice(PROMPTS))
    for _ in range(8):
        slots = batch.sample(sorted(twins.lengths), batch.randint(1, num_requests))
        check_equal(*twins.advance(slots, [1] * len(slots)))
    twins.close()


@EVERY_MODEL
def test_verification_steps_equal_eager_ones(model):
    twins, choose = Twins(model, batch=3, tokens_per_request=4), random.Random(0)
    for length in (3, 126, 250):
        twins.open(length)
    for _ in range(8):
        slots = choose.sample(sorted(twins.lengths), choose.randint(1, 3))
        counts = [choose.randint(1, 4) for _ in slots]
        check_equal(*twins.advance(slots, counts))
        for slot, count in zip(slots, counts, strict=True):  # some drafts are rejected
            twins.truncate(slot, twins.lengths[slot] - choose.randint(0, count - 1))
    twins.close()


@EVERY_MODEL
def test_steps_with_chunks_equal_eager_ones(model):
    twins, choose = Twins(model, batch=4, max_chunks=2, num_tokens=48), random.Random(1)
    for length in (3, 100, 126, 250):
        twins.open(length)
    for _ in range(6):
        slots = choose.sample(sorted(twins.lengths), choose.randint(1, 4))
        counts = [choose.randint(1, 4) if idx > 1 else choose.randint(1, 20) for idx in slots]
        check_equal(*twins.advance(slots, counts))
    twins.close()


def test_plans_that_do_not_fit(model):
    with poisoned(model, **OPTIONS) as cache:
        manager = cache.manager
        step = CapturedStep(model, cache, batch=2, max_length=100)
        slots = manager.open_requests(3)

        def fits(before, after, rows=slots):
            plan = prepare_forward(manager, rows[: len(before)], before, after)
            fits = step.fits(plan)
            if not fits:
                with pytest.raises(ValueError, match="Invalid plan: expected"):
                    step.run(plan)
            plan.cancel()
            return fits

        assert fits([0], [1]) and fits([0, 0], [1, 1])
        assert not fits([0], [2]) and not fits([0, 0, 0], [1, 1, 1]) and not fits([0, 0], [1, 0])
        plan = prepare_forward(manager, slots[:1], [0], [100])
        run_eagerly(model, cache, prompts(0, 100)[0].to(model.device), plan)
        assert not fits([100], [101])
        manager.free_requests(slots)


def test_what_the_caller_finishes_with(model):
    with poisoned(model, **OPTIONS) as cache, torch.inference_mode():
        plain = CapturedStep(model, cache, batch=2)
        greedy = CapturedStep(model, cache, batch=2, finish=lambda logits: logits.argmax(-1))
        hidden = CapturedStep(model.model, cache, batch=2)
        outputs = []
        for step in (plain, greedy, hidden):
            slots = cache.manager.open_requests(2)
            step.ids.copy_(torch.tensor([7, 9]))
            outputs.append(step.run(prepare_forward(cache.manager, slots, [0, 0], [1, 1])).clone())
            cache.manager.free_requests(slots)
        assert (
            outputs[0].shape == (2, 128) and outputs[1].tolist() == outputs[0].argmax(-1).tolist()
        )
        check_equal(model.lm_head(outputs[2]), outputs[0])


@EVERY_MODEL
def test_steps_of_the_model_equal_eager_ones(model):
    """Replay through the model's own forward: logits, and the outputs that are not captured."""
    texts = torch.stack(prompts(1, 125, 125)).to(model.device)
    formats = {} if model.dtype == torch.float32 else {"kv_format": "bf16"}
    caches = [
        poisoned(model, batch_invariant=True, cuda_graphs=graphs, **formats)
        for graphs in ("step", False)
    ]
    with torch.no_grad():
        for cache in caches:
            model(texts, past_key_values=cache)
        for token in range(8):
            ids = torch.full((2, 1), token + 1, device=model.device)
            mine, theirs = (model(ids, past_key_values=cache) for cache in caches)
            check_equal(mine.logits, theirs.logits)
            assert mine.past_key_values is caches[0] and mine.logits.shape == (2, 1, 128)
        assert list(caches[0]._steps) == [(2, "batched_mm")]
        caches[0]._steps.clear()
        for options in ({"output_hidden_states": True}, {"output_router_logits": True}):
            mine, theirs = (model(ids, past_key_values=cache, **options) for cache in caches)
            check_equal(mine.logits, theirs.logits)
        assert len(mine.router_logits) == 2  # the layer that routes by ids has none
        mine = model(ids, past_key_values=caches[0], return_dict=False)
        assert isinstance(mine, tuple)
    logits = model(ids, past_key_values=caches[0]).logits
    with pytest.raises(RuntimeError, match="No gradients through a PagedCache"):
        logits.sum().backward()
    assert list(caches[0]._steps) == [(2, "batched_mm")]  # of the tuple, which the head makes
    for cache in caches:
        cache.close()


def test_a_batch_is_captured_once_per_experts(model):
    ids = torch.ones(2, 1, dtype=torch.long, device=model.device)
    with poisoned(model, cuda_graphs="step") as cache, torch.no_grad():
        for _ in range(3):
            model(ids, past_key_values=cache)
        (step,) = cache._steps.values()
        assert (step.batch, step.max_length) == (2, 32)
        model(ids, past_key_values=cache)
        assert list(cache._steps.values()) == [step]
        model.set_experts_implementation("eager")  # after attach
        try:
            with pytest.raises(ValueError, match="Invalid experts for a captured step"):
                model(ids, past_key_values=cache)
        finally:
            model.set_experts_implementation("batched_mm")
        assert cache.lengths == [4, 4]
        cache.reset()
        for _ in range(2):
            model(ids[:1], past_key_values=cache)
        assert [batch for batch, _ in cache._steps] == [2, 1]


def test_a_step_while_another_forward_is_live(model):
    ids = torch.ones(1, 1, dtype=torch.long, device=model.device)
    with poisoned(model, cuda_graphs="step") as cache, torch.no_grad():
        other = cache.manager.open_request()
        plan = prepare_forward(cache.manager, [other], [0], [1])
        with pytest.raises(RuntimeError, match=r"A forward of slots .* is live"):
            model(ids, past_key_values=cache)
        plan.cancel()
        assert not cache._steps and cache.get_seq_length() == 0
        model(ids, past_key_values=cache)
        assert cache.lengths == [1]


@pytest.mark.parametrize("name", ["eager", "grouped_mm"])
def test_experts_that_wait_are_refused(device, name):
    model = hashed_model(device)
    model.set_experts_implementation(name)
    refusal = f"got '{name}' in float32.*model.set_experts_implementation\\('batched_mm'\\)"
    with pytest.raises(ValueError, match=refusal):
        attach(model, max_requests=1, max_tokens=256, cuda_graphs="step")
    assert "forward" not in vars(model.model)
    with (
        attach(model, max_requests=1, max_tokens=256) as cache,
        pytest.raises(ValueError, match=refusal),
    ):
        CapturedStep(model, cache, batch=1)


def test_other_kinds_of_graphs_are_refused(device):
    with pytest.raises(ValueError, match="expected False, True or 'step', got 'steps'"):
        attach(hashed_model(device), max_requests=1, max_tokens=256, cuda_graphs="steps")


@pytest.mark.gpu
def test_grouped_experts_in_bf16():
    model = hashed_model("cuda", torch.bfloat16)
    model.set_experts_implementation("grouped_mm")
    twins = Twins(model, batch=3)
    for length in (3, 127, 130):
        twins.open(length)
    for _ in range(4):
        check_equal(*twins.advance([0, 1, 2], [1, 1, 1]))
    twins.close()


@pytest.mark.gpu
def test_a_replay_never_waits_and_keeps_no_model():
    model = hashed_model("cuda")
    cache = attach(model, max_requests=2, max_tokens=256)
    step = CapturedStep(model, cache, batch=2)
    slots = cache.manager.open_requests(2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for length in range(4):
            step.run(prepare_forward(cache.manager, slots, [length] * 2, [length + 1] * 2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    owner = weakref.ref(model)
    cache.close()
    detach(model)
    del model
    gc.collect()
    assert owner() is None
