"""Text comes as early as it is certain, and ends before a stop text."""

import random

import pytest

pytest.importorskip("tokenizers")
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteSplit

from dsv4.engine.text import TextStream


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each byte, so that a character can need several."""
    alphabet = {char: idx for idx, char in enumerate(sorted(ByteSplit.alphabet()))}
    tokenizer = Tokenizer(BPE(alphabet, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteSplit(add_prefix_space=False), ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def pieces(tokenizer, text, stop):
    stream, parts = TextStream(tokenizer, stop), []
    for token in tokenizer.encode(text).ids:
        parts.append(stream.add(token))
        if stream.stopped_by is not None:
            return parts, stream.stopped_by
    return [*parts, stream.end()], None


def test_text_comes_with_its_last_byte(tokenizer):
    parts, stop = pieces(tokenizer, "aé<end>漢b", ())
    assert parts == ["a", "", "é", "", "", "", "漢", "b", ""] and stop is None


def test_special_tokens_can_stay(tokenizer):
    stream = TextStream(tokenizer, ("<end>",), skip_special_tokens=False)
    assert [stream.add(token) for token in tokenizer.encode("a<end>").ids] == ["a", ""]
    assert stream.stopped_by == "<end>"


def test_what_may_become_a_stop_text_is_held_back(tokenizer):
    parts, stop = pieces(tokenizer, "one two", ("two", "o t"))
    assert parts == ["", "on", "e", " ", "", "", ""] and stop == "two"
    assert pieces(tokenizer, "a t", ("two",)) == (["a", " ", "", "t"], None)


def test_random_texts_end_before_the_first_stop_text(tokenizer):
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices("abé", k=rng.randint(1, 14)))
        stop = tuple({"".join(rng.choices("abé", k=rng.randint(1, 4))) for _ in range(2)})
        parts, stopped_by = pieces(tokenizer, text, stop)
        ends = [text.find(each) + len(each) for each in stop if each in text]
        if not ends:
            assert "".join(parts) == text and stopped_by is None
            continue
        seen = text[: min(ends)]  # no token after the first stop text was needed
        assert stopped_by in stop and seen.endswith(stopped_by)
        assert "".join(parts) == seen[: min(seen.find(each) for each in stop if each in seen)]
