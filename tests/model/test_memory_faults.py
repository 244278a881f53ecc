"""Every fault of a cache is a wrong answer of the memory model, and of no other question."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dsv4.integrations.transformers import PagedCache, attach
from dsv4.kernels.reference import addressing, codec, compressor, indexer
from dsv4.model.memory_book import Book, Question, write_book, write_draft
from dsv4.model.memory_hf import memory_hf_model
from dsv4.tools.demo.ask import ask, is_right

NUM_TOKENS, BLOCK = 640, 128  # five chapters, a block each
PREVIOUS, RECORDS, CHAPTERS, LINE = range(4)  # layers
BOOK = write_book(NUM_TOKENS)
NOBODY = BOOK.questions[-1]
Where = Callable[[Question], bool]


@pytest.fixture(scope="module")
def model() -> Any:
    return memory_hf_model(index_topk=1)  # an entry that is not the best one is not seen


def make_cache(model: Any) -> PagedCache:
    return attach(
        model, max_requests=100, num_blocks=150, max_forward_tokens=1024, drafts_per_step=8,
        block_tokens=BLOCK,
    )  # fmt: skip


@torch.inference_mode()
def read(model: Any, cache: PagedCache, *ids: torch.Tensor | list[int]) -> None:
    """Run one row of the batch for each text."""
    batch = torch.stack([torch.as_tensor(row) for row in ids])
    model(input_ids=batch, past_key_values=cache, logits_to_keep=1)


@pytest.fixture(scope="module")
def shared(model) -> Iterator[PagedCache]:
    with make_cache(model) as cache:
        read(model, cache, BOOK.ids)
        yield cache


@pytest.fixture
def cache(shared) -> Iterator[PagedCache]:
    """A cache that has read the book; its bytes and its block table are restored."""
    tensors = [shared.manager.tensors()[name] for name in ("blocks", "slots", "block_table")]
    saved = [tensor.clone() for tensor in tensors]
    yield shared
    for tensor, old in zip(tensors, saved, strict=True):
        tensor.copy_(old)


def wrong(model: Any, cache: PagedCache, questions=BOOK.questions) -> set[Question]:
    answers = ask(model, cache, questions)
    return {q for q, answer in zip(questions, answers, strict=True) if not is_right(q, answer)}


def those(where: Where, book: Book = BOOK) -> set[Question]:
    return {question for question in book.questions if where(question)}


def records(where: Where = lambda _: True) -> set[Question]:
    return those(lambda question: question.kind == "record" and where(question))


def page(cache: PagedCache, column: int) -> int:
    return int(cache.manager.block_table[0, column])


def test_no_fault(model, cache):
    assert len(BOOK.questions) == 5 * 31 + 32 + 1
    assert sum(question.is_straddling for question in BOOK.questions) == 50
    assert wrong(model, cache) == set()


def test_entries_of_two_blocks_swapped(model, cache):
    entries = cache.manager.paged.layer(RECORDS).entries
    one, two = page(cache, 1), page(cache, 3)
    for part in (entries.data, entries.scales):
        part[[one, two]] = part[[two, one]]
    assert wrong(model, cache) == records(lambda question: question.token_pos // BLOCK in (1, 3))


def test_two_blocks_of_the_table_swapped(model, cache):
    """The last block is not full, so what is swapped into its place is visible in part."""
    table = cache.manager.block_table
    table[0, [4, 5]] = table[0, [5, 4]]
    num_visible = len(BOOK.ids) % BLOCK // 4 * 4
    hidden = those(lambda question: question.token_pos in range(4 * BLOCK + num_visible, 5 * BLOCK))
    assert wrong(model, cache) == hidden


def test_another_tenants_keys(model):
    other = write_book(NUM_TOKENS, seed=5)
    with make_cache(model) as cache:
        read(model, cache, BOOK.ids, other.ids)
        keys, table = cache.manager.paged.layer(RECORDS).index_keys, cache.manager.block_table
        for part in (keys.data, keys.scales):
            part[table[0, 2]] = part[table[1, 2]]
        cache.batch_select_indices(torch.tensor([0]))
        failed = wrong(model, cache)
    assert failed == records(lambda question: question.token_pos // BLOCK == 2)


def test_a_stale_window_row(model):
    """The row of a colour is still the one of 136 tokens before."""
    ring_of = len(BOOK.ids) - 66
    with make_cache(model) as cache:
        read(model, cache, BOOK.ids[:ring_of])
        ring = cache.manager.state.layer(LINE).ring
        question = next(q for q in BOOK.questions if q.kind == "line" and q.token_pos > 670)
        row = question.token_pos % ring.rows_per_page
        old = [part[0, row].clone() for part in (ring.data, ring.scales)]
        read(model, cache, BOOK.ids[ring_of:])
        ring.data[0, row], ring.scales[0, row] = old
        assert wrong(model, cache) == {question}


@pytest.mark.parametrize("layer", [RECORDS, CHAPTERS])
def test_a_lost_tail_row(model, layer):
    """The row of a name, or of a title, is lost before its window closes."""
    kind = "record" if layer == RECORDS else "chapter"
    question = next(
        q for q in BOOK.questions if q.kind == kind and (q.is_straddling or layer == CHAPTERS)
    )
    lost = question.token_pos - 1 if layer == RECORDS else question.token_pos - 125
    with make_cache(model) as cache:
        read(model, cache, BOOK.ids[: lost + 1])
        tail = cache.manager.state.layer(layer).tail
        tail[0, lost % tail.shape[1]] = 0
        read(model, cache, BOOK.ids[lost + 1 :])
        assert wrong(model, cache) == {question}


def test_unsigned_fp4(model, monkeypatch):
    encode = codec.encode_e2m1
    monkeypatch.setattr(codec, "encode_e2m1", lambda x: encode(x) & 7)
    with make_cache(model) as cache:
        read(model, cache, BOOK.ids)
        failed = wrong(model, cache)
    assert failed == records()


def test_the_overlap_from_the_wrong_window(model, monkeypatch):
    window_rows = compressor._window_rows

    def further_back(rows, tail, tokens, closing, ratio, back, columns):
        return window_rows(rows, tail, tokens, closing, ratio, 2 * back, columns)

    monkeypatch.setattr(compressor, "_window_rows", further_back)
    with make_cache(model) as cache:
        read(model, cache, BOOK.ids)
        assert wrong(model, cache) == records(lambda question: question.is_straddling)


def test_an_entry_that_starts_one_token_too_early(model, monkeypatch):
    """Numbers at a window's end, and names at the end of the one before, are left out."""
    window_rows = compressor._window_rows

    def earlier(rows, tail, tokens, closing, *rest):
        return window_rows(rows, tail, tokens, (closing - 1).clamp(min=0), *rest)

    monkeypatch.setattr(compressor, "_window_rows", earlier)
    with make_cache(model) as cache:
        read(model, cache, BOOK.ids)
        failed = wrong(model, cache)
    late = records(lambda question: question.token_pos % 4 in (3, 0))
    assert failed == late | those(lambda question: question.kind == "chapter")


def test_an_entry_visible_one_too_early(model, cache, monkeypatch):
    """Entries of rejected drafts are still there, behind those that are visible."""
    ids = write_draft(NOBODY, cache.lengths[0])
    read(model, cache, ids)
    cache.crop(-len(ids))
    assert wrong(model, cache) == set()
    rows = indexer.visible_entry_rows
    monkeypatch.setattr(
        indexer, "visible_entry_rows",
        lambda *args, max_entries, **ratio: rows(*args, max_entries=max_entries + 1, **ratio),
    )  # fmt: skip
    monkeypatch.setattr(addressing, "visible_entries", lambda p, m: (p + 1) // m + 1)
    assert wrong(model, cache) == {NOBODY}


def test_a_rejected_draft_left_in(model, cache):
    ids = write_draft(NOBODY, cache.lengths[0])
    read(model, cache, ids)
    assert wrong(model, cache) == {NOBODY}
    cache.crop(-len(ids))
    assert wrong(model, cache) == set()
