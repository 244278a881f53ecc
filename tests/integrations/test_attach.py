"""`attach` and `detach`: valid models, refusals, and that `detach` leaves nothing behind."""

import copy
import io
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from dsv4 import CheckpointPolicy
from dsv4.integrations.transformers import attach, detach
from tests.integrations.generation import GREEDY, alone, poisoned, prompts, small_model

SIZES = {"max_requests": 2, "max_tokens": 256}


@pytest.fixture(scope="module")
def model():
    return small_model(5, 4, 128)


def attributes(model) -> list[set[str]]:
    return [set(vars(module)) for module in model.modules()]


def test_detach_restores_the_model(model):
    before, types = attributes(model), [type(module) for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    cache = attach(model, **SIZES)
    attach(model, **SIZES)
    assert attributes(model) != before
    model.generate(**alone(prompts(1, 9)[0]), **GREEDY, max_new_tokens=3, past_key_values=cache)
    detach(model)
    assert attributes(model) == before
    assert [type(module) for module in model.modules()] == types
    after = model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    with pytest.raises(RuntimeError, match="written by an attached model alone"):
        model(torch.tensor([[1]]), past_key_values=cache)
    with pytest.raises(ValueError, match="expected one that attach was called with"):
        detach(model)
    with pytest.raises(ValueError, match="expected one that attach was called with"):
        detach(torch.nn.Linear(1, 1))


def test_other_caches_and_none_behave_as_before():
    model, untouched = small_model(6, 4, 128), small_model(6, 4, 128)
    cache = poisoned(model)
    (prompt,) = prompts(2, 140)
    ids = alone(prompt)["input_ids"]
    for options in ({}, {"num_beams": 2}, {"use_cache": False}):
        mine, theirs = (
            m.generate(**alone(prompt), **GREEDY, max_new_tokens=8, **options)
            for m in (model, untouched)
        )
        assert torch.equal(mine, theirs)
    with torch.no_grad():
        for arguments in ({}, {"output_attentions": True}, {"use_cache": True}):
            mine, theirs = model(ids, **arguments), untouched(ids, **arguments)
            assert torch.equal(mine.logits, theirs.logits)
            assert type(mine.past_key_values) is type(theirs.past_key_values)
        own = DynamicCache(config=model.config)
        model.model(ids, None, None, own)
        assert own.get_seq_length() == 140 and cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="stateful"):
        model.generate(**alone(prompt), **GREEDY, prompt_lookup_num_tokens=3)
    assert model._is_stateful and "_is_stateful" not in vars(model)
    logits = model(ids).logits
    logits.sum().backward()  # training goes on as before
    assert model.model.layers[0].self_attn.q_a_proj.weight.grad is not None


def test_the_base_model_takes_positional_arguments(model):
    with poisoned(model) as cache, torch.no_grad():
        ids = alone(prompts(3, 20)[0])["input_ids"]
        mine = model.model(ids, None, None, cache).last_hidden_state
        assert cache.lengths == [20]
        expected = model.model(ids, use_cache=False).last_hidden_state
        assert (mine - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_cache_is_for_its_model(model):
    with poisoned(model) as cache:
        twin = copy.deepcopy(model)
        other = small_model(7, 4, 128)
        poisoned(other)
        for stranger in (twin, other):
            with pytest.raises(ValueError, match="attached to this model, got one of another"):
                stranger(torch.tensor([[1]]), past_key_values=cache)
        with poisoned(twin) as own:
            twin(torch.tensor([[1]]), past_key_values=own)
        attention = model.model.layers[0].self_attn
        with pytest.raises(RuntimeError, match="an attention module called by its model"):
            attention(torch.zeros(1, 1, 64), None, None, None, cache)


def test_copies_of_an_attached_model(model):
    (prompt,) = prompts(11, 30)
    options = {**alone(prompt), **GREEDY, "max_new_tokens": 4}
    plain = small_model(5, 4, 128)
    expected = plain.generate(**options).tolist()
    with poisoned(model) as cache:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (torch.load(file, weights_only=False), copy.deepcopy(model), copy.copy(model)):
            assert twin.generate(**options).tolist() == expected
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        with pytest.raises(ValueError, match="attached to this model, got one of another"):
            loaded.generate(**options, past_key_values=cache)
        with poisoned(loaded) as own:
            assert loaded.generate(**options, past_key_values=own).tolist() == expected
        detach(loaded)
        assert attributes(loaded) == attributes(plain)
        assert model.generate(**options, past_key_values=cache).tolist() == expected


def test_gradient_checkpointing_is_refused():
    """transformers' layers would drop the cache, with a warning, and see the new tokens alone."""
    model = small_model(12, 4, 128)
    ids = alone(prompts(12, 20)[0])["input_ids"]
    with poisoned(model) as cache:
        model.gradient_checkpointing_enable()
        with torch.no_grad():
            model(ids[:, :10], past_key_values=cache)  # not in use by model.eval()
        model.train()
        for call in (
            partial(model, ids[:, 10:]), partial(model.generate, ids, **GREEDY, max_new_tokens=2),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"Gradient checkpointing .*call model.eval\(\)"):
                call(past_key_values=cache)
        assert cache.lengths == [10]
        model(ids)  # without the cache it trains as before
        model.gradient_checkpointing_disable()
        model(ids[:, 10:], past_key_values=cache)
        assert cache.lengths == [20]


def test_sizes(model):
    with attach(model, max_requests=3, max_tokens=257) as cache:
        capacity = cache.manager.capacity
        assert (capacity.max_requests, capacity.num_blocks) == (3, 3)  # entry 64 closes at 260
        assert cache.get_max_length() == 257
    with attach(model, max_requests=3, num_blocks=5, block_tokens=128) as cache:
        assert cache.manager.capacity.num_blocks == 5 and cache.get_max_length() == 640
        assert cache.manager.config.drafts_per_step == 20
        assert cache.manager.config.kv_format == "fp8"
        assert cache.manager.config.index_format == "mxfp4"


def test_choices_of_the_manager(model):
    policy = CheckpointPolicy(every_blocks=2)
    with attach(
        model, **SIZES, block_tokens=128, prefix_bytes=1 << 20, num_checkpoints=3,
        checkpoint_policy=policy, host_slots=2, undo_slots=2, wipe_on_free=True,
    ) as cache:  # fmt: skip
        capacity = cache.manager.capacity
        assert cache.manager.config.block_tokens == 128
        assert (capacity.num_checkpoints, capacity.host_slots, capacity.undo_slots) == (3, 2, 2)
        hit = cache.manager.resume_request(list(range(200)))
        assert hit.num_tokens == 0
        manager = cache.manager
    with pytest.raises(RuntimeError, match="This manager is closed"):  # it gave all to its store
        manager.open_request()
    for name in ("include_mtp", "max_request_tokens", "device", "prefix_byte"):
        with pytest.raises(TypeError, match=rf"Unknown choice {name}: .*block_tokens.*prefix_byte"):
            attach(model, **SIZES, **{name: 1})


def test_rows_take_blocks_of_the_prefix_cache(model):
    (ids,) = prompts(4, 256)
    choices = {"num_blocks": 2, "max_requests": 2, "block_tokens": 128, "num_checkpoints": 2}
    with poisoned(model, **choices, max_forward_tokens=128) as cache, torch.no_grad():
        manager = cache.manager
        slot = manager.resume_request(ids.tolist()).slot
        for start in (0, 128):
            manager.prepare_forward([slot], [start], [start + 128]).complete()
        manager.free_request(slot)
        stats = manager.stats()
        assert (stats.num_free_blocks, stats.num_evictable_blocks) == (1, 1)
        model(ids[None], past_key_values=cache)  # in two spans, whose blocks are looked for first
        assert cache.lengths == [256]


@pytest.mark.parametrize(
    ("choices", "problem"),
    [
        ({"max_requests": 1}, "either max_tokens or num_blocks, got neither"),
        ({**SIZES, "num_blocks": 1}, "either max_tokens or num_blocks, got both"),
        ({**SIZES, "max_forward_tokens": 1}, r"at least max_requests \(2\), got 1"),
        ({**SIZES, "kv_format": "fp7"}, "fp7"),
        ({**SIZES, "backend": "triton2"}, "triton2"),
        ({"max_requests": 0, "max_tokens": 9}, "max_requests: expected an integer >= 1, got 0"),
        ({"max_requests": 1, "max_tokens": 0}, "Invalid max_tokens: expected an integer from 1"),
        ({"max_requests": 1, "max_tokens": 1 << 20}, "Invalid max_tokens: .* to 65536"),
    ],
)
def test_refused_sizes(choices, problem):
    model = small_model(8, 4)
    before = attributes(model)
    with pytest.raises(ValueError, match=problem):
        attach(model, **choices)
    assert attributes(model) == before


def test_refused_models():
    with pytest.raises(TypeError, match="expected a DeepseekV4ForCausalLM, got Linear"):
        attach(torch.nn.Linear(1, 1), **SIZES)
    model = small_model(9, 0)
    with pytest.raises(TypeError, match="expected a DeepseekV4ForCausalLM, got DeepseekV4Model"):
        attach(model.model, **SIZES)
    with pytest.raises(TypeError, match=r"expected float32 or bfloat16, got torch.float16"):
        attach(model.half(), **SIZES)
    model.float().lm_head.to("meta")
    with pytest.raises(
        ValueError, match="expected weights on devices, got weight of a Linear on meta"
    ):
        attach(model, **SIZES)
    model = small_model(9, 0)
    attention = model.model.layers[0].self_attn
    attention.forward = attention.forward
    with pytest.raises(ValueError, match=r"DeepseekV4Attention.forward as its class has it"):
        attach(model, **SIZES)
