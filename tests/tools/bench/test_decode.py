"""Steps of `dsv4 bench step`: long requests made by plans, with blocks of their own or shared."""

import numpy as np
import pytest
import torch

from dsv4 import CacheConfig
from dsv4.tools.bench import decode
from dsv4.tools.bench.decode import check_attention, decode_case
from tests.v41 import tiny_v41

LENGTH, BATCH = 1300, 3
CONFIG = CacheConfig.tiny(compress_ratios=(0, 4, 128, 4))


def test_choices_are_shared(monkeypatch):
    monkeypatch.setattr(decode, "DISTINCT_BLOCKS", 2)
    case = decode_case(tiny_v41(), 90, 2, device="cpu", free_bytes=1 << 40)
    handles = case.next_step()
    case.forward(handles)
    selections = decode.select_layers(handles, case)
    assert selections[0] is None and selections[1] is selections[2]
    assert selections[4] is selections[5] and len({id(each) for each in selections[1:]}) == 4
    check_attention(handles, case, selections)


@pytest.fixture(params=[True, False], ids=["own blocks", "shared blocks"])
def case(request, monkeypatch):
    monkeypatch.setattr(decode, "DISTINCT_BLOCKS", 2)
    monkeypatch.setattr(decode, "PREFILL_TOKENS", 512)
    free_bytes = 1 << 40 if request.param else 0
    made = decode_case(CONFIG, LENGTH, BATCH, device="cpu", free_bytes=free_bytes)
    assert made.has_own_blocks is request.param
    return made


def test_requests_stand_one_token_apart(case):
    lengths = case.manager.lengths[case.slots]
    assert np.array_equal(np.diff(lengths), [1, 1])
    steps = decode.NUM_STEPS + decode.NUM_WARMUP_STEPS + 1
    assert lengths[-1] + steps == LENGTH - 1
    case.manager.check_integrity()
    table = case.manager._books.requests.block_table[case.slots]
    num_full = lengths[0] // CONFIG.block_tokens
    is_shared = (table[:, :num_full] == table[0, :num_full]).all()
    assert bool(is_shared) is not case.has_own_blocks


def test_blocks_are_copies_of_the_first(case):
    storage = case.manager.paged.storage
    for block in range(2, len(storage)):
        assert torch.equal(storage[block], storage[block % 2])
    assert not torch.equal(storage[0], storage[1]) and storage.any()


def test_steps_run_and_are_finite(case):
    for _ in range(2):
        results = case.forward(case.next_step())
        assert all(result.output.isfinite().all() for result in results)
    case.manager.check_integrity()


def test_wrong_attention_is_not_timed(case, monkeypatch):
    handles = case.next_step()
    case.forward(handles)
    selections = decode.select_layers(handles, case)
    assert [selection is not None for selection in selections] == [False, True, False, True]
    check_attention(handles, case, selections)
    right = decode._attend

    def wrong(handle, case, selection):
        result = right(handle, case, selection)
        return result._replace(output=result.output * 1.1) if handle.layer.ratio == 128 else result

    monkeypatch.setattr(decode, "_attend", wrong)
    with pytest.raises(RuntimeError, match="HCA: the output differs from the reference's"):
        check_attention(handles, case, selections)
