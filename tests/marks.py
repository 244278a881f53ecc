"""Which cases of a test every run has, and which `make slow` alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter does not run beside a GPU"
)


def quick(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """The cases of a test; all but those kept are slow."""
    return _marked(cases, kept, pytest.mark.slow)


def long(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """The cases of a slow test; all but those kept are long."""
    return _marked(cases, kept, pytest.mark.long)


def interpreted(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """The cases of a test of kernels; all but those kept are slow under the interpreter."""
    return _marked(cases, kept, pytest.mark.interpreted)


def _marked(cases: Iterable[Any], kept: Collection[Any], mark: pytest.MarkDecorator) -> list[Any]:
    cases = list(cases)
    missing = [case for case in kept if case not in cases]
    assert not missing, f"expected cases of the test, got {missing}"
    return [case if case in kept else pytest.param(case, marks=mark) for case in cases]
