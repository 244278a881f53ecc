"""A checkpoint folder: config, weights and a tokenizer."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def save_checkpoint(model, folder: Path) -> None:
    """Write the model, and a tokenizer of words w1 to w126, to a folder."""
    words = {"<pad>": 0, **{f"w{number}": number for number in range(1, 127)}, "<unk>": 127}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")
    fast.save_pretrained(folder)
    model.save_pretrained(folder)
