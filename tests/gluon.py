"""Gluon kernels on the CPU: a value is a NumPy array, and partitions of warps take turns.

Triton's interpreter does not know Gluon. `load_hopper` loads the modules of `kernels.triton.hopper`
a second time, with this module in place of Gluon's language. What is modelled, and so checked:

- Memory: an access outside of the tensors of a launch, or one that is not aligned, is refused.
- Shared memory begins as NaN. Copies by threads leave NaN until they are waited for.
- Barriers have phases and count arrivals. Partitions that all wait are a deadlock.
- A product reads its operands when it is waited for, and its result cannot be read before.
- PTX is executed, instruction by instruction.
- Partitions are switched at random where they touch shared memory or barriers.

What is not modelled: layouts of threads, registers, and the order in which a GPU adds. A sum is in
ascending order. The last axis of a value that is shuffled is taken for the lanes.
"""

import importlib
import inspect
import random
import sys
import threading
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
import torch
from triton._C.libtriton import interpreter as raw_memory
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.ptx import execute

HOPPER = "dsv4.kernels.triton.hopper"
COPY_THREADS = 128  # that arrive where a group of four warps has copied


class DType:
    """A type of numbers: how it is stored, and how it is computed with."""

    def __init__(self, name, stored, value=None):
        self.name, self.stored, self.value = name, np.dtype(stored), np.dtype(value or stored)
        self.size = self.stored.itemsize


class Pointer:
    """The type of a pointer: its element's type."""

    def __init__(self, element):
        self.element, self.stored, self.value = element, np.dtype(np.int64), np.dtype(np.int64)


int1, int8, int32 = DType("int1", bool), DType("int8", np.int8), DType("int32", np.int32)
uint8, uint32 = DType("uint8", np.uint8), DType("uint32", np.uint32)
int64, uint64 = DType("int64", np.int64), DType("uint64", np.uint64)
float32, float64 = DType("float32", np.float32), DType("float64", np.float64)
bfloat16 = DType("bfloat16", np.uint16, np.float32)
float8e5, float8e4nv = (DType(name, np.uint8, np.float32) for name in ("float8e5", "float8e4nv"))
TYPES = {
    torch.int8: int8, torch.uint8: uint8, torch.int32: int32, torch.int64: int64,
    torch.float32: float32, torch.bfloat16: bfloat16, torch.float8_e5m2: float8e5,
    torch.float8_e4m3fn: float8e4nv, torch.bool: int1,
}  # fmt: skip
TORCH_TYPES = {bfloat16: torch.bfloat16, float8e5: torch.float8_e5m2,
               float8e4nv: torch.float8_e4m3fn}  # fmt: skip
BY_VALUE = {t.value: t for t in (int1, int8, uint8, int32, uint32, int64, uint64, float32, float64)}


def encode(values, dtype):
    """Values as they are stored."""
    if dtype not in TORCH_TYPES:
        return np.array(values, dtype.stored, order="C")
    wide = torch.from_numpy(np.array(values, np.float32))
    bits = torch.int16 if dtype.size == 2 else torch.uint8
    return wide.to(TORCH_TYPES[dtype]).view(bits).numpy().view(dtype.stored)


def decode(stored, dtype):
    """Stored bits as values."""
    if dtype not in TORCH_TYPES:
        return np.array(stored)
    bits = np.ascontiguousarray(stored).view(np.int16 if dtype.size == 2 else np.uint8)
    return torch.from_numpy(bits.copy()).view(TORCH_TYPES[dtype]).float().numpy()


class Value:
    """A tensor or a scalar of a kernel. A product's data is there once it was waited for."""

    def __init__(self, data, dtype=None):
        self._data = None if data is None else np.asarray(data)
        if dtype is None:
            dtype = BY_VALUE[self._data.dtype]
        self.dtype = dtype

    @property
    def data(self):
        assert self._data is not None, "a product is read before it is waited for"
        return self._data

    @property
    def shape(self):
        return self.data.shape

    @property
    def type(self):
        return SimpleNamespace(layout=Layout(), shape=self.shape, scalar=self.dtype)

    def to(self, dtype, bitcast=False):
        if isinstance(self.dtype, Pointer) or isinstance(dtype, Pointer):
            return Value(self.data.astype(dtype.value), dtype)
        if bitcast:
            stored = encode(self.data, self.dtype)
            return Value(decode(stored.view(dtype.stored).reshape(self.shape), dtype), dtype)
        if dtype in TORCH_TYPES:
            return Value(decode(encode(self.data, dtype), dtype), dtype)
        return Value(self.data.astype(dtype.value), dtype)

    def __getitem__(self, index):
        return Value(self.data[index], self.dtype)

    def __bool__(self):
        assert self.data.size == 1, "a branch on a tensor"
        return bool(self.data)

    def __index__(self):
        assert self.data.size == 1 and self.data.dtype.kind in "iu", "a loop bound is an integer"
        return int(self.data)

    def _with(self, other, operation):
        if isinstance(self.dtype, Pointer) and operation is np.add:
            offset = np.asarray(raw(other)).astype(np.int64)
            return Value(self.data + offset * self.dtype.element.size, self.dtype)
        with np.errstate(all="ignore"):
            result = np.asarray(operation(self.data, raw(other)))
        if result.dtype == np.float64 and np.float64 not in (self.data.dtype, dtype_of(other)):
            result = result.astype(np.float32)
        return Value(result)

    def _from(self, other, operation):
        return Value(np.asarray(other, self.data.dtype))._with(self, operation)

    def __invert__(self):
        return Value(~self.data)

    def __neg__(self):
        return Value(-self.data)

    __hash__ = None


def raw(x):
    return x.data if isinstance(x, Value) else x


def dtype_of(x):
    return x.data.dtype if isinstance(x, Value) else None


def divide(a, b):
    """Whole quotients, rounded towards 0."""
    quotient = np.abs(a) // np.abs(b)
    return np.where((np.asarray(a) < 0) != (np.asarray(b) < 0), -quotient, quotient).astype(
        np.result_type(a, b)
    )


def remain(a, b):
    return a - divide(a, b) * b


for _name, _operation in {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide,
    "floordiv": divide, "mod": remain, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "lshift": np.left_shift, "rshift": np.right_shift,
}.items():  # fmt: skip
    setattr(Value, f"__{_name}__", lambda a, b, f=_operation: a._with(b, f))
    setattr(Value, f"__r{_name}__", lambda a, b, f=_operation: a._from(b, f))
for _name, _operation in {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": np.not_equal,
}.items():  # fmt: skip
    setattr(Value, f"__{_name}__", lambda a, b, f=_operation: a._with(b, f))


class Layout:
    """Any layout of threads or of shared memory; none of them changes a result."""

    def __init__(self, *_, **__):
        pass

    @property
    def value(self):
        return self


class Shared:
    """Shared memory, as a view of bytes."""

    def __init__(self, array, dtype):
        self.array, self.dtype = array, dtype

    @property
    def shape(self):
        return self.array.shape

    def index(self, nth):
        assert 0 <= int(nth) < self.shape[0], f"stage {int(nth)} of {self.shape[0]}"
        return Shared(self.array[int(nth)], self.dtype)

    def slice(self, start, length, dim=0):
        place = [slice(None)] * len(self.shape)
        place[dim] = slice(start, start + length)
        return Shared(self.array[tuple(place)], self.dtype)

    def permute(self, order):
        return Shared(self.array.transpose(order), self.dtype)

    def _reinterpret(self, dtype, shape, layout):
        flat = self.array.reshape(-1).view(np.uint8)
        assert np.shares_memory(flat, self.array), "memory with gaps is not reinterpreted"
        size = int(np.prod(shape)) * dtype.size
        return Shared(flat[:size].view(dtype.stored).reshape(shape), dtype)

    def load(self, layout=None):
        launch.switch()
        return Value(decode(self.array, self.dtype), self.dtype)

    def store(self, value):
        launch.switch()
        assert value.shape == self.shape, f"{value.shape} in {self.shape}"
        self.array[...] = encode(value.data, self.dtype)


class Descriptor:
    """A described tensor of a launch, whose tiles are copied."""

    def __init__(self, described):
        tensor = described.base
        self.dtype, self.block_shape = TYPES[tensor.dtype], tuple(described.block_shape)
        self.layout = Layout()
        bits = tensor.view(torch.uint8).reshape(len(tensor), -1).numpy()
        self.array = bits.view(self.dtype.stored)

    def tile(self, place):
        """View the tile at a place, as far as it is inside."""
        (row, column), (rows, columns) = (int(each) for each in place), self.block_shape
        return self.array[row : row + rows, column : column + columns]


class Barrier:
    """A barrier in shared memory: arrivals and bytes that are left of its phase."""

    def __init__(self, count):
        self.count, self.left, self.bytes, self.phase = count, count, 0, 0

    def change(self, arrivals=0, num_bytes=0):
        self.left, self.bytes = self.left - arrivals, self.bytes + num_bytes
        assert self.left >= 0, "more arrivals than a barrier counts"
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.count, self.phase + 1


class Partition(threading.Thread):
    """Some warps of a program, a thread that runs when it is told to."""

    def __init__(self, function, arguments):
        super().__init__(daemon=True)
        self.function, self.arguments = function, arguments
        self.may_run, self.has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.is_ready, self.is_done, self.error = lambda: True, False, None
        self.products, self.copies = [], []

    def run(self):
        self.may_run.acquire()
        try:
            self.function(*self.arguments)
            assert not self.copies, "copies are not waited for"
        except BaseException as error:
            self.error = error
        self.is_done = True
        self.has_stopped.release()

    def resume(self):
        self.may_run.release()
        self.has_stopped.acquire()
        if self.error is not None:
            raise self.error

    def stop(self, is_ready):
        self.is_ready = is_ready
        self.has_stopped.release()
        self.may_run.acquire()


class Launch:
    """The launch that runs: its program, its memory, its partitions."""

    def __init__(self):
        self.random = random.Random(0)
        self.barriers, self.ranges, self.programs = {}, np.zeros((0, 2), np.int64), (0, 1)
        self.partition = self.main = Partition(lambda: None, ())

    def begin(self, tensors):
        spans = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self.ranges = np.array([(start, start + size) for start, size in sorted(spans.items())])

    def begin_program(self, ids, counts):
        self.programs, self.barriers = (ids, counts), {}
        self.partition = self.main = Partition(lambda: None, ())

    def check(self, addresses, size):
        """Refuse addresses that are in no tensor, or not aligned."""
        if addresses.size:
            nth = np.searchsorted(self.ranges[:, 0], addresses, side="right") - 1
            is_inside = (nth >= 0) & (addresses + size <= self.ranges[nth, 1])
            assert is_inside.all(), "an access outside of the launch's tensors"
            assert (addresses % size == 0).all(), f"a misaligned access of {size} bytes"

    def switch(self):
        """Let another partition run, sometimes."""
        if self.partition is not self.main and self.random.random() < 0.2:
            self.partition.stop(lambda: True)

    def wait(self, is_ready):
        if self.partition is self.main:
            assert is_ready(), "a wait that nothing ends"
        elif not is_ready():
            self.partition.stop(is_ready)

    def specialize(self, partitions):
        for each in partitions:
            each.start()
        while running := [each for each in partitions if not each.is_done]:
            ready = [each for each in running if each.is_ready()]
            assert ready, f"a deadlock of {[each.function.__name__ for each in running]}"
            self.partition = self.random.choice(ready)
            self.partition.resume()
        self.partition = self.main


launch = Launch()


def _barrier(memory):
    return launch.barriers[memory.array.__array_interface__["data"][0]]


def init(memory, count):
    launch.barriers[memory.array.__array_interface__["data"][0]] = Barrier(count)


def arrive(memory, count=1):
    launch.switch()
    _barrier(memory).change(count)
    launch.switch()


def expect(memory, num_bytes):
    _barrier(memory).change(1, num_bytes)


def wait(memory, phase):
    barrier, parity = _barrier(memory), int(phase) % 2
    launch.wait(lambda: barrier.phase % 2 != parity)


def tma_load(descriptor, place, memory, shared):
    """Copy a tile of a described tensor; zeros outside of it."""
    assert (shared.shape, shared.dtype) == (descriptor.block_shape, descriptor.dtype)
    part = descriptor.tile(place)
    shared.array[...] = 0
    shared.array[: part.shape[0], : part.shape[1]] = part
    _barrier(memory).change(0, -shared.array.size * shared.dtype.size)


def tma_store(descriptor, place, shared):
    """Copy a tile to a described tensor, as far as it is inside."""
    assert (shared.shape, shared.dtype) == (descriptor.block_shape, descriptor.dtype)
    part = descriptor.tile(place)
    part[...] = shared.array[: part.shape[0], : part.shape[1]]


def copy_by_threads(shared, pointer, mask=None):
    """Start to copy; the memory is undefined until the copy is waited for."""
    loaded = load(pointer, mask=mask, other=0)
    shared.array.reshape(-1).view(np.uint8)[...] = 0xFF
    launch.partition.copies.append((shared.array, encode(loaded.data, shared.dtype)))


def finish_copies(*_):
    for array, bits in launch.partition.copies:
        array[...] = bits
    launch.partition.copies.clear()


def arrive_after_copies(memory, increment_count=True):
    assert not increment_count
    finish_copies()
    arrive(memory, COPY_THREADS)


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    """Start a product; it reads its operands as late as it may."""
    launch.switch()
    pending = Value(None, float32)
    launch.partition.products.append((pending, a, b, acc if use_acc else None))
    return pending if is_async else warpgroup_mma_wait(0, deps=[pending])


def warpgroup_mma_wait(num_outstanding=0, deps=()):
    launch.switch()
    products = launch.partition.products
    while len(products) > num_outstanding:
        pending, a, b, acc = products.pop(0)
        a, b = (x.data if isinstance(x, Value) else decode(x.array, x.dtype) for x in (a, b))
        with np.errstate(all="ignore"):
            product = (torch.from_numpy(a).double() @ torch.from_numpy(b).double()).numpy()
            pending._data = (product if acc is None else product + acc.data).astype(np.float32)
    return deps[0] if len(deps) == 1 else tuple(deps)


def allocate_shared_memory(dtype, shape, layout=None):
    shape = tuple(int(size) for size in shape)
    memory = np.full(int(np.prod(shape)) * dtype.size, 0xFF, np.uint8)
    return Shared(memory.view(dtype.stored).reshape(shape), dtype)


def load(pointer, mask=None, other=None):
    element, at = pointer.dtype.element, pointer.data
    is_loaded = np.broadcast_to(np.asarray(True if mask is None else raw(mask)), at.shape)
    launch.check(at[is_loaded], element.size)
    if other is None:
        fill = np.frombuffer(b"\xff" * at.size * element.size, element.stored).reshape(at.shape)
    else:
        fill = np.broadcast_to(encode(np.asarray(raw(other), element.value), element), at.shape)
    bits = raw_memory.load(
        at.astype(np.uint64), np.ascontiguousarray(is_loaded), np.ascontiguousarray(fill),
        element.stored,
    )  # fmt: skip
    return Value(decode(bits.reshape(at.shape), element), element)


def store(pointer, value, mask=None):
    element, at = pointer.dtype.element, pointer.data
    value = np.asarray(raw(value))
    is_stored = np.asarray(True if mask is None else raw(mask))
    at, value, is_stored = np.broadcast_arrays(at, value, is_stored)
    launch.check(at[is_stored], element.size)
    raw_memory.store(
        at.astype(np.uint64), np.ascontiguousarray(encode(value, element)),
        np.ascontiguousarray(is_stored),
    )  # fmt: skip


def atomic_add(pointer, value):
    before = load(pointer)
    store(pointer, before + value)
    return before


def where(condition, a, b):
    tensor = a if isinstance(a, Value) else b
    if not isinstance(tensor, Value):
        data = np.where(raw(condition), a, b)
        return Value(data.astype(np.float32 if data.dtype.kind == "f" else np.int32))
    data = np.where(raw(condition), raw(a), raw(b))
    if not (isinstance(a, Value) and isinstance(b, Value)):
        data = data.astype(tensor.data.dtype)
    return Value(data, tensor.dtype if data.dtype == tensor.data.dtype else None)


def _choose(whole, floating):
    def choose(a, b):
        a, b = raw(a), raw(b)
        operation = floating if np.result_type(a, b).kind == "f" else whole
        return Value(np.asarray(operation(a, b)))

    return choose


maximum, minimum = _choose(np.maximum, np.fmax), _choose(np.minimum, np.fmin)


def reduce(x, axis, combine):
    parts = [Value(part, x.dtype) for part in np.moveaxis(x.data, axis, 0)]
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure=True, pack=1):
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    arrays = np.broadcast_arrays(*[raw(each) for each in args])
    inputs = [np.ascontiguousarray(each) for each in arrays]
    inputs = [each if each.itemsize == 8 else each.view(np.uint32) for each in inputs]
    results = execute(asm, inputs, num_outputs=len(dtypes))
    values = [Value(bits.view(t.stored), t) for bits, t in zip(results, dtypes, strict=True)]
    return tuple(values) if isinstance(dtype, tuple) else values[0]


def warp_specialize(functions, num_warps, num_registers):
    assert len(num_warps) == len(num_registers) == len(functions) - 1
    launch.specialize([Partition(function, arguments) for function, arguments in functions])


class Kernel:
    """A function of a kernel: called by another one, or launched over a grid."""

    def __init__(self, fn):
        self.fn, self.__name__ = fn, fn.__name__

    def __call__(self, *args, **kwargs):
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid):
        return lambda **arguments: self._run(grid, arguments)

    def _run(self, grid, arguments):
        parameters = inspect.signature(self.fn).parameters
        given = {name: arguments[name] for name in parameters}
        tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
        launch.begin(tensors)
        values = {
            name: x if parameters[name].annotation is constexpr else as_argument(x)
            for name, x in given.items()
        }
        counts = (*grid, 1)[:2]
        for first in range(counts[0]):
            for second in range(counts[1]):
                launch.begin_program((first, second), counts)
                self.fn(**values)
                assert not launch.main.products, "products are not waited for"


def as_argument(x):
    """A launch's argument as a kernel sees it."""
    if isinstance(x, torch.Tensor):
        return Value(np.asarray(x.data_ptr(), np.int64), Pointer(TYPES[x.dtype]))
    if isinstance(x, float):
        return Value(np.asarray(x, np.float32))
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    if isinstance(x, int):
        return Value(np.asarray(x, np.int32 if -(2**31) <= x < 2**31 else np.int64))
    return x


def jit(fn=None, **_):
    return Kernel(fn) if fn is not None else Kernel


def constexpr(x):
    return x


def values_of(*bounds):
    """Replace `range` of a kernel's loops: its numbers are values of the device."""
    return (Value(np.asarray(nth, np.int32)) for nth in range(*map(int, bounds)))


def _language() -> ModuleType:
    """Gluon's language, as far as the kernels use it."""

    def full(shape, value, dtype, layout=None):
        return Value(np.full(tuple(shape), raw(value), dtype.value), dtype)

    def cdiv(a, b):
        return (a + (b - 1)) // b

    def reshape(x, shape):
        return Value(x.data.reshape([int(size) for size in shape]), x.dtype)

    def split(x):
        return Value(x.data[..., 0], x.dtype), Value(x.data[..., 1], x.dtype)

    def sqrt(x):
        return Value(np.sqrt(x.data))

    names = {
        "constexpr": constexpr, "tensor": Value, "tuple": tuple, "static_range": range,
        "shared_memory_descriptor": Shared, "pointer_type": Pointer, "load": load, "store": store,
        "where": where, "maximum": maximum, "minimum": minimum, "reduce": reduce, "cdiv": cdiv,
        "allocate_shared_memory": allocate_shared_memory, "atomic_add": atomic_add, "full": full,
        "inline_asm_elementwise": inline_asm_elementwise, "warp_specialize": warp_specialize,
        "thread_barrier": lambda: launch.switch(),
        "program_id": lambda axis: Value(np.asarray(launch.programs[0][axis], np.int32)),
        "num_programs": lambda axis: Value(np.asarray(launch.programs[1][axis], np.int32)),
        "to_tensor": lambda x: x if isinstance(x, Value) else as_argument(x),
        "arange": lambda a, b, layout=None: Value(np.arange(a, b, dtype=np.int32)),
        "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype),
        "zeros_like": lambda x: full(x.shape, 0, x.dtype),
        "full_like": lambda x, value, dtype=None: full(x.shape, value, dtype or x.dtype),
        "max": lambda x, axis: reduce(x, axis, maximum),
        "sum": lambda x, axis: reduce(x, axis, lambda a, b: a + b),
        "exp2": lambda x: Value(np.exp2(x.data)), "log2": lambda x: Value(np.log2(x.data)),
        "abs": lambda x: Value(np.abs(x.data), x.dtype), "sqrt_rn": sqrt,
        "div_rn": lambda a, b: a / b, "reshape": reshape, "split": split,
        "permute": lambda x, order: Value(x.data.transpose(order), x.dtype),
        "join": lambda a, b: Value(np.stack((a.data, b.data), axis=-1), a.dtype),
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "broadcast": lambda *xs: tuple(
            Value(data, x.dtype)
            for x, data in zip(xs, np.broadcast_arrays(*map(raw, xs)), strict=True)
        ),
    }  # fmt: skip
    layouts = (
        "BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout",
        "NVMMASharedLayout", "SwizzledSharedLayout", "DistributedLinearLayout",
    )  # fmt: skip
    names |= dict.fromkeys(layouts, Layout)
    types = (int1, int32, int64, uint32, uint64, float32, bfloat16)
    return make_module("language", **names, **{dtype.name: dtype for dtype in types})


def make_module(name: str, **members) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


LANGUAGE = _language()


def _stand_ins() -> dict[str, ModuleType]:
    """The modules that take the place of Gluon's."""
    gluon = "triton.experimental.gluon"
    nothing = {"gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None}
    ampere = make_module(
        "async_copy", async_copy_global_to_shared=copy_by_threads, commit_group=lambda: None,
        wait_group=finish_copies, mbarrier_arrive=arrive_after_copies,
    )  # fmt: skip
    hopper = {
        "mbarrier": make_module("mbarrier", init=init, arrive=arrive, wait=wait, expect=expect,
                                MBarrierLayout=Layout),
        "tma": make_module("tma", async_copy_global_to_shared=tma_load,
                           async_copy_shared_to_global=tma_store, store_wait=lambda pendings: None),
        "warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait,
        "fence_async_shared": lambda: None,
    }  # fmt: skip
    root = make_module(gluon, jit=jit, constexpr_function=lambda fn: fn, language=LANGUAGE)
    return {
        gluon: root, f"{gluon}.language": LANGUAGE,
        f"{gluon}.language.nvidia.hopper": make_module("hopper", **hopper),
        f"{gluon}.language.nvidia.ampere": make_module("ampere", async_copy=ampere),
        "triton.language.extra.cuda": make_module("cuda", **nothing),
        "triton.experimental": make_module("triton.experimental", gluon=root),
    }  # fmt: skip


def load_hopper() -> dict[str, ModuleType]:
    """Load the modules of `kernels.triton.hopper` for the CPU, by their names."""
    stand_ins = _stand_ins()
    names = [f"{HOPPER}.{name}" for name in (
        "decode", "program", "softmax", "query", "few_heads", "many_heads", "attention",
        "dense_attention", "index_scores",
    )]  # fmt: skip
    package = vars(importlib.import_module(HOPPER))
    attributes = dict(package)  # an import adds its module to them
    kept = {name: sys.modules.pop(name, None) for name in [*names, *stand_ins]}
    sys.modules.update(stand_ins)
    try:
        loaded = {name: importlib.import_module(name) for name in names}
    finally:
        package.clear()
        package.update(attributes)
        for name, module in kept.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
    for module in loaded.values():
        vars(module)["range"] = values_of
        for name, member in vars(module).items():
            fn = getattr(member, "fn", None)
            if fn is not None and fn.__module__.endswith(".primitives"):
                vars(module)[name] = _of_triton(fn)
    return loaded


def _of_triton(fn) -> FunctionType:
    """A function of Triton's language in this one."""
    return FunctionType(fn.__code__, {**fn.__globals__, "tl": LANGUAGE}, fn.__name__)


@contextmanager
def on_cpu(monkeypatch, *, seed: int = 0):
    """Let launches on Hopper run here: attention and scores of chunks."""
    from dsv4.kernels.triton import attention, chunk_scores, hopper

    launch.random = random.Random(seed)
    with monkeypatch.context() as patch:
        for name, module in LOADED.items():
            patch.setitem(sys.modules, name, module)
            patch.setattr(hopper, name.rpartition(".")[2], module, raising=False)
        for module in (attention, chunk_scores):
            patch.setattr(module, "is_hopper", lambda device: True)
        yield


LOADED = load_hopper()
