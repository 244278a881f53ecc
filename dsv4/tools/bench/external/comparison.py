"""The outcome of a comparison: which external kernels are here, and why others are not."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Kernels = TypeVar("_Kernels")


def try_load(load: Callable[[], _Kernels]) -> tuple[_Kernels | None, str]:
    """Load external kernels; None and one sentence that says why if they are not here."""
    try:
        return load(), ""
    except ImportError as error:
        return None, str(error)


def report_comparison(compare: bool, problems: Mapping[str, str]) -> dict[str, Any]:
    """Name each project as compared, or say why not; nothing if none was asked for."""
    states = {name: problem or "compared" for name, problem in problems.items()}
    return {"peers": states} if compare else {}
