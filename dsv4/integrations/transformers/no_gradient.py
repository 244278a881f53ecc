"""`NoGradient`: refuses a backward pass through the cache."""

from typing import Any

import torch
from torch import Tensor


class NoGradient(torch.autograd.Function):
    """Pass values on; a backward pass raises and says why."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "No gradients through a PagedCache: it stores rows without their history; "
            "train without past_key_values"
        )
