"""`generate` through the cache: the ids that transformers gives where it is right, and right where
it is not."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from transformers import DynamicCache, StoppingCriteriaList

from dsv4.integrations.transformers import attach
from tests.integrations.generation import (
    GREEDY,
    alone,
    padded,
    poisoned,
    prompts,
    share_of_scale,
    small_model,
)
from tests.marks import long, quick

SCHEDULES = [(4, 128), (4,), (128, 4), (0,), (0, 4), (128,), (4, 0)]
LENGTHS = [1, 2, 3, 4, 5, 31, 63, 100, 126, 127, 128, 129, 200, 255, 256, 257, 383, 511, 640, 700]
EIGHT_LENGTHS = (1, 3, 33, 64, 127, 128, 200, 301)
LOGIT_SHARE = 1e-5  # of the largest logit


def check_greedy(model, prompt, num_new, **choices) -> None:
    theirs = model.generate(**alone(prompt), **GREEDY, max_new_tokens=num_new)
    with poisoned(model, **choices) as cache:
        mine = model.generate(
            **alone(prompt), **GREEDY, max_new_tokens=num_new, past_key_values=cache
        )
        assert mine.tolist() == theirs.tolist()
        assert cache.lengths == [len(prompt) + num_new - 1]


@pytest.mark.parametrize("seed", quick(range(20), [0, 3, 7, 9, 10, 11, 13, 18]))
def test_greedy_ids_are_those_of_transformers_cache(seed):
    """200 steps here; transformers' cache gets the prompt, then the new tokens at once.

    If its best token after each of them is the one that follows, its own steps choose the same.
    """
    model = small_model(seed, *SCHEDULES[seed % len(SCHEDULES)])
    (prompt,) = prompts(seed, LENGTHS[seed])
    with poisoned(model) as cache, torch.no_grad():
        mine = model.generate(**alone(prompt), **GREEDY, max_new_tokens=200, past_key_values=cache)
        assert cache.lengths == [len(prompt) + 199]
        theirs = DynamicCache(config=model.config)
        first = model(prompt[None], past_key_values=theirs).logits[0, -1:]
        rest = model(mine[:, len(prompt) : -1], past_key_values=theirs).logits[0]
    assert mine[0, len(prompt) :].tolist() == torch.cat((first, rest)).argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_greedy_ids_step_by_step(seed):
    model = small_model(seed, *SCHEDULES[seed % len(SCHEDULES)])
    (prompt,) = prompts(seed, LENGTHS[seed])
    check_greedy(model, prompt, 200)


@pytest.mark.slow
@pytest.mark.parametrize("seed", long(range(100, 120), range(100, 105)))
def test_greedy_ids_of_larger_models(seed):
    rng = random.Random(seed)
    ratios = [rng.choice((0, 4, 128)) for _ in range(6)]
    model = small_model(seed, *ratios, hidden_size=128, num_attention_heads=8, index_topk=24)
    for prompt in prompts(seed, *(rng.randint(1, 700) for _ in range(3))):
        check_greedy(model, prompt, 200, block_tokens=rng.choice((128, 256, 512)))


def test_a_padded_batch_equals_its_prompts_alone(model, cache):
    texts = prompts(1, *EIGHT_LENGTHS)
    options = {
        **GREEDY, "max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    batch = model.generate(**padded(texts), **options, past_key_values=cache)
    assert cache.lengths == [length + 11 for length in EIGHT_LENGTHS]
    logits = torch.stack(batch.logits)  # [step, row, vocabulary]
    for row, text in enumerate(texts):
        cache.reset()
        single = model.generate(**alone(text), **options, past_key_values=cache)
        new = batch.sequences[row, max(EIGHT_LENGTHS) :]
        assert new.tolist() == single.sequences[0, len(text) :].tolist()
        assert share_of_scale(logits[:, row], torch.stack(single.logits)[:, 0]) <= LOGIT_SHARE
        theirs = model.generate(**alone(text), **GREEDY, max_new_tokens=12)
        assert new.tolist() == theirs[0, len(text) :].tolist()


def test_transformers_own_cache_is_wrong_on_that_batch(model):
    """transformers is wrong here; if this fails, it was mended, and the docs can say so."""
    texts = prompts(1, 3, 33)
    batch = model.generate(**padded(texts), **GREEDY, max_new_tokens=24)
    single = model.generate(**alone(texts[0]), **GREEDY, max_new_tokens=24)
    assert batch[0, 33:].tolist() != single[0, 3:].tolist()


@pytest.mark.parametrize("length", [1, 5, 141])
def test_beam_search_equals_one_without_any_cache(model, cache, length):
    options = {**GREEDY, "num_beams": 4, "max_new_tokens": 30}
    (prompt,) = prompts(2, length)
    theirs = model.generate(**alone(prompt), **options, use_cache=False)
    mine = model.generate(**alone(prompt), **options, past_key_values=cache)
    assert mine.tolist() == theirs.tolist()


def test_beams_of_a_padded_batch(model, cache):
    options = {**GREEDY, "num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 16}
    texts = prompts(3, 130, 9)
    batch = model.generate(**padded(texts), **options, past_key_values=cache)
    for number, text in enumerate(texts):
        theirs = model.generate(**alone(text), **options, use_cache=False)
        assert batch[2 * number : 2 * number + 2, 130:].tolist() == theirs[:, len(text) :].tolist()


def test_beams_need_no_slot_beside_their_own(model):
    (prompt,) = prompts(2, 200)
    options = {**GREEDY, "num_beams": 4, "max_new_tokens": 16}
    theirs = model.generate(**alone(prompt), **options, use_cache=False)
    # One block each, and no slot or block to spare.
    with poisoned(model, max_requests=4, max_tokens=256, num_blocks=None) as cache:
        assert cache.manager.capacity.num_blocks == 4
        mine = model.generate(**alone(prompt), **options, past_key_values=cache)
        assert mine.tolist() == theirs.tolist()
        assert sorted(cache.manager.is_open.nonzero()[0]) == [0, 1, 2, 3]


@pytest.mark.parametrize("num_drafts", [1, 5, 10])
def test_assisted_decoding_equals_greedy(model, cache, num_drafts):
    (phrase,) = prompts(4, 21)
    repeated = alone(phrase.repeat(7))
    options = {**GREEDY, "max_new_tokens": 60}
    greedy = model.generate(**repeated, **options)
    rejected = []
    crop, cache.crop = cache.crop, lambda count: (rejected.append(-count), crop(count))
    mine = model.generate(
        **repeated, **options, past_key_values=cache, prompt_lookup_num_tokens=num_drafts
    )
    assert mine.tolist() == greedy.tolist()
    assert max(rejected) == num_drafts and len(rejected) < 60
    assert cache.lengths == [147 + 59]


def test_assisted_decoding_with_a_model(model, cache):
    assistant = small_model(11, 0)
    (prompt,) = prompts(4, 50)
    options = {**GREEDY, "max_new_tokens": 20}
    greedy = model.generate(**alone(prompt), **options)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(**alone(prompt), **options, assistant_model=assistant)
    mine = model.generate(
        **alone(prompt), **options, past_key_values=cache, assistant_model=assistant
    )
    assert mine.tolist() == greedy.tolist()


def test_assistants_that_cannot_draft(model, cache):
    (prompt,) = prompts(4, 5)
    num_layers = model.config.num_hidden_layers
    for options, problem in (
        ({"assistant_early_exit": 1}, "assistant_early_exit is not supported with a PagedCache"),
        ({"assistant_model": small_model(11, 4)}, "Invalid assistant_model: .*compressed layers"),
        ({"assistant_model": model}, "Invalid assistant_model: .*compressed layers"),
    ):
        with pytest.raises(ValueError, match=problem):
            model.generate(
                **alone(prompt), **GREEDY, max_new_tokens=8, past_key_values=cache, **options
            )
        assert model.config.num_hidden_layers == num_layers and cache.get_seq_length() == 0


def test_two_threads_with_two_caches(model, cache):
    """One `generate` begins and ends in the midst of another; a third uses transformers' cache."""
    texts = prompts(17, 21, 30)
    options = {**GREEDY, "max_new_tokens": 6, "prompt_lookup_num_tokens": 2}
    expected = [
        model.generate(**alone(text), **GREEDY, max_new_tokens=6).tolist() for text in texts
    ]
    ids, refused = [], []

    def run_beside(*step) -> bool:
        if not ids:
            with poisoned(model) as other, ThreadPoolExecutor(1) as thread:
                call = partial(model.generate, **alone(texts[1]), **options, past_key_values=other)
                ids.append(thread.submit(call).result().tolist())
            with pytest.raises(ValueError, match="not supported with stateful models"):
                model.generate(**alone(texts[1]), **options)
            refused.append(True)
        return torch.zeros(1, dtype=torch.bool)

    mine = model.generate(
        **alone(texts[0]), **options, past_key_values=cache,
        stopping_criteria=StoppingCriteriaList([run_beside]),
    )  # fmt: skip
    assert [mine.tolist(), *ids] == expected and refused


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}])
def test_a_generation_without_room_is_refused_before_it_starts(model, options):
    drafts = options.get("prompt_lookup_num_tokens", 1)  # the last step drafts beyond the end
    text = torch.cat((*prompts(18, 125),) * 2)
    texts = [text] if drafts > 1 else [text, text[:9]]
    options, rows, num_new = {**GREEDY, **options}, len(texts), 8 - drafts
    rows *= options.get("num_beams", 1)
    with poisoned(model, max_requests=rows, max_tokens=256) as cache:
        run = partial(model.generate, **padded(texts), **options, past_key_values=cache)
        for limit in ({"max_new_tokens": num_new + 1}, {"max_length": 250 + num_new + 1}):
            with pytest.raises(
                ValueError, match=r"at most 256, got 257 at the end.*attach with larger max_tokens"
            ):
                run(**limit)
        with pytest.raises(ValueError, match=rf"at most {rows} \(max_requests\), got {rows + 1};"):
            model.generate(
                **padded(prompts(18, *[9] * (rows + 1))), **GREEDY, max_new_tokens=2,
                past_key_values=cache,
            )  # fmt: skip
        assert cache.get_seq_length() == 0 and cache.manager.num_free_slots == rows
        ids = run(max_new_tokens=num_new)
        assert ids.shape[1] == 250 + num_new
        assert max(cache.lengths) == 249 + num_new  # the last token is not stored


def test_drafts_that_could_not_be_rejected_are_refused_before_the_start(model):
    run = partial(model.generate, **alone(prompts(4, 9)[0].repeat(3)), **GREEDY, max_new_tokens=9)
    with poisoned(model, drafts_per_step=3) as cache:
        with pytest.raises(ValueError, match="num_tokens: expected at most 4, got 5; attach with"):
            run(past_key_values=cache, prompt_lookup_num_tokens=5)
        assert cache.get_seq_length() == 0
        assert torch.equal(run(past_key_values=cache, prompt_lookup_num_tokens=4), run())


def test_padding_takes_no_room(model):
    """Columns of padding do not count, nor do new ids alone after cached ones."""
    (text,) = prompts(19, 250)
    with poisoned(model, max_requests=1, max_tokens=256) as cache:
        ids = torch.cat((torch.zeros(20, dtype=torch.long), text))[None]
        mask = (ids != 0).long()
        for num_new, problem in ((8, "at most 256, got 257"), (4, None), (4, "got 258")):
            run = partial(
                model.generate, ids, attention_mask=mask, **GREEDY, max_new_tokens=num_new,
                past_key_values=cache,
            )  # fmt: skip
            if problem is not None:
                with pytest.raises(ValueError, match=problem):
                    run()
                continue
            ids = run()[:, -1:].repeat(1, 2)
            assert cache.lengths == [253]
            mask = torch.cat((mask, torch.ones(1, 5, dtype=torch.long)), dim=1)


def test_sampling_and_several_sequences(model, cache):
    (prompt,) = prompts(5, 140)
    options = {**GREEDY, "do_sample": True, "num_return_sequences": 3, "max_new_tokens": 25}
    torch.manual_seed(0)
    theirs = model.generate(**alone(prompt), **options)
    torch.manual_seed(0)
    mine = model.generate(**alone(prompt), **options, past_key_values=cache)
    assert mine.tolist() == theirs.tolist()
    assert len({tuple(row) for row in mine.tolist()}) > 1


def test_a_conversation_equals_a_fresh_run_on_the_joined_text(model, cache):
    first, second, third = prompts(6, 120, 45, 1)
    text = model.generate(**alone(first), **GREEDY, max_new_tokens=30, past_key_values=cache)[0]
    for turn in (second, third):
        text = torch.cat((text, turn))
        fresh = model.generate(**alone(text), **GREEDY, max_new_tokens=30)
        text = model.generate(**alone(text), **GREEDY, max_new_tokens=30, past_key_values=cache)[0]
        assert text.tolist() == fresh[0].tolist()


def test_a_conversation_of_a_padded_batch(model, cache):
    texts, turns = prompts(7, 5, 131), prompts(8, 12, 12)
    first = model.generate(**padded(texts), **GREEDY, max_new_tokens=10, past_key_values=cache)
    ids = torch.cat((first, torch.stack(turns)), dim=1)
    mask = torch.cat((padded(texts)["attention_mask"], torch.ones(2, 22, dtype=torch.long)), dim=1)
    second = model.generate(
        ids, attention_mask=mask, **GREEDY, max_new_tokens=10, past_key_values=cache
    )
    for row in range(2):
        joined = ids[row][mask[row] == 1]
        theirs = model.generate(**alone(joined), **GREEDY, max_new_tokens=10)
        assert second[row, ids.shape[1] :].tolist() == theirs[0, len(joined) :].tolist()


@pytest.mark.parametrize("size", [1, 37, 128])
def test_a_prefill_in_chunks(model, cache, size):
    texts = prompts(9, 200, 40)
    options = {**GREEDY, "max_new_tokens": 8}
    whole = model.generate(**padded(texts), **options, past_key_values=cache)
    cache.reset()
    if size > 1:
        chunked = model.generate(
            **padded(texts), **options, past_key_values=cache, prefill_chunk_size=size
        )
        assert chunked.tolist() == whole.tolist()
    with poisoned(model, max_forward_tokens=8 * size) as small:
        split = model.generate(**padded(texts), **options, past_key_values=small)
        assert split.tolist() == whole.tolist()


def test_right_padding_is_exact_in_forward(model, cache):
    texts = prompts(10, *EIGHT_LENGTHS)
    with torch.no_grad():
        batch = model(**padded(texts, "right"), past_key_values=cache).logits
        assert cache.lengths == list(EIGHT_LENGTHS)
        ids = torch.arange(1, 9)[:, None]
        mask = torch.cat((padded(texts, "right")["attention_mask"], torch.ones_like(ids)), dim=1)
        step = model(ids, attention_mask=mask, past_key_values=cache).logits
        for row, text in enumerate(texts):
            cache.reset()
            single = model(**alone(text), past_key_values=cache).logits[0]
            assert share_of_scale(batch[row, : len(text)], single) <= LOGIT_SHARE
            single = model(ids[row][None], past_key_values=cache).logits[0]
            assert share_of_scale(step[row], single) <= LOGIT_SHARE


@pytest.mark.parametrize("choices", [{}, {"max_forward_tokens": 8}], ids=["one", "parts"])
def test_right_padding_is_refused_in_generate(model, choices):
    texts = padded(prompts(10, 5, 9), "right")
    with poisoned(model, **choices) as cache:
        for options in ({}, {"prefill_chunk_size": 9}):
            with pytest.raises(
                ValueError, match=r"Right padding is not supported in generate.* row 0"
            ):
                model.generate(
                    **texts, **GREEDY, max_new_tokens=2, past_key_values=cache, **options
                )
            assert cache.get_seq_length() == 0 and cache.manager.num_free_slots == 8
        with pytest.raises(ValueError, match=r"Right padding"):
            model.generate(
                **texts, **GREEDY, max_new_tokens=2, past_key_values=cache, prefill_chunk_size=3
            )


def test_padding_that_generate_finds_itself(model, cache):
    texts = prompts(12, 5, 9)
    ids = padded(texts)["input_ids"]
    given = model.generate(**padded(texts), **GREEDY, max_new_tokens=5, past_key_values=cache)
    cache.reset()
    found = model.generate(ids, **GREEDY, max_new_tokens=5, past_key_values=cache)
    assert found.tolist() == given.tolist() and cache.lengths == [9, 13]


def test_embeddings_as_inputs(model, cache):
    (prompt,) = prompts(13, 50)
    embeddings = model.model.embed_tokens(prompt[None])
    with torch.no_grad():
        expected = model(**alone(prompt), use_cache=False).logits
        logits = model(inputs_embeds=embeddings, past_key_values=cache).logits
    assert share_of_scale(logits, expected) <= LOGIT_SHARE
    options = {**GREEDY, "max_new_tokens": 7, "attention_mask": torch.ones(1, 50)}
    start = {"input_ids": prompt[None, :1], "inputs_embeds": embeddings}
    with poisoned(model, max_requests=1, max_tokens=57) as small:  # 56 and the one id count
        mine = model.generate(**start, **options, past_key_values=small)
        assert mine.tolist() == model.generate(**start, **options).tolist()
        with pytest.raises(ValueError, match="expected more than the 56 columns"):
            model.generate(inputs_embeds=embeddings, **GREEDY, past_key_values=small)


def test_hash_routed_experts_see_their_tokens():
    model = small_model(14, 4, 128, num_hash_layers=2)
    for layer in model.model.layers:
        table = layer.mlp.gate.tid2eid
        table.copy_(torch.stack([torch.randperm(4)[:2] for _ in range(len(table))]))
    (prompt,) = prompts(14, 60)
    check_greedy(model, prompt, 10, max_forward_tokens=25)


@pytest.mark.parametrize(("kv", "index"), [("fp8", "mxfp4"), ("bf16", "fp8")])
def test_stored_formats_stay_near(model, kv, index):
    """Rows of few bits come near transformers' logits, but do not equal them."""
    (prompt,) = prompts(15, 300)
    with torch.no_grad():
        expected = model(**alone(prompt), use_cache=False).logits
        with attach(
            model, max_requests=1, max_tokens=512, kv_format=kv, index_format=index
        ) as cache:
            logits = model(**alone(prompt), past_key_values=cache).logits
    error = float((logits - expected).norm() / expected.norm())
    assert 1e-4 < error < 0.6


@pytest.mark.parametrize("seed", range(3))
def test_bf16_error_is_no_larger_than_transformers_own(seed):
    # Every expert is used, so that no choice of experts can flip.
    model = small_model(seed, 0, 128, n_routed_experts=2).to(torch.bfloat16)
    (prompt,) = prompts(seed, 200)
    with torch.no_grad():
        theirs = model(**alone(prompt), use_cache=False).logits
        with attach(
            model, max_requests=1, max_tokens=512, kv_format="bf16", index_format="bf16"
        ) as cache:
            mine = model(**alone(prompt), past_key_values=cache).logits
        exact = model.float()(**alone(prompt), use_cache=False).logits
    assert mine.dtype is torch.bfloat16
    assert (mine.float() - exact).norm() <= (theirs.float() - exact).norm()
