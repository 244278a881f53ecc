"""Books for the memory model: a vocabulary of words, chapters of records, and questions on them.

A chapter has 128 tokens, an HCA window. Its year is far from its title, and its records lie in
three ways across CSA windows:

    Chapter Baric Delum .      the title, known by its year
    Bara Delson 417 .          ten records inside of a window, number at its third token
    also                       one token, so that the next ten end with their window
    also                       one more, so that the next ten have their number in the next window
    written 1734               the year
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.checks import check_int

CHAPTER_TOKENS = 128
RECORDS_PER_CHAPTER = 30
MAX_TOKENS = 1 << 20  # 8,192 chapters: every title once, and 245,760 of 262,144 names
_VOWELS = ("ar", "el", "in", "or", "ul", "an", "en", "il")
_SOUNDS = ["".join(parts) for parts in product("BDFGHJKLMNPRSTVZ", _VOWELS)]
_THINGS = (
    "anchor basket bucket candle chair compass drum easel fiddle goblet hammer inkwell jug kettle "
    "kite ladder lamp lantern mallet mirror needle oar pillow quill rope saddle trunk urn vase "
    "violin wagon yoke"
)
_COLOURS = (
    "red blue green amber black white grey brown pink violet olive teal ivory gold silver crimson"
)
WORDS = {
    "mark": ["<pad>", "<end>", ".", "Chapter", "also", "written", "today", "unknown"],
    "first": [sound + end for sound in _SOUNDS for end in "aoie"],
    "last": [sound + end for sound in _SOUNDS for end in ("son", "ton", "ley", "man")],
    "adjective": [sound + "ic" for sound in _SOUNDS],
    "noun": [sound + "um" for sound in _SOUNDS[:64]],
    "thing": _THINGS.split(),
    "number": [str(number) for number in range(100, 612)],
    "year": [str(year) for year in range(1700, 1956)],
    "colour": _COLOURS.split(),
}  # fmt: skip
VOCABULARY = [word for words in WORDS.values() for word in words]
PAD, END, STOP, CHAPTER, ALSO, WRITTEN, TODAY, UNKNOWN = range(8)
_ENDS = [*accumulate(map(len, WORDS.values()))]
IDS = {  # token ids of each kind of words
    kind: range(end - len(words), end)
    for (kind, words), end in zip(WORDS.items(), _ENDS, strict=True)
}


class Question(NamedTuple):
    """Words to ask with, the answer, and where it comes from.

    Attributes:
        kind: "record", "chapter", "line", or "nobody" for a name that the book lacks.
        token_pos: Position of the answer in the book, -1 if it is unknown.
    """

    kind: str
    ids: tuple[int, ...]
    answer: int
    token_pos: int

    @property
    def is_straddling(self) -> bool:
        """Whether a record's number is in the CSA window after its name's."""
        return self.kind == "record" and self.token_pos % 4 == 0


@dataclass(frozen=True)
class Book:
    """Token ids `[num_tokens]`: whole chapters, then the line being written."""

    ids: Tensor
    questions: list[Question]

    def choose(self, count: int) -> list[Question]:
        """Choose from the whole book: up to a quarter each on chapters and on the line.

        The last one is on a name that the book lacks, all others are on records.
        """
        chosen: list[Question] = []
        for kind, most in (("nobody", 1), ("line", count // 4), ("chapter", count // 4),
                           ("record", count)):  # fmt: skip
            there = [question for question in self.questions if question.kind == kind]
            wanted = min(most, len(there), count - len(chosen))
            chosen = [there[len(there) * number // wanted] for number in range(wanted)] + chosen
        return chosen


def write_book(num_tokens: int, *, seed: int = 0) -> Book:
    """Write chapters of `num_tokens` tokens together, and the line being written behind them.

    No two records share a name, no two chapters a title. All of it follows from integers.
    """
    check_int("tokens", num_tokens, at_least=CHAPTER_TOKENS, at_most=MAX_TOKENS)
    ids: list[int] = []
    questions: list[Question] = []

    def ask(kind: str, *words: int) -> None:
        questions.append(Question(kind, words, ids[-1], len(ids) - 1))

    def name(record: int) -> tuple[int, int]:
        number = _scatter(record, 18, seed)
        return IDS["first"][number // 512], IDS["last"][number % 512]

    for chapter in range(num_tokens // CHAPTER_TOKENS):
        title = _scatter(chapter, 13, seed)
        heading = (IDS["adjective"][title // 64], IDS["noun"][title % 64])
        ids += [CHAPTER, *heading, STOP]
        for number in range(RECORDS_PER_CHAPTER):
            record = chapter * RECORDS_PER_CHAPTER + number
            ids += [ALSO] * (number in (10, 20))
            ids += [*name(record), IDS["number"][_scatter(record, 18, seed + 1) // 512]]
            ask("record", *name(record))
            ids.append(STOP)
        ids += [WRITTEN, IDS["year"][_scatter(chapter, 13, seed + 1) // 32]]
        ask("chapter", *heading)
    ids.append(TODAY)
    for number in range(len(IDS["thing"])):
        thing = IDS["thing"][_scatter(number, 5, seed)]
        ids += [thing, IDS["colour"][_scatter(number, 4, seed + 1)]]
        ask("line", thing)
    ids.append(STOP)
    questions.append(Question("nobody", name(2**18 - 1), UNKNOWN, -1))
    return Book(torch.tensor(ids), questions)


def write_draft(name: Question, num_tokens: int) -> list[int]:
    """Write a record on a name, to be read behind `num_tokens` tokens: it fills a CSA window."""
    return [STOP] * (-num_tokens % 4) + [*name.ids, IDS["number"][5], STOP]


def _scatter(number: int, bits: int, seed: int) -> int:
    """Permute the integers of `bits` bits."""
    mask = (1 << bits) - 1
    for factor in (0x9E3779B1, 0x85EBCA77):
        number = (number + seed + 1) * factor & mask
        number ^= number >> (bits // 2)
    return number


def text_of(ids: Iterable[Any]) -> str:
    """Return the words of token ids."""
    return " ".join(VOCABULARY[int(token)] for token in ids)


def make_tokenizer() -> Any:
    """Make a tokenizer of transformers for the vocabulary, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: token for token, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=VOCABULARY[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<pad>", pad_token="<pad>", eos_token="<end>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    return fast
