"""Choose the next tokens of a batch on the device, each request by its own parameters.

Noise is a function of seed, place in the answer and token. So a request draws the same tokens in
any batch, after a preemption, and with or without drafts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.memory.arrays import IntArray
from dsv4.engine.sampling_params import SamplingParams

MASK = 0xFFFFFFFF


class Draw(NamedTuple):
    """One token that is to be chosen.

    Attributes:
        params: Its request's parameters.
        seed: The sample's seed.
        place: Number of the token in the answer.
        prompt, answer: The tokens before it; read for penalties alone.
    """

    params: SamplingParams
    seed: int
    place: int
    prompt: IntArray | None = None
    answer: Sequence[int] = ()


class Drawn(NamedTuple):
    """Chosen tokens on the device.

    Attributes:
        tokens: `[draws]` int64.
        logprobs: `[draws]`, of the chosen tokens; None if no request asks.
        top_logprobs, top_tokens: `[draws, k]`, the likeliest ones; None likewise.
    """

    tokens: Tensor
    logprobs: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_tokens: Tensor | None = None


def draw_tokens(
    logits: Tensor, draws: Sequence[Draw], later: Tensor | None = None, *, latest: int = 0
) -> Drawn:
    """Choose a token from each row of `logits` `[draws, vocabulary]`.

    Probabilities that are reported are the model's own, before penalties and temperature.

    Args:
        later: `[draws]` int64, from 0 to `latest`: how far behind its place each token stands.
    """
    params = [draw.params for draw in draws]
    scores = logits.float()
    if any(each.has_penalty for each in params):
        scores = _penalise(scores, draws)
    tokens = scores.argmax(-1)
    warm = [row for row, each in enumerate(params) if not each.is_greedy]
    if warm:
        rows = upload(warm, logits.device)
        drawn = [draws[i] for i in warm]
        keys = [[_mix(draw.seed, draw.place + i) for i in range(latest + 1)] for draw in drawn]
        shift = torch.zeros_like(rows) if later is None else later[rows]
        key = upload(keys, logits.device).gather(1, shift[:, None])  # [warm, 1]
        chosen = _draw(scores if len(warm) == len(draws) else scores[rows], drawn, key)
        tokens = tokens.index_copy(0, rows, chosen)
    most = max((-1 if each.logprobs is None else each.logprobs for each in params), default=-1)
    if most < 0:
        return Drawn(tokens)
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
    return Drawn(tokens, logprobs.gather(-1, tokens[:, None])[:, 0], top.values, top.indices)


def _draw(scores: Tensor, draws: Sequence[Draw], keys: Tensor) -> Tensor:
    """Draw by an exponential race: the token with the least noise over probability wins."""
    params = [draw.params for draw in draws]
    settings = np.array([(each.temperature, each.top_p, each.min_p) for each in params])
    temperature, top_p, min_p = upload(settings.T, scores.device).float()[..., None]
    scores = scores / temperature
    best = scores.amax(-1, keepdim=True)
    is_out = scores < best + min_p.log()
    tokens = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    if any(each.has_filter for each in params):
        scores, tokens = scores.sort(dim=-1, descending=True, stable=True)
        is_out = is_out.gather(-1, tokens)
        top_k = upload([each.top_k or scores.shape[-1] for each in params], scores.device)
        shares = scores.softmax(-1)
        before = shares.cumsum(-1) - shares
        places = torch.arange(scores.shape[-1], device=scores.device)
        is_late = (before >= top_p) | (places >= top_k[:, None])
        is_out |= is_late & (places > 0)
    race = (scores - _noise(keys, tokens).log()).masked_fill(is_out, -torch.inf)
    return tokens.gather(-1, race.argmax(-1, keepdim=True))[:, 0]


def _noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return exponential noise, above 0, of each key and token; integers below 2^32."""
    bits = keys ^ (tokens * 0x9E3779B1 & MASK)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        bits = ((bits ^ (bits >> 16)) * factor) & MASK
    bits = bits ^ (bits >> 15)
    return -torch.log1p(-((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24))


def _mix(seed: int, place: int) -> int:
    """Return 32 bits of a seed and a place in the answer."""
    bits = (seed ^ (place * 0x9E3779B97F4A7C15)) & (2**64 - 1)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        bits = ((bits ^ (bits >> 29)) * factor) & (2**64 - 1)
    return (bits ^ (bits >> 32)) & MASK


def _penalise(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return scores with the penalties of tokens that stand in prompt or answer."""
    rows, columns, changes = [], [], []
    for row, (params, _, _, prompt, answer) in enumerate(draws):
        if not params.has_penalty:
            continue
        said, counts = np.unique(np.asarray(answer, dtype=np.int64), return_counts=True)
        known = said
        if params.repetition_penalty != 1 and prompt is not None:
            known = np.union1d(said, prompt)
        change = np.zeros((len(known), 2))
        change[:, 0] = params.repetition_penalty
        change[np.searchsorted(known, said), 1] = (
            params.presence_penalty + params.frequency_penalty * counts
        )
        rows.append(np.full(len(known), row))
        columns.append(known)
        changes.append(change)
    places = upload(np.stack((np.concatenate(rows), np.concatenate(columns))), scores.device)
    factor, taken = upload(np.concatenate(changes).T, scores.device).float()
    found = scores[places[0], places[1]]
    found = torch.where(found > 0, found / factor, found * factor) - taken
    return scores.index_put((places[0], places[1]), found)


def upload(values: object, device: torch.device) -> Tensor:
    """Copy numbers to a device without waiting for it."""
    tensor = torch.as_tensor(np.asarray(values))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
