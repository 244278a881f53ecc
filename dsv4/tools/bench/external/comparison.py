"""Load external kernels for a comparison, and report which are missing and why."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Kernels = TypeVar("_Kernels")


def try_load(load: Callable[[], _Kernels]) -> tuple[_Kernels | None, str]:
    """Load external kernels; if they are missing, return None and the reason."""
    try:
        return load(), ""
    except ImportError as error:
        return None, str(error)


def report_comparison(compare: bool, problems: Mapping[str, str]) -> dict[str, Any]:
    """Report each project as compared, or the reason why not; empty without --compare."""
    states = {name: problem or "compared" for name, problem in problems.items()}
    return {"peers": states} if compare else {}
