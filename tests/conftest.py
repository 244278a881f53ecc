"""Small tensors gain nothing from threads, and the tests run side by side.

Without a GPU, Triton's kernels run under its interpreter.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
