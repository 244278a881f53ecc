"""Small tensors gain nothing from threads, and the tests run side by side.

Without a GPU, Triton's kernels run under its interpreter; with one, processes share compiled ones.
"""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is imported; other processes inherit it

import pytest
import torch

torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    from tests import interpreter

    interpreter.install()
else:
    from tests import kernel_keys

    kernel_keys.install()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that only the interpreter makes slow are slow where it runs."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("interpreted"):
                item.add_marker(pytest.mark.slow)
