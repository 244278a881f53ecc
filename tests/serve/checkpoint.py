"""A small random model with a tokenizer and templates, saved as a checkpoint folder."""

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.integrations.generation import small_model

TIE = 1e-5  # of the largest score: closer than this, sums in another order may choose differently
NUM_TOKENS = 256  # characters; the special tokens follow
SPECIAL = ["<eos>", "<user>", "<assistant>", "<think>", "</think>", "<tool>", "</tool>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('Unexpected role ' + m.role) }}{% endif %}"
    "<user>{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool>", "close": "</tool>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<eos>", "content": "text"},
    },
}  # fmt: skip


def make_tokenizer(*, has_response_template=False):
    """A tokenizer of characters, so that tokens and texts are one to one."""
    characters = [chr(code) for code in range(32, 127)]
    characters += [chr(0x4E00 + number) for number in range(NUM_TOKENS - len(characters))]
    words = {word: number for number, word in enumerate(characters)}
    inner = Tokenizer(models.BPE(vocab=words, merges=[]))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    tokenizer.chat_template = CHAT_TEMPLATE
    if has_response_template:
        tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def make_model():
    """A model whose vocabulary is the tokenizer's; of special tokens it chooses the end alone."""
    model = small_model(0, 0, 4, 128, vocab_size=NUM_TOKENS + len(SPECIAL), index_topk=64)
    model.generation_config.eos_token_id = NUM_TOKENS
    with torch.no_grad():
        model.lm_head.weight[NUM_TOKENS + 1 :] = 0
    return model


def save_checkpoint(folder, **choices):
    """Save both."""
    make_model().save_pretrained(folder)
    make_tokenizer(**choices).save_pretrained(folder)
    return folder


class Alone:
    """Greedy answers of the model by itself, with transformers' own cache."""

    def __init__(self, num_new):
        self.model, self.tokenizer, self.num_new = make_model(), make_tokenizer(), num_new
        self.answers = {}

    def ids(self, prompt):
        """The tokens after a text, the end of text not among them."""
        if prompt not in self.answers:
            inputs = self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            made = self.model.generate(
                **inputs, max_new_tokens=self.num_new, do_sample=False, pad_token_id=0
            )
            new = made[0, inputs["input_ids"].shape[1] :].tolist()
            self.answers[prompt] = new[: new.index(NUM_TOKENS)] if NUM_TOKENS in new else new
        return self.answers[prompt]

    def check(self, prompt, text, num_new):
        """A server's answer of up to `num_new` tokens is the model's, but for a tie."""
        mine, theirs = self.tokenizer(text)["input_ids"], self.ids(prompt)[:num_new]
        if mine == theirs:
            return
        pairs = zip(mine, theirs, strict=False)
        num_same = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(theirs))
        )
        ids = self.tokenizer(prompt)["input_ids"] + theirs[:num_same]
        gap = self.smallest_gap(ids)
        assert gap < TIE, f"{text!r} is not the answer to {prompt!r}, from token {num_same} on"

    def smallest_gap(self, ids):
        """The least distance between what was taken and what was left, as a share of the scale."""
        gaps, hooks = [], []

        def note(scores, k):
            if scores.shape[-1] > k:
                best = scores.topk(k + 1).values
                gaps.append(float((best[..., k - 1] - best[..., k]).min() / scores.abs().max()))

        def on_router(module, args, result):
            note(module.score_fn(result[0]), module.top_k)

        for module in self.model.modules():
            if type(module).__name__ == "DeepseekV4TopKRouter":
                hooks.append(module.register_forward_hook(on_router))
        with torch.no_grad():
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        for hook in hooks:
            hook.remove()
        note(logits, 1)
        return min(gaps)
