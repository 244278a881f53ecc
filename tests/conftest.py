"""Small tensors gain nothing from threads, and the tests run side by side."""

import torch

torch.set_num_threads(1)
