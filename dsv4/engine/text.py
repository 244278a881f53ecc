"""`TextStream`: the text of an answer, token by token, up to a stop text."""

from typing import Any


class TextStream:
    """Decodes tokens as they come, and ends before the first stop text.

    Text that may become a stop text is held back until that is decided.

    Args:
        tokenizer: A fast tokenizer of transformers.
        stop: Texts before which the answer ends.
        skip_special_tokens: Leave special tokens out.

    Attributes:
        stopped_by: The stop text that was found; None so far.
    """

    def __init__(
        self, tokenizer: Any, stop: tuple[str, ...], *, skip_special_tokens: bool = True
    ) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = getattr(tokenizer, "_tokenizer", tokenizer)
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._stop = stop
        self._held = ""
        self.stopped_by: str | None = None

    def add(self, token: int) -> str:
        """Take a token and return the text that is certain by now."""
        new = self._stream.step(self._tokenizer, token)
        if not new or self.stopped_by is not None:
            return ""
        text, self._held = self._held + new, ""
        found = min(
            ((place, each) for each in self._stop if (place := text.find(each)) >= 0), default=None
        )
        if found is not None:
            self.stopped_by = found[1]
            return text[: found[0]]
        sure = len(text) - max((_overlap(text, each) for each in self._stop), default=0)
        self._held = text[sure:]
        return text[:sure]

    def end(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of a text with which a stop text begins."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
