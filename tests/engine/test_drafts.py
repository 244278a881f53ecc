"""Drafts are what followed the last tokens where they stood before."""

import random

import pytest

from dsv4.engine import drafts
from dsv4.engine.drafts import propose_drafts


def search(ids, count, farthest):
    """Search backwards, token by token."""
    for size in (3, 2):
        for end in range(len(ids) - 2, max(0, len(ids) - farthest) + size - 2, -1):
            if ids[end - size + 1 : end + 1] == ids[-size:]:
                return ids[end + 1 : end + 1 + count]
    return []


@pytest.mark.parametrize("farthest", [10, 4096])
@pytest.mark.parametrize("vocabulary", [2, 9])
def test_drafts_of_a_growing_text(vocabulary, farthest, monkeypatch):
    monkeypatch.setattr(drafts, "FARTHEST", farthest)
    draw, num_found = random.Random(0), 0
    for _ in range(50):
        ids, ends = [], {}
        for _ in range(30):
            ids += draw.choices(range(vocabulary), k=draw.randrange(0, 5))
            found = propose_drafts(ids, 4, ends)
            assert found == search(ids, 4, farthest)
            num_found += bool(found)
        assert len(ends) <= 4 * farthest + 3 * 30
    assert num_found > 100


def test_one_text_has_no_drafts_of_another():
    assert propose_drafts([1, 2, 3, 1, 2], 2, {}) == [3, 1]
    assert propose_drafts([1, 2], 2, {}) == []
