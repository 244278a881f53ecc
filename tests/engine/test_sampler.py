"""Tokens are drawn with the probabilities that the parameters define, each row on its own."""

import numpy as np
import pytest
import torch

from dsv4.engine.sampler import Draw, draw_tokens
from dsv4.engine.sampling_params import SamplingParams

VOCABULARY = 12
NUM_DRAWS = 20_000


def logits(seed=0, rows=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCABULARY, generator=generator) * 1.5


def expected(scores, params, prompt=(), answer=()):
    """The probabilities of the tokens, by the parameters' own words and one by one."""
    scores = scores.double().numpy().copy()
    for token in range(VOCABULARY):
        if token in {*prompt, *answer}:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        if token in answer:
            scores[token] -= params.presence_penalty
            scores[token] -= params.frequency_penalty * answer.count(token)
    shares = np.exp(scores / params.temperature)
    shares /= shares.sum()
    kept, total = np.zeros(VOCABULARY, dtype=bool), 0.0
    for rank, token in enumerate(np.argsort(-shares, kind="stable")):
        is_in_k = not params.top_k or rank < params.top_k
        kept[token] = (
            is_in_k and total < params.top_p and shares[token] >= params.min_p * max(shares)
        )
        total += shares[token]
    return np.where(kept, shares, 0.0) / shares[kept].sum()


CASES = [
    {}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 3}, {"top_k": 1}, {"top_p": 0.7},
    {"top_p": 0.01}, {"min_p": 0.2}, {"min_p": 1.0}, {"top_k": 6, "top_p": 0.8, "min_p": 0.1},
    {"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "frequency_penalty": -0.5, "temperature": 1.3, "top_p": 0.9},
]  # fmt: skip


@pytest.mark.parametrize("choices", CASES)
def test_frequencies_are_the_probabilities(choices):
    params, scores = SamplingParams(**choices), logits()
    prompt, answer = (1, 5, 7), [2, 2, 5, 9]
    draws = [
        Draw(params, 7, place, np.array(prompt, dtype=np.int32), answer)
        for place in range(NUM_DRAWS)
    ]
    tokens = draw_tokens(scores.expand(NUM_DRAWS, -1), draws).tokens
    shares = np.bincount(tokens.numpy(), minlength=VOCABULARY) / NUM_DRAWS
    wanted = expected(scores[0], params, prompt, answer)
    assert not shares[wanted == 0].any()
    spread = np.sqrt(wanted * (1 - wanted) / NUM_DRAWS)
    assert (np.abs(shares - wanted) <= 5 * spread).all()


def test_seeds_and_places_give_other_tokens_and_the_same_ones_again():
    scores, params = logits().expand(256, -1), SamplingParams()
    tokens = [
        draw_tokens(scores, [Draw(params, seed, place) for place in range(256)]).tokens
        for seed in (1, 2, 1)
    ]
    assert torch.equal(tokens[0], tokens[2])
    assert 0.5 < (tokens[0] != tokens[1]).float().mean() < 1.0  # independent: 0.8 or so differ


def test_rows_do_not_depend_on_each_other():
    params = [
        SamplingParams(temperature=0, logprobs=3), SamplingParams(top_k=2), SamplingParams(),
        SamplingParams(temperature=0.3, frequency_penalty=2.0), SamplingParams(min_p=0.3),
    ]  # fmt: skip
    scores = logits(rows=len(params))
    draws = [Draw(each, row, 3, None, [1, 2]) for row, each in enumerate(params)]
    together = draw_tokens(scores, draws)
    for row, draw in enumerate(draws):
        assert draw_tokens(scores[row : row + 1], [draw]).tokens == together.tokens[row]
    assert together.tokens[0] == scores[0].argmax()


def test_logprobs_are_the_models_own():
    params = SamplingParams(temperature=0, logprobs=3, presence_penalty=2.0)
    scores = logits()
    best = int(scores.argmax())
    drawn = draw_tokens(scores, [Draw(params, 0, 0, None, [best])])
    wanted = torch.log_softmax(scores, -1)[0]
    assert drawn.tokens[0] != best  # the penalty
    assert drawn.logprobs[0] == wanted[drawn.tokens[0]]
    assert drawn.top_tokens[0].tolist() == wanted.argsort(descending=True)[:3].tolist()
    assert torch.equal(drawn.top_logprobs[0], wanted[drawn.top_tokens[0]])


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_new_tokens", 0), ("temperature", -1), ("temperature", float("nan")), ("top_p", 0),
        ("top_p", 1.1), ("top_k", -1), ("min_p", 2), ("presence_penalty", 3), ("n", 0),
        ("frequency_penalty", float("nan")), ("repetition_penalty", 0), ("seed", 2**64),
        ("stop", "word"), ("stop", ("",)), ("stop_token_ids", (-1,)), ("logprobs", 21),
        ("timeout", 0), ("temperature", "warm"), ("temperature", True), ("top_k", 1.5),
    ],
)  # fmt: skip
def test_bad_parameters_are_named(name, value):
    with pytest.raises(ValueError, match=f"Invalid {name}: expected"):
        SamplingParams(**{name: value})
