"""`WeightAddresses`: the places of a model's weights, which captured graphs read."""

import weakref
from collections.abc import Sequence
from typing import Any


class WeightAddresses:
    """The addresses of all parameters and buffers of modules, which are not kept."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._tensors = [
            (weakref.ref(part), held, name, tensor.data_ptr())
            for module in modules
            for part in module.modules()
            for held in ("_parameters", "_buffers")
            for name, tensor in vars(part)[held].items()
            if tensor is not None
        ]

    def are_current(self) -> bool:
        """Return whether every weight lies where it did; values may have changed."""
        for part_ref, held, name, address in self._tensors:
            part = part_ref()
            tensor = None if part is None else part.__dict__[held].get(name)
            if tensor is None or tensor.data_ptr() != address:
                return False
        return True
