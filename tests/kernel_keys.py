"""One key for a kernel in every process, so that processes find what others compiled.

Triton 3.6 leaves constants out of a function's key if the functions that use them have no key yet:
a kernel's key depends on what was launched before it. Later versions don't
(triton-lang/triton#10494).
"""

import sys

from triton.runtime.jit import JITFunction

import dsv4.kernels.triton.hopper.attention


def install() -> None:
    """Make the keys of all functions, callees first."""
    package = dsv4.kernels.triton.__name__
    for name in sorted(name for name in sys.modules if name.startswith(package)):
        for function in vars(sys.modules[name]).values():
            _make_key(function)


def _make_key(function: object) -> None:
    if isinstance(function, JITFunction) and function.hash is None:
        for name in function.fn.__code__.co_names:
            _make_key(function.fn.__globals__.get(name))
        assert function.cache_key
