"""Small tensors gain nothing from threads, and the tests run side by side.

Without a GPU, Triton's kernels run under its interpreter.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime import interpreter

    patched_modules: set[int] = set()

    def call_device_function(function, *args, **kwargs):
        """Patch Triton's language once for each module, not at every call of a function.

        That takes longer than most functions. What a launch patches it restores and patches again;
        what only a function's module sees stays patched, as it does without this.
        """
        module = id(function.fn.__globals__)
        if module not in patched_modules:
            interpreter._patch_lang(function.fn)
            patched_modules.add(module)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call_device_function
