"""Decode steps by graphs equal those launch by launch, for every use of the cache."""

import pytest
import torch

from dsv4.integrations.transformers import attach, cache, captured_attention, captured_step
from tests.integrations.generation import GREEDY, alone, padded, poisoned, prompts, small_model


@pytest.fixture
def captures(monkeypatch):
    """Record batch and length of every capture of attention modules."""
    made = []

    class Counted(captured_attention.CapturedAttention):
        def __init__(self, *args, batch, longest, **kwargs):
            made.append((batch, longest))
            super().__init__(*args, batch=batch, longest=longest, **kwargs)

    monkeypatch.setattr(cache, "CapturedAttention", Counted)
    return made


@pytest.fixture
def captured_steps(monkeypatch):
    """Record batch and longest text of every capture of a whole step."""
    made = []

    class Counted(captured_step.CapturedStep):
        def __init__(self, *args, batch, max_length, **kwargs):
            made.append((batch, max_length))
            super().__init__(*args, batch=batch, max_length=max_length, **kwargs)

    monkeypatch.setattr(captured_step, "CapturedStep", Counted)
    return made


@pytest.fixture(scope="module")
def models():
    return {}


@pytest.fixture
def model(models, device):
    if device not in models:
        models[device] = small_model(3, 4, 128, 0).to(device)
        models[device].set_experts_implementation("batched_mm")
    return models[device]


def generate(model, inputs, *, cuda_graphs, **options) -> list[list[int]]:
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    with poisoned(model, cuda_graphs=cuda_graphs) as cache:
        ids = model.generate(**inputs, **{**GREEDY, **options}, past_key_values=cache)
        cache.manager.check_integrity()
    return ids.tolist()


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 4}, {"prompt_lookup_num_tokens": 3}, {"num_return_sequences": 2}],
    ids=["greedy", "beams", "assisted", "sequences"],
)
def test_ids_are_those_without_graphs(model, captures, captured_steps, options):
    texts = prompts(1, 120) if "prompt_lookup_num_tokens" in options else prompts(1, 120, 7)
    if "num_return_sequences" in options:
        options = {**options, "do_sample": True, "temperature": 1e-6}
    options = {**options, "max_new_tokens": 20}
    plain = generate(model, padded(texts), cuda_graphs=False, **options)
    assert not captures and not captured_steps
    assert generate(model, padded(texts), cuda_graphs=True, **options) == plain
    assert captures[-1][1] == 129  # where the capture of up to 128 tokens is too short
    captures.clear()
    assert generate(model, padded(texts), cuda_graphs="step", **options) == plain
    assert captured_steps[-1][1] == 256 and not captures


def test_a_batch_is_captured_once(model, captures):
    with poisoned(model, cuda_graphs=True) as cache:
        for length in (60, 40, 5):
            text = alone(prompts(length, length)[0].to(model.device))
            mine = model.generate(**text, **GREEDY, max_new_tokens=4, past_key_values=cache)
            theirs = model.generate(**text, **GREEDY, max_new_tokens=4)
            assert mine.tolist() == theirs.tolist()
            cache.reset()
        assert captures == [(1, 61)]
        both = {name: value.to(model.device) for name, value in padded(prompts(3, 9, 5)).items()}
        model.generate(**both, **GREEDY, max_new_tokens=2, past_key_values=cache)
        assert captures == [(1, 61), (2, 10)]


def test_the_longest_text_that_there_is_room_for(model, captures):
    (prompt,) = prompts(4, 250)
    text = alone(prompt.to(model.device))
    with poisoned(model, cuda_graphs=True, max_tokens=256) as cache:
        mine = model.generate(**text, **GREEDY, max_new_tokens=7, past_key_values=cache)
        assert mine.tolist() == model.generate(**text, **GREEDY, max_new_tokens=7).tolist()
        assert captures == [(1, 251)] and cache.lengths == [256]
        with pytest.raises(ValueError, match="expected at most 256, got 257"):
            model(text["input_ids"][:, :1], past_key_values=cache)
        assert cache.lengths == [256]


def test_outputs_stay_when_the_graph_runs_again(model):
    attention, outputs = model.model.layers[0].self_attn, []
    hook = attention.register_forward_hook(lambda *call: outputs.append(call[-1][0]))
    try:
        with poisoned(model, cuda_graphs=True) as cache, torch.no_grad():
            kept = []
            for token in (3, 5, 7):
                ids = torch.tensor([[token]], device=model.device)
                model(ids, past_key_values=cache)
                kept.append(outputs[-1].clone())
    finally:
        hook.remove()
    for output, copy in zip(outputs, kept, strict=True):
        assert torch.equal(output, copy)
    assert not torch.equal(kept[1], kept[2])


def test_a_capture_serves_any_grad_mode(model):
    ids = torch.tensor([[3]], device=model.device)
    with poisoned(model, cuda_graphs=True) as cache:
        for mode in (torch.inference_mode, torch.inference_mode, torch.no_grad, torch.enable_grad):
            with mode():
                logits = model(ids, past_key_values=cache).logits
        with pytest.raises(RuntimeError, match="No gradients through a PagedCache"):
            logits.sum().backward()
    with poisoned(model, cuda_graphs=True) as cache:
        for _ in range(2):
            model(ids, past_key_values=cache)
        assert not any(out.requires_grad for out in cache._captured[1]._layers._outputs)


@pytest.mark.parametrize("replace", ["assign", "data"])
@pytest.mark.parametrize("cuda_graphs", [True, "step"])
def test_weights_that_move_are_captured_again(
    device, captures, captured_steps, cuda_graphs, replace
):
    model, other = (small_model(seed, 4, 128, 0).to(device) for seed in (3, 4))
    model.set_experts_implementation("batched_mm")
    text = {**alone(prompts(5, 9)[0].to(device)), **GREEDY, "max_new_tokens": 6}
    with poisoned(model, cuda_graphs=cuda_graphs) as cache:
        model.generate(**text, past_key_values=cache)
        cache.reset()
        if replace == "assign":
            model.load_state_dict(other.state_dict(), assign=True)
        else:
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                mine.data = theirs.data
        mine = model.generate(**text, past_key_values=cache)
        assert mine.tolist() == other.generate(**text).tolist()
    # The first decode step finds the change; attention modules wait for the next one.
    assert captured_steps == ([(1, 32), (1, 32)] if cuda_graphs == "step" else [])
    assert captures == ([] if cuda_graphs == "step" else [(1, 10), (1, 11)])


@pytest.mark.parametrize("cuda_graphs", [True, "step"])
def test_graphs_are_captured_again_after_a_sleep(model, cuda_graphs):
    text = {**alone(prompts(5, 9)[0].to(model.device)), **GREEDY, "max_new_tokens": 6}
    with poisoned(model, cuda_graphs=cuda_graphs) as cache:
        before = model.generate(**text, past_key_values=cache).tolist()
        old = [*cache._captured.values()]
        assert bool(old) == (cuda_graphs is True)  # steps are refused in test_captured_forward
        cache.reset()
        cache.manager.sleep()
        cache.manager.wake()
        assert model.generate(**text, past_key_values=cache).tolist() == before
        for each in old:
            with pytest.raises(RuntimeError, match="Stale graph"):
                each.attend(0, torch.zeros_like(each._hidden), None)


def test_what_was_not_captured_is_refused(model):
    with poisoned(model, cuda_graphs=True) as cache, torch.no_grad():
        ids = torch.tensor([[3], [5]], device=model.device)
        for _ in range(2):
            model(ids, past_key_values=cache)
        layers = cache._captured[2]._layers
        assert layers.fits(2, layers.max_length)
        assert not layers.fits(1, 2) and not layers.fits(2, layers.max_length + 1)
        with (
            cache.forward(2, 2, None) as plan,
            pytest.raises(ValueError, match="expected 2 requests of one token each, up to 32 long"),
        ):
            layers.replay(0, plan)


def test_graphs_need_a_gpu():
    model = small_model(5, 4)
    with pytest.raises(ValueError, match="Invalid device of a captured forward: expected cuda"):
        attach(model, max_requests=1, max_tokens=256, cuda_graphs=True)
    assert "forward" not in vars(model.model)
