"""The Triton kernel moves a step as the reference does: on a GPU, or under the interpreter."""

import pytest
import torch

from dsv4.kernels import reference
from dsv4.kernels.contracts import Acceptance, TokenMap
from dsv4.kernels.triton import apply_accepted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def new_tokens(counts, before):
    """A plan of rows that have all tokens of the step before; one padding row and token more."""
    counts, before = torch.tensor(counts), torch.tensor(before)
    ids = torch.arange(len(counts)).repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    positions = torch.arange(len(ids)) - starts[ids] + before[ids]
    none = ints([-1] * len(counts))
    return TokenMap(
        request_slots=none, positions_before=ints(before.tolist()),
        positions_after=ints((before + counts).tolist()), token_starts=ints(starts.tolist()),
        positions=ints(positions.tolist()), request_ids=ints(ids.tolist()),
        workspace_starts=none, chunk_ids=none[:0], block_table=none[:, None],
        num_read_only=none, max_step=int(counts.max()),
    )  # fmt: skip


CASES = {
    "one row": ([9], [0], [9], [4]),
    "no row follows": ([2, 2], [-1, -1], [0, 0], [1, 1]),
    "rows in another order": ([3, 3, 3], [2, 0, 1], [4, 4, 4], [0, 4, 2]),
    "some rows are known": ([1, 2, 4], [1, -1, 0], [3, 0, 2], [2, 1, 0]),
    "counts out of range": ([2, 2, 2], [0, 1, 2], [5, 5, 5], [-3, 6, 5]),
    "rows without tokens": ([0, 3, 0], [0, 1, -1], [2, 2, 0], [1, 0, 0]),
    "several programs": ([9] * 61, list(range(60, -1, -1)), [9] * 61, [i % 10 for i in range(61)]),
    "no row": ([0], [-1], [0], [0]),
}


@pytest.mark.parametrize("counts, rows, counts_before, accepted", CASES.values(), ids=CASES)
def test_a_step_moves_as_the_reference_says(counts, rows, counts_before, accepted):
    before = [100 + 7 * row for row in range(len(counts))]
    moved = []
    for apply in (reference.apply_accepted, apply_accepted):
        tokens = new_tokens(counts, before)
        apply(Acceptance(ints(accepted), ints(rows), ints(counts_before)), tokens)
        moved.append(tokens)
    for got, want in zip(moved[1][:-1], moved[0][:-1], strict=True):
        assert torch.equal(got, want)
    kept = [
        n if row < 0 else n - most + min(max(accepted[row], 0), most)
        for n, row, most in zip(before, rows, counts_before, strict=True)
    ]
    expected = new_tokens(counts, kept)
    for name in ("positions_before", "positions_after", "positions"):
        assert torch.equal(getattr(moved[0], name), getattr(expected, name)), name


def test_only_the_step_s_own_rows_move():
    """The plan's arrays are longer than the step."""
    tokens, step = (
        new_tokens([2, 2, 2], [10, 20, 30]),
        Acceptance(ints([0, 0]), *[ints([0, 1])] * 2),
    )
    cut = tokens._replace(
        positions_before=tokens.positions_before[:2], positions_after=tokens.positions_after[:2],
        positions=tokens.positions[:4], request_ids=tokens.request_ids[:4],
    )  # fmt: skip
    apply_accepted(step._replace(counts=ints([2, 2])), cut)
    assert tokens.positions_before.tolist() == [8, 18, 30]
    assert tokens.positions_after.tolist() == [10, 20, 32]
    assert tokens.positions.tolist() == [8, 9, 18, 19, 30, 31]
