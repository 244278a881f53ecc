"""Triton's interpreter without most of its overhead: types are made once, modules patched once.

Values and checks stay Triton's own, but for two: misaligned addresses are refused, as by a GPU, and
products are summed in fp64.
Most tests of kernels spend their time here.
"""

import functools
import math

import numpy as np
import torch
from triton.language import core, semantic
from triton.runtime import interpreter

_patched_modules: set[int] = set()
_block_types: dict[tuple, dict] = {}  # a block type's attributes, by its element type and shape
_NO_SHAPE = core.tuple([])
_ONE = core.constexpr(1)
_np_dtypes: dict[str, np.dtype] = {}
_make_block_type = core.block_type.__init__
_make_np_dtype = interpreter._get_np_dtype
_equal_dtypes = core.dtype.__eq__
_equal_tuples = core.tuple.__eq__
_load = interpreter.InterpreterBuilder.create_masked_load
_store = interpreter.InterpreterBuilder.create_masked_store
_sanitize_overflow = semantic.TritonSemantic.binary_op_sanitize_overflow_impl


def install() -> None:
    """Replace what the interpreter does at every call by what it needs to do once."""
    interpreter.InterpretedFunction.__call__ = _call_device_function
    interpreter._get_np_dtype = _np_dtype
    core.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor
    core.dtype.__eq__ = lambda self, other: self is other or _equal_dtypes(self, other)
    core.tuple.__eq__ = _equal_shapes
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    interpreter.InterpreterBuilder.create_dot = _dot_in_fp64
    interpreter.InterpreterBuilder.create_masked_load = _load_aligned
    interpreter.InterpreterBuilder.create_masked_store = _store_aligned


def _call_device_function(function, *args, **kwargs):
    """Patch Triton's language once for each module, not at every call of a function.

    That takes longer than most functions. What a launch patches it restores and patches again;
    what only a function's module sees stays patched, as it does without this.
    """
    module = id(function.fn.__globals__)
    if module not in _patched_modules:
        interpreter._patch_lang(function.fn)
        _patched_modules.add(module)
    return function.rewrite()(*args, **kwargs)


def _np_dtype(tt_dtype) -> np.dtype:
    scalar = tt_dtype.scalar
    if scalar.name not in _np_dtypes:
        _np_dtypes[scalar.name] = _make_np_dtype(scalar)
    return _np_dtypes[scalar.name]


def _init_block_type(self, element_ty, shape) -> None:
    sizes = shape.values if isinstance(shape, core.tuple) else shape
    key = (
        element_ty.name,
        getattr(element_ty, "address_space", 0),
        *[size.value if isinstance(size, core.constexpr) else size for size in sizes],
    )
    attributes = _block_types.get(key)
    if attributes is None:
        _make_block_type(self, element_ty, shape)
        _block_types[key] = dict(self.__dict__)
    else:
        self.__dict__.update(attributes)


def _init_tensor(self, handle, type) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    if type.is_block():
        self.numel, self.shape = _tensor_shape(tuple(type.shape.values))
    else:
        self.numel, self.shape = _ONE, _NO_SHAPE


@functools.cache
def _tensor_shape(sizes: tuple[int, ...]):
    shape = core.tuple([core.constexpr(size) for size in sizes])
    return core.constexpr(math.prod(sizes)), shape


def _equal_shapes(self, other):
    values = other.values if isinstance(other, core.tuple) else other
    if isinstance(values, list) and all(type(value) is int for value in values):
        return core.constexpr(self.values == values)
    return _equal_tuples(self, other)


def _check_overflow(self, lhs, rhs, binary_op) -> None:
    """Skip a check whose result Triton reads in debug mode alone."""
    if self.builder.options.debug:
        _sanitize_overflow(self, lhs, rhs, binary_op)


def _dot_in_fp64(self, a, b, d, *precision):
    """Multiply in fp64: fp32 sums hardly ever show what CPU or number of columns changes there."""
    values = []
    for each in (a, b):
        data = each.data
        if each.dtype.primitive_bitwidth == 8:
            data = interpreter._convert_float(data, each.dtype, core.float16, None).view(np.float16)
        with np.errstate(invalid="ignore"):  # NaN in FP16
            values.append(torch.from_numpy(np.asarray(data, np.float64)))
    product = torch.matmul(*values).numpy().astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _load_aligned(self, ptrs, mask, *others):
    _check_alignment(ptrs, mask)
    return _load(self, ptrs, mask, *others)


def _store_aligned(self, ptrs, value, mask, *others):
    _check_alignment(ptrs, mask)
    return _store(self, ptrs, value, mask, *others)


def _check_alignment(ptrs, mask) -> None:
    size = ptrs.get_element_ty().primitive_bitwidth // 8
    if size > 1:
        bits = np.bitwise_or.reduce(ptrs.data, axis=None, where=mask.data.astype(bool))
        assert bits % size == 0, f"misaligned address of {size} bytes"
