"""`PagedCache` as transformers' `Cache`: rows move whole, blocks are freed, other calls refuse."""

import copy
import gc
import inspect
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from transformers import Cache

from dsv4 import OutOfBlocksError
from dsv4.integrations.transformers import PagedCache, attach
from dsv4.integrations.transformers.attached_cache import AttachedCache
from dsv4.integrations.transformers.columns import Columns
from tests.integrations.generation import (
    EXACT,
    GREEDY,
    alone,
    padded,
    poisoned,
    prompts,
    share_of_scale,
    small_model,
)

LOGIT_SHARE = 1e-5  # of the largest logit


@torch.no_grad()
def feed(model, cache, texts) -> torch.Tensor:
    """Compute logits of a left-padded batch; with a filled cache, after one more token each."""
    if cache.get_seq_length():
        return model(torch.tensor(texts)[:, None], past_key_values=cache).logits[:, -1]
    return model(**padded(texts), past_key_values=cache).logits[:, -1]


@torch.no_grad()
def uncached(model, *texts) -> torch.Tensor:
    return torch.stack([model(text[None], use_cache=False).logits[0, -1] for text in texts])


def with_token(text, token):
    return torch.cat((text, torch.tensor([token])))


@pytest.mark.parametrize("rows", [[0, 0, 1], [2, 1, 0], [2, 2, 2], [1, 0, 1], [0, 1, 2]])
def test_reorder_moves_everything(model, cache, rows):
    texts = prompts(1, 140, 133, 129)
    feed(model, cache, texts)
    slots = set(cache.manager.is_open.nonzero()[0])
    cache.reorder_cache(torch.tensor(rows))
    assert set(cache.manager.is_open.nonzero()[0]) == slots  # copies lie where rows were dropped
    assert cache.lengths == [len(texts[row]) for row in rows]
    for step in range(1, 5):  # over the end of a window
        tokens = [step, step + 10, step + 20]
        texts = [with_token(texts[row], token) for row, token in zip(rows, tokens, strict=True)]
        rows = [0, 1, 2]
        mine = feed(model, cache, tokens)
        assert share_of_scale(mine, uncached(model, *texts)) <= LOGIT_SHARE


def test_repeat_and_select(model, cache):
    texts = prompts(2, 130, 7)
    feed(model, cache, texts)
    cache.batch_repeat_interleave(3)
    assert cache.batch_size == 6 and cache.lengths == [130] * 3 + [7] * 3
    tokens = [1, 2, 3, 4, 5, 6]
    grown = [with_token(texts[row // 3], token) for row, token in enumerate(tokens)]
    assert share_of_scale(feed(model, cache, tokens), uncached(model, *grown)) <= LOGIT_SHARE
    cache.batch_select_indices(torch.tensor([False, True, False, True, False, False]))
    cache.batch_select_indices(torch.tensor([-1, 0, 1]))
    grown = [with_token(grown[row], token) for row, token in ((3, 7), (1, 8), (3, 9))]
    assert share_of_scale(feed(model, cache, [7, 8, 9]), uncached(model, *grown)) <= (LOGIT_SHARE)
    assert len(cache.manager.is_open.nonzero()[0]) == 3


@pytest.mark.parametrize("rows", [[0.5], [1.0], [2], [-3], [True], [True, False, True]])
def test_rows_that_are_none_change_nothing(model, cache, rows):
    feed(model, cache, prompts(2, 130, 7))
    with pytest.raises(ValueError, match=r"Invalid (rows|mask): expected"):
        cache.batch_select_indices(torch.tensor(rows))
    for equal_to_all in ([False, True], [0.0, 1.0]):
        with pytest.raises(ValueError, match="Invalid rows: expected 0 to 1"):
            cache.reorder_cache(torch.tensor(equal_to_all))
    assert cache.lengths == [130, 7] and cache.manager.open_slots == [0, 1]
    cache.reset()


def test_rows_that_there_is_no_room_for(model):
    texts = prompts(3, 200, 130)
    with poisoned(model, max_requests=3, num_blocks=3) as cache:
        feed(model, cache, texts)
        with pytest.raises(ValueError, match=r"at most 3 \(max_requests\), got 4; beams"):
            cache.batch_repeat_interleave(2)
        with pytest.raises(ValueError, match=r"expected 0 to 1, got \[2\]"):
            cache.batch_select_indices(torch.tensor([2]))
        cache.batch_select_indices(torch.tensor([0, 0, 1]))
        assert cache.manager._books.allocator.num_free == 0
        cache.batch_select_indices(torch.tensor([0, 2, 2]))  # the dropped row's block is enough
    with poisoned(model, max_requests=3, num_blocks=2) as cache:
        feed(model, cache, texts)
        with pytest.raises(OutOfBlocksError, match="1 needed, 0 of 2 free"):
            cache.batch_select_indices(torch.tensor([0, 1, 1]))
        assert cache.lengths == [200, 130]
        assert share_of_scale(
            feed(model, cache, [1, 2]),
            uncached(model, with_token(texts[0], 1), with_token(texts[1], 2)),
        ) <= (LOGIT_SHARE)


@pytest.mark.parametrize("count", [1, 3, 20, 21])
def test_crop_takes_back(model, cache, count):
    text, other = prompts(4, 150, 30)
    drafts = prompts(5, 20)[0]
    with torch.no_grad():
        model(**padded([text, other]), past_key_values=cache)
        model(drafts.repeat(2, 1), past_key_values=cache)
    cache.crop(-count)
    assert cache.get_seq_length() == 170 - count and cache.lengths == [170 - count, 50 - count]
    kept = [torch.cat((row, drafts))[:-count] for row in (text, other)]
    for step in range(3):
        kept = [with_token(row, step + 40) for row in kept]
        mine = feed(model, cache, [step + 40] * 2)
        assert share_of_scale(mine, uncached(model, *kept)) <= LOGIT_SHARE


def test_crop_counts_columns_and_refuses_too_many(model, cache):
    short, long = prompts(6, 3, 60)
    feed(model, cache, [short, long])
    cache.crop(0)
    for count, problem in (
        (5, r"crop\(-n\) removes n tokens, got 5: a length in old"),
        (-61, "at most 60 columns to remove, got 61"),
        (-22, "row 1 can be cut to 39 tokens or to none, got 38; .* larger drafts_per_step"),
    ):
        with pytest.raises(ValueError, match=problem):
            cache.crop(count)
        assert cache.lengths == [3, 60]
    cache.crop(-10)  # longer than the first row: it is empty then
    assert cache.lengths == [0, 50] and cache.get_seq_length() == 50
    cache.crop(-50)
    assert cache.lengths == [0, 0] and cache.manager._books.allocator.num_free == 32


def test_without_drafts_one_token_is_taken_back(model):
    with poisoned(model, drafts_per_step=0) as cache:
        feed(model, cache, prompts(6, 8))
        assert not cache.is_croppable and not cache.is_recording_past(0)
        with pytest.raises(ValueError, match=r"larger drafts_per_step \(now 0\)"):
            cache.crop(-2)
        cache.crop(-1)
        assert cache.lengths == [7]


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_generations_leave_no_block(count):
    model = small_model(7, 4)
    with attach(model, max_requests=2, max_tokens=256, kv_format="fp8") as cache:
        text = padded(prompts(7, 9, 5))
        first = model.generate(**text, **GREEDY, max_new_tokens=2, past_key_values=cache)
        assert cache.manager._books.allocator.num_free == 0
        for _ in range(count - 1):
            cache.reset()
            assert cache.manager._books.allocator.num_free == 2
            last = model.generate(**text, **GREEDY, max_new_tokens=1, past_key_values=cache)
        cache.reset()
        assert cache.manager._books.allocator.num_free == 2 and cache.manager.num_free_slots == 2
        cache.manager.check_integrity()
        assert last.tolist() == first[:, :-1].tolist()


def test_close_with_and_garbage_give_the_memory_back(model):
    cache = poisoned(model)
    feed(model, cache, prompts(8, 30))
    manager = weakref.ref(cache.manager)
    cache.close()
    cache.close()
    assert manager() is None and repr(cache) == "PagedCache(closed)"
    with pytest.raises(RuntimeError, match="This cache is closed"):
        feed(model, cache, prompts(8, 30))
    with poisoned(model) as cache:
        manager = weakref.ref(cache.manager)
    assert manager() is None
    cache = poisoned(model)
    feed(model, cache, prompts(8, 30))
    manager = weakref.ref(cache.manager)
    gc.disable()
    try:
        del cache
        assert manager() is None
    finally:
        gc.enable()


def test_a_failed_forward_leaves_the_cache_as_it_was(model, cache):
    text = prompts(9, 50)
    norm, model.model.layers[2].input_layernorm = model.model.layers[2].input_layernorm, None
    try:
        with pytest.raises(TypeError):
            feed(model, cache, text)
    finally:
        model.model.layers[2].input_layernorm = norm
    assert cache.lengths == [0] and cache.get_seq_length() == 0
    assert share_of_scale(feed(model, cache, text), uncached(model, *text)) <= LOGIT_SHARE


def test_a_refused_forward_changes_nothing(model):
    text, other = prompts(10, 500, 300)
    with poisoned(model, max_requests=2, num_blocks=3, max_forward_tokens=400) as cache:
        with pytest.raises(
            OutOfBlocksError, match="4 needed, 3 of 3 free"
        ):  # in parts: looked ahead
            feed(model, cache, [text, other])
        with pytest.raises(ValueError, match=r"at most 2 \(max_requests\), got 3"):
            feed(model, cache, [text, text, text])
        with pytest.raises(ValueError, match="Too many tokens in one request"):
            feed(model, cache, [text.repeat(2)[:399], text.repeat(2)])
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.manager.num_free_slots == 2
        feed(model, cache, [text])
        for ids, problem in (
            ([1, 2], "expected 1 rows, as the cache holds, got 2"),
            ([[]], "expected at least one new column, got none"),
        ):
            with pytest.raises(ValueError, match=problem):
                model(torch.tensor(ids).reshape(len(ids), -1), past_key_values=cache)
        assert cache.lengths == [500]


def test_masks_and_positions_are_checked(model, cache):
    text, other = prompts(11, 20, 12)
    batch = padded([text, other])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    for wrong, got in ((mask[:, 1:], r"\[2, 19\]"), (mask[:, None, None], r"\[2, 1, 1, 20\]")):
        with pytest.raises(ValueError, match=rf"expected a tensor \[2, 20\].*got {got}"):
            model(ids, attention_mask=wrong, past_key_values=cache)
    with pytest.raises(ValueError, match=r"got dict"):
        model(ids, attention_mask={"mask": None}, past_key_values=cache)
    positions = torch.arange(20)[None]
    with pytest.raises(ValueError, match="expected 0 in row 1, column 8, got 8"):
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    assert cache.manager.num_free_slots == 8
    feed(model, cache, [text, other])
    more = torch.ones(2, 23, dtype=torch.long)
    with pytest.raises(ValueError, match="the padding that the cached columns were stored with"):
        model(ids[:, :3] + 1, attention_mask=more, past_key_values=cache)
    with pytest.raises(ValueError, match="expected 20 in row 0, column 0, got 0"):
        model(ids[:, :3] + 1, position_ids=positions[:, :3], past_key_values=cache)
    with pytest.raises(ValueError, match=r"expected more than the 20 columns.* got 20; call reset"):
        model.generate(**batch, **GREEDY, past_key_values=cache)
    assert cache.lengths == [20, 12]


def test_columns_of_padding_alone(model, cache):
    ids = torch.zeros(2, 3, dtype=torch.long)
    with torch.no_grad():
        model(ids, attention_mask=ids, past_key_values=cache)
    assert cache.lengths == [0, 0] and cache.get_seq_length() == 3
    text, other = prompts(12, 9, 9)
    mask = torch.cat((ids, torch.ones(2, 9, dtype=torch.long)), dim=1)
    with torch.no_grad():
        mine = model(torch.stack((text, other)), attention_mask=mask, past_key_values=cache)
    assert share_of_scale(mine.logits[:, -1], uncached(model, text, other)) <= LOGIT_SHARE


def test_a_row_may_pause(model, cache):
    """A step with a column of padding leaves that row as it was."""
    text, other = prompts(13, 30, 30)
    feed(model, cache, [text, other])
    mask = torch.ones(2, 31, dtype=torch.long)
    mask[0, -1] = 0
    with torch.no_grad():
        model(torch.tensor([[0], [7]]), attention_mask=mask, past_key_values=cache)
    assert cache.lengths == [30, 31]
    mine = feed(model, cache, [5, 6])
    expected = uncached(model, with_token(text, 5), with_token(with_token(other, 7), 6))
    assert share_of_scale(mine, expected) <= LOGIT_SHARE


def test_unsupported_outputs_are_refused(model, cache):
    (text,) = prompts(14, 20)
    with pytest.raises(ValueError, match="output_attentions is not supported with a PagedCache"):
        model(**alone(text), past_key_values=cache, output_attentions=True)
    with pytest.raises(ValueError, match="Invalid use_cache: expected True"):
        model(**alone(text), past_key_values=cache, use_cache=False)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(past_key_values=cache)
    logits = model(**alone(text), past_key_values=cache).logits
    with pytest.raises(RuntimeError, match="No gradients through a PagedCache"):
        logits.sum().backward()
    with poisoned(model, max_forward_tokens=8) as small:
        with pytest.raises(ValueError, match="output_hidden_states is not supported in a forward"):
            model(**alone(text), past_key_values=small, output_hidden_states=True)
        parts = model(**alone(text), past_key_values=small, return_dict=False)
        assert share_of_scale(parts[0].detach(), logits.detach()) <= LOGIT_SHARE
    with poisoned(model) as other, torch.no_grad():
        hidden = model(**alone(text), past_key_values=other, output_hidden_states=True)
        expected = model(**alone(text), use_cache=False, output_hidden_states=True)
    assert len(hidden.hidden_states) == len(expected.hidden_states)


def test_every_method_works_or_refuses(model, cache):
    """`PagedCache` overrides every method of transformers' `Cache`, in any supported version."""
    names = {name for name, _ in inspect.getmembers(Cache) if not name.startswith("_")}
    mine = {*vars(PagedCache), *vars(AttachedCache)}
    built_on_others = {"get_query_offset", "get_max_cache_shape", "max_cache_len", "max_batch_size"}
    assert names - mine <= built_on_others
    feed(model, cache, prompts(15, 5))
    assert cache.get_query_offset() == 5 and cache.get_mask_sizes(2, 0) == (7, 0)
    assert cache.get_max_length() == 1024 and len(cache) == 3 and cache.batch_size == 1
    assert cache.is_sliding == [True] * 3 and cache.is_linear == [False] * 3
    assert cache.is_initialized and cache.is_croppable and not cache.is_compileable
    assert cache.activate_past_recording() is None and cache.is_recording_past(0)
    assert cache.early_initialization(1, 1, 1, torch.float32, "cpu") is None
    assert repr(cache) == "PagedCache(tokens=[5])"
    assert cache.memory() == cache.manager.memory()
    tensor = torch.zeros(1)
    for name, arguments, problem in (
        ("update", (tensor, tensor, 0), "written by an attached model alone"),
        ("update_indexer", (tensor, 0), "written by an attached model alone"),
        ("get_conv_state", (0,), "no linear attention"),
        ("update_conv_state", (tensor, 0), "no linear attention"),
        ("get_recurrent_state", (0,), "no linear attention"),
        ("update_recurrent_state", (tensor, 0), "no linear attention"),
        ("has_previous_state", (), "no linear attention"),
        ("offload", (0,), "not offloaded"),
        ("prefetch", (0,), "not offloaded"),
        ("__deepcopy__", ({},), "is not copied"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=problem):
            getattr(cache, name)(*arguments)
    with pytest.raises(RuntimeError, match="is not copied"):
        copy.deepcopy(cache)


def test_columns():
    columns = Columns(2)
    columns.append(3)
    padding = np.array([[False, True], [True, True]])
    columns.append(2, padding)
    columns.append(4)
    assert columns.count == 9
    assert columns.read(2, 6).tolist() == [[True, False, True, True], [True] * 4]
    columns.select([1, 0, 0])
    columns.drop(5)
    assert columns.read(0, 4).tolist() == [[True] * 4, [True] * 3 + [False], [True] * 3 + [False]]
    columns.append(1)
    assert columns.read(4, 5).all()


def test_weights_that_are_replaced_are_used():
    model, other = small_model(3, 4, 128, 0), small_model(4, 4, 128, 0)
    for module in (model, other):  # learned, not as they begin
        for number, (name, weight) in enumerate(module.named_parameters()):
            if name.endswith(("norm.weight", "sinks", "position_bias")):
                weight.data += torch.sin(torch.arange(weight.numel()) + number).view_as(weight) / 2
    (text,) = prompts(20, 140)
    with poisoned(model) as cache:
        before = feed(model, cache, [text])
        cache.reset()
        model.load_state_dict(other.state_dict(), assign=True)
        after = feed(model, cache, [text])
    assert share_of_scale(after, uncached(other, text)) <= LOGIT_SHARE
    assert share_of_scale(after, before) > 0.01


def test_two_caches_of_one_model(model):
    text, other = prompts(16, 140, 20)
    with poisoned(model) as first, poisoned(model, **EXACT, block_tokens=128) as second:
        feed(model, first, [text])
        feed(model, second, [other])
        for step in range(3):
            text, other = with_token(text, step), with_token(other, step + 1)
            mine = torch.cat((feed(model, first, [step]), feed(model, second, [step + 1])))
            assert share_of_scale(mine, uncached(model, text, other)) <= LOGIT_SHARE


def test_a_cache_that_is_left_at_the_end_of_a_script_is_quiet():
    script = """
import torch
from tests.integrations.generation import poisoned, small_model
model = small_model(3, 4)
cache = poisoned(model)
model(torch.ones(2, 300, dtype=torch.long), past_key_values=cache)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "Exception ignored" not in done.stderr, done.stderr
