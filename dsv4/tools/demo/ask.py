"""Let the memory model read a book, and ask each question in a copy of the same context."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.integrations.transformers import PagedCache, attach
from dsv4.model.memory_book import END, Question

CHUNK, OWN_CHUNK = 8192, 512  # tokens of a forward; with transformers' cache
BLOCK = 256
ROWS = 48  # questions of a batch
DRAFTS = 8
Answer = tuple[int, ...]


def open_cache(
    model: Any, num_tokens: int, kv: Any, index: Any, *, num_books: int = 1, **options: Any
) -> PagedCache:
    """Make a cache for books and the forks that ask, with room on the host for a request.

    What a request leaves is wiped: a move that copies nothing would find it in the same place.
    """
    num_blocks = num_tokens // BLOCK + 2
    return attach(
        model, max_requests=ROWS, num_blocks=num_books * num_blocks + 2 * ROWS, kv_format=kv,
        index_format=index, block_tokens=BLOCK, drafts_per_step=DRAFTS, host_slots=1,
        host_blocks=num_blocks, wipe_on_free=True, **options,
    )  # fmt: skip


@torch.inference_mode()
def read_book(model: Any, cache: Any, ids: Tensor) -> None:
    """Run the model over a text, or over several of one length, chunk by chunk."""
    rows = ids.reshape(-1, ids.shape[-1]).to(model.device)
    chunk = CHUNK // len(rows) if isinstance(cache, PagedCache) else OWN_CHUNK
    for part in rows.split(chunk, dim=1):
        model(input_ids=part, past_key_values=cache, logits_to_keep=1)


@torch.inference_mode()
def ask(model: Any, cache: Any, questions: Sequence[Question]) -> list[Answer]:
    """Return the ids that the model answers with, the end of text with them.

    This cache forks its only row, and is rolled back; a cache of transformers is copied.
    """
    answers: dict[Question, Answer] = {}
    is_paged, num_columns = isinstance(cache, PagedCache), cache.get_seq_length()
    rows = cache.manager.capacity.max_requests if is_paged else 1
    for batch in _batches(questions, rows):
        asked = cache if is_paged else copy.deepcopy(cache)
        if is_paged:
            cache.batch_repeat_interleave(len(batch))
        ids = torch.tensor([question.ids for question in batch], device=model.device)
        answer = _next(model, asked, ids)
        pairs = torch.cat((answer, _next(model, asked, answer)), dim=1).tolist()
        answers |= dict(zip(batch, map(tuple, pairs), strict=True))
        if is_paged:
            cache.batch_select_indices(torch.tensor([0]))
            cache.crop(num_columns - cache.get_seq_length())
    return [answers[question] for question in questions]


def _batches(questions: Sequence[Question], size: int) -> Iterator[list[Question]]:
    """Split questions into batches of one length each."""
    for length in sorted({len(question.ids) for question in questions}):
        same = [question for question in questions if len(question.ids) == length]
        for start in range(0, len(same), size):
            yield same[start : start + size]


def _next(model: Any, cache: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
    return logits[:, -1].argmax(dim=-1, keepdim=True)


def is_right(question: Question, answer: Answer) -> bool:
    """Whether the answer is the book's, and ends there."""
    return answer == (question.answer, END)


def count_right(questions: Sequence[Question], answers: Sequence[Answer]) -> int:
    """Count the answers that are right."""
    return sum(map(is_right, questions, answers))
