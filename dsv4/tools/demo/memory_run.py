"""Read a book once through each cache, ask the memory model about it, and ask again after moves."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from dsv4.integrations.transformers import PagedCache
from dsv4.model import memory_book
from dsv4.model.memory_book import TODAY, VOCABULARY, Book, Question, text_of, write_book
from dsv4.model.memory_hf import FLASH_WIDTHS, memory_hf_model
from dsv4.tools.bench.timing import time_to_end
from dsv4.tools.demo.ask import Answer, ask, count_right, open_cache, read_book
from dsv4.tools.transformers_cache import transformers_cache_bytes

MAX_OWN_TOKENS = 1 << 15  # a chunk of transformers' cache scores all entries at once


def run_memory(
    *, num_tokens: int, num_questions: int, kv_format: Any, index_format: Any, device: str
) -> dict[str, Any]:
    """Ask the same questions through transformers' cache and this one, with two kinds of rows.

    Above 32K tokens this cache is asked alone, with one kind. On a GPU the model is as wide as
    V4-Flash, in BF16.
    """
    model, book = make_model(device), write_book(num_tokens)
    questions = book.choose(num_questions)
    runs: dict[str, Any] = {}
    is_short = num_tokens <= MAX_OWN_TOKENS
    if is_short:
        own = DynamicCache(config=model.config)
        answers, runs["transformers' own"] = _run(model, own, book, questions)
    every = [answers] if runs else []
    exact = [("fp32", "fp32")] if is_short else []
    for formats in dict.fromkeys((*exact, (kv_format, index_format))):
        with open_cache(model, len(book.ids), *formats) as cache:
            answers, runs[f"this cache, {' + '.join(formats)}"] = _run(
                model, cache, book, questions
            )
            moved = ask_after_moves(model, cache, questions)
        every += [answers, *moved.values()]
    return describe(
        book, questions, [VOCABULARY[answer[0]] for answer in answers], runs,
        {name: count_right(questions, each) for name, each in moved.items()},
        device=device, is_same=all(each == answers for each in every),
    )  # fmt: skip


def make_model(device: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """Make the memory model, on a GPU in the widths and a dtype that its kernels are made for."""
    if torch.device(device).type == "cpu":
        return memory_hf_model(**options)
    return memory_hf_model(**FLASH_WIDTHS, **options).to(device, dtype)


def describe(
    book: Book, questions: list[Question], words: list[str], runs: dict[str, Any],
    after: dict[str, int], *, device: str, is_same: bool | None,
) -> dict[str, Any]:  # fmt: skip
    """Make the demo's result; of each kind of question the first is shown.

    is_same is None if there are no ids to compare.
    """
    shown: dict[str, list[str]] = {}
    for question, word in zip(questions, words, strict=True):
        place = "straddling" if question.is_straddling else question.kind
        shown.setdefault(place, [text_of(question.ids), word])
    line = book.ids.tolist().index(TODAY)
    num_right = {*(run["right"] for run in runs.values()), *after.values()}
    return {
        "demo": "memory", "device": device, "tokens": len(book.ids),
        "text": [text_of(book.ids[:12]), text_of(book.ids[line : line + 9])],
        "questions": len(questions), "shown": shown, "runs": runs, "after": after,
        "same_ids": is_same, "ok": is_same is not False and num_right == {len(questions)},
    }  # fmt: skip


def _run(
    model: Any, cache: Any, book: Book, questions: list[Question]
) -> tuple[list[Answer], dict[str, Any]]:
    """Read the book and ask; return the answers, and how many are right, bytes and speeds."""
    _, read_us = time_to_end(partial(read_book, model, cache, book.ids), model.device)
    if isinstance(cache, PagedCache):
        manager = cache.manager
        num_blocks = len(manager.blocks_of(manager.open_slots[0]))
        size = num_blocks * manager.paged.storage[0].nbytes + manager.state.storage[0].nbytes
    else:
        size = sum(transformers_cache_bytes(cache, model.config.layer_types).values())
    answers, ask_us = time_to_end(partial(ask, model, cache, questions), model.device)
    return answers, {
        "right": count_right(questions, answers), "num_bytes": size,
        "prefill_per_second": 1e6 * len(book.ids) / read_us,
        "answers_per_second": 1e6 * sum(map(len, answers)) / ask_us,
    }  # fmt: skip


@torch.inference_mode()
def ask_after_moves(
    model: Any, cache: PagedCache, questions: list[Question]
) -> dict[str, list[Answer]]:
    """Ask again in a fork, after a rejected draft, from the host's memory and from a file."""
    manager = cache.manager

    def fork() -> None:
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([1]))

    def reject() -> None:
        draft = torch.tensor(memory_book.write_draft(questions[-1], cache.get_seq_length()))
        read_book(model, cache, draft)  # a name that the book lacks: left in, it is known
        cache.crop(-len(draft))

    def swap() -> None:
        manager.swap_in(manager.swap_out(manager.open_slots[0]))  # to the slot that it left

    def reload() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "request.safetensors"
            manager.save_request(manager.open_slots[0], path)
            manager.free_request(manager.open_slots[0])
            manager.load_request(path)

    moves: dict[str, Callable[[], None]] = {
        "in a fork": fork, "after a draft was rejected": reject,
        "after a swap to the host and back": swap, "after a save and a load": reload,
    }  # fmt: skip
    answers = {}
    for name, move in moves.items():
        move()
        answers[name] = ask(model, cache, questions)
    return answers
