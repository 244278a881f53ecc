"""Acceptance: a step begins where the accepted tokens of the step before end."""

import torch

from dsv4.kernels.contracts import Acceptance, TokenMap


def apply_accepted(step_before: Acceptance, tokens: TokenMap) -> None:
    """Move a step back by the rejected tokens of the step before.

    Its lengths and positions are given as if all tokens had been accepted.
    """
    rows, counts = step_before.rows.long(), step_before.counts
    accepted = step_before.accepted[rows.clamp(min=0)].clamp(min=0).minimum(counts)
    rejected = torch.where(rows >= 0, counts - accepted, 0)
    tokens.positions_before.sub_(rejected)
    tokens.positions_after.sub_(rejected)
    tokens.positions.sub_(rejected[tokens.request_ids.long()])
