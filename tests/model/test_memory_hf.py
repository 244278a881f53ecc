"""The memory model: codes, answers in every format, and after everything a cache can do."""

from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoTokenizer, DeepseekV4ForCausalLM

from dsv4.formats import INDEX_FORMATS, KV_FORMATS
from dsv4.integrations.transformers import PagedCache
from dsv4.integrations.transformers.columns import Columns
from dsv4.model.memory_book import (
    CHAPTER_TOKENS,
    IDS,
    MAX_TOKENS,
    STOP,
    UNKNOWN,
    VOCABULARY,
    make_tokenizer,
    text_of,
    write_book,
)
from dsv4.model.memory_hf import FLASH_WIDTHS, codes, memory_hf_model
from dsv4.tools.demo.ask import ask, is_right, open_cache, read_book
from dsv4.tools.demo.memory_run import ask_after_moves, make_model


class Story(NamedTuple):
    """A device, the tokens of a book, and the questions on it."""

    device: str
    num_tokens: int
    num_questions: int

    @property
    def model(self) -> Any:
        return make_model(self.device)


STORIES = [
    pytest.param(Story("cpu", 640, 60), id="cpu"),
    pytest.param(Story("cuda", MAX_TOKENS, 200), id="1M", marks=pytest.mark.gpu),
]
everywhere = pytest.mark.parametrize("story", STORIES)


def wrong(model, cache, book, num_questions: int) -> list[str]:
    questions = book.choose(num_questions)
    assert {question.kind for question in questions} == {"record", "chapter", "line", "nobody"}
    return wrong_answers(questions, ask(model, cache, questions))


def wrong_answers(questions, answers) -> list[str]:
    pairs = zip(questions, answers, strict=True)
    return [text_of((*q.ids, *answer)) for q, answer in pairs if not is_right(q, answer)]


def test_codes():
    products = codes() @ codes().T
    assert codes().shape == (1054, 32) and codes().abs().eq(1).all()
    assert products.diagonal().eq(32).all() and codes().sum(dim=1).eq(0).all()
    assert (products - 32 * torch.eye(1054)).max() == 8


def test_a_book_of_a_million_tokens_has_no_name_twice():
    book = write_book(MAX_TOKENS)
    records = [question.ids for question in book.questions if question.kind == "record"]
    titles = [question.ids for question in book.questions if question.kind == "chapter"]
    assert len(set(records)) == len(records) == 245_760
    assert len(set(titles)) == len(titles) == 8192
    nobody = book.questions[-1]
    assert nobody.answer == UNKNOWN and nobody.ids not in records
    assert all(int(book.ids[q.token_pos]) == q.answer for q in book.questions[:-1])
    straddling = sum(question.is_straddling for question in book.questions)
    assert straddling == len(records) // 3


@pytest.mark.parametrize(
    ("kv", "index"), [*zip(KV_FORMATS, INDEX_FORMATS, strict=False), ("bf16", "fp32")]
)
def test_every_format_answers(kv, index):
    model, book = memory_hf_model(), write_book(640)
    with open_cache(model, len(book.ids), kv, index) as cache:
        read_book(model, cache, book.ids)
        assert wrong(model, cache, book, 60) == []


def test_the_widths_of_flash_answer():
    model, book = memory_hf_model(**FLASH_WIDTHS).bfloat16(), write_book(256)
    with open_cache(model, len(book.ids), "fp8", "mxfp4") as cache:
        read_book(model, cache, book.ids)
        assert wrong(model, cache, book, 40) == []


def test_the_margin_of_an_answer():
    """The next logit, that of `unknown`, is half of the answer's; other words' are a quarter."""
    model, book = memory_hf_model(), write_book(640)
    with open_cache(model, len(book.ids), "fp8", "mxfp4") as cache, torch.inference_mode():
        read_book(model, cache, book.ids)
        for question in book.choose(24)[:-1]:
            ids = torch.tensor([question.ids])
            logits = model(input_ids=ids, past_key_values=cache).logits[0, -1]
            cache.crop(-len(question.ids))
            words = logits[IDS["number"].start :]
            best, second = words.topk(2).values
            assert VOCABULARY[int(logits.topk(2).indices[1])] == "unknown"
            assert logits.topk(2).values[1] < 0.55 * best and second < 0.35 * best


def test_smaller_margins_fail_in_fewer_bits():
    book = write_book(256)
    right = {}
    for kv, margin in (("fp8", 1 / 32), ("fp8", 1 / 256), ("bf16", 1 / 256), ("fp32", 1 / 4096)):
        model = memory_hf_model(margin=margin)
        with open_cache(model, len(book.ids), kv, "fp32") as cache:
            read_book(model, cache, book.ids)
            right[kv, 1 / margin] = 40 - len(wrong(model, cache, book, 40))
    assert right["fp8", 32] == right["bf16", 256] == right["fp32", 4096] == 40
    assert right["fp8", 256] < 20


@everywhere
def test_fp8_and_mxfp4(story):
    model, book = story.model, write_book(story.num_tokens)
    with open_cache(model, len(book.ids), "fp8", "mxfp4") as cache:
        read_book(model, cache, book.ids)
        assert wrong(model, cache, book, story.num_questions) == []
        questions = book.choose(story.num_questions)
        for move, answers in ask_after_moves(model, cache, questions).items():
            assert (move, wrong_answers(questions, answers)) == (move, [])


@everywhere
@torch.inference_mode()
def test_eight_books(story):
    """Questions on each book alone, and one on each of them together."""
    books = [write_book(story.num_tokens, seed=seed) for seed in range(8)]
    model, longest = story.model, len(books[0].ids)
    with open_cache(model, longest, "fp8", "mxfp4", num_books=8) as cache:
        read_book(model, cache, torch.stack([book.ids for book in books]))
        for nth in (0, 20, 30, -2):  # a record, one that straddles, a chapter, a line
            questions = [book.questions[nth] for book in books]
            ids = torch.tensor([question.ids for question in questions], device=model.device)
            answers = model(input_ids=ids, past_key_values=cache).logits[:, -1].argmax(dim=-1)
            cache.crop(-ids.shape[1])
            assert answers.tolist() == [question.answer for question in questions]
        for book in books:
            slots = cache._slots
            cache._slots, cache._columns = slots[:1], Columns(1)
            cache._columns.append(longest)
            assert wrong(model, cache, book, story.num_questions // 4) == []
            cache._slots = slots[1:]
        cache._slots = []


def adopt(cache: PagedCache, slot: int, num_tokens: int) -> None:
    """Continue a request that the manager has opened."""
    cache._slots, cache._columns = [slot], Columns(1)
    cache._columns.append(num_tokens)


@everywhere
def test_a_prefix_hit(story):
    """The hit ends behind the line, so that the line's rows are those of the checkpoint."""
    num_known = story.num_tokens // 256 * 256
    model, book = story.model, write_book(num_known - CHAPTER_TOKENS)
    ids = torch.cat((book.ids, torch.full((num_known + 16 - len(book.ids),), STOP)))
    with open_cache(model, len(ids), "fp8", "mxfp4", num_checkpoints=4) as cache:
        for text, expected in ((ids, 0), (ids[: num_known + 1], num_known)):
            slot, num_found, num_replayed, _ = cache.manager.resume_request(text.numpy())
            assert (num_found, num_replayed) == (expected, 0)
            adopt(cache, slot, num_found)
            read_book(model, cache, text[num_found:])
            if num_found:
                assert wrong(model, cache, book, story.num_questions) == []
            cache.reset()


@everywhere
def test_drafts_rejected_at_random(story):
    """From the last chapter but one on: its tokens are in entries, those of the line are not."""
    model, book = story.model, write_book(story.num_tokens)
    start = first = story.num_tokens - CHAPTER_TOKENS - 9
    draw = torch.Generator().manual_seed(0)
    with open_cache(model, len(book.ids), "fp8", "mxfp4") as cache:
        read_book(model, cache, book.ids[:start])
        while start < len(book.ids):
            num_kept, num_rejected = torch.randint(1, 5, (2,), generator=draw).tolist()
            kept = book.ids[start : start + num_kept]
            drafts = torch.randint(8, len(VOCABULARY), (num_rejected,), generator=draw)
            read_book(model, cache, torch.cat((kept, drafts)))
            cache.crop(-num_rejected)
            start += len(kept)
        assert wrong(model, cache, book, story.num_questions) == []
        written = [question for question in book.questions if question.token_pos >= first]
        assert len(written) == 2 + 1 + 30 + 1 + 32
        assert wrong_answers(written, ask(model, cache, written)) == []


def test_a_folder_with_a_tokenizer(tmp_path):
    book = write_book(256)
    memory_hf_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype="float32")
    question = book.questions[3]
    chat = [{"role": "user", "content": f"{text_of(book.ids)} {text_of(question.ids)}"}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    assert ids[0].tolist() == [*book.ids.tolist(), *question.ids]
    new = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(new, skip_special_tokens=True) == VOCABULARY[question.answer]
