"""Compile every kernel ahead of time for an architecture; print what each takes as JSON.

Run as a script, without the interpreter: `python -m tests.kernels.compile_triton 90 1`.
"""

import io
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.formats import INDEX_FORMATS, KV_FORMATS
from dsv4.kernels.contracts import CheckpointPoints, LayerWrites
from dsv4.kernels.triton import (
    acceptance,
    attention,
    candidates,
    checkpoint,
    chunk_scores,
    dense_rows,
    flush_write,
    gather,
    indexer,
    primitives,
    rope,
    topk,
)
from dsv4.kernels.triton import launch as launch_module
from dsv4.kernels.triton.hopper import attention as hopper
from dsv4.kernels.triton.hopper import dense_attention, index_scores
from dsv4.kernels.triton.launch import KINDS, Launch, architecture_steps, work_name
from dsv4.layer_schedule import SHARED_RATIOS
from dsv4.testing import model_projections, model_weights

knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int32: "i32",
    torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip


class AttentionCase(NamedTuple):
    """A layer's ratio, its heads, its row format, and whether a chunk or one token attends.

    is_raw gives it queries as they are projected. is_invariant has short splits of one size, which
    one program joins in a chunk, and others combine in a step.
    """

    ratio: int
    heads: int
    kv_format: str
    is_chunk: bool
    is_raw: bool = False
    is_invariant: bool = False


ATTENTION = [
    AttentionCase(4, 64, "fp8", False), AttentionCase(4, 64, "fp8", True),
    AttentionCase(0, 64, "fp8", True), AttentionCase(128, 64, "fp8", False),
    AttentionCase(128, 128, "bf16", False), AttentionCase(4, 64, "fp8_entry_scale", True),
    AttentionCase(128, 64, "fp32", False), AttentionCase(4, 8, "fp8", False),
    AttentionCase(128, 16, "bf16", True), AttentionCase(128, 32, "fp8", True),
    AttentionCase(4, 16, "fp8", False), AttentionCase(128, 64, "fp8", True),
    AttentionCase(4, 64, "fp8", False, True), AttentionCase(4, 64, "fp8", True, True),
    AttentionCase(4, 8, "fp8", False, True), AttentionCase(128, 64, "bf16", True, True),
    AttentionCase(2, 64, "fp8_32", False, True), AttentionCase(1, 64, "fp8_32", True),
    AttentionCase(1, 64, "fp8_32", False), AttentionCase(4, 64, "fp8", False, True, True),
    AttentionCase(1, 64, "fp8_32", True, False, True),
    AttentionCase(4, 64, "fp8", True, True, True), AttentionCase(4, 128, "fp8", False),
    AttentionCase(4, 128, "fp8", False, False, True),
]  # fmt: skip


class Recorder:
    """Replacement of a kernel that records its launches."""

    def __init__(self, kernel, launches: list) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda **arguments: self.launches.append((self.kernel, arguments))


def layer_config(ratio: int, **choices) -> CacheConfig:
    """Make the config of one layer at V4-Flash's width, or V4.1-Flash's."""
    if ratio not in SHARED_RATIOS:
        return CacheConfig.v4_flash(compress_ratios=(ratio,), **choices)
    if choices.get("kv_format") == "fp8_32":
        del choices["kv_format"]  # one of two formats that it was trained for
    own = {"compress_ratios": (ratio,), "kv_source_layer_ids": (0,), "index_source_layer_ids": (0,),
           "candidate_source_layer_id": -1}  # fmt: skip
    return CacheConfig.v41_flash(**{**own, **choices})


def record(ratio: int, kind: str, launch: Launch) -> list:
    """Record the launches of one layer's write."""
    launches: list = []
    names = ("_edge_kernel", "_write_kernel")
    kernels = {name: getattr(flush_write, name) for name in names}
    for name, kernel in kernels.items():
        setattr(flush_write, name, Recorder(kernel, launches))
    num_tokens = 1 if kind == "decode" else 3
    drafts = 2 if kind == "step" else 0
    config = layer_config(ratio, num_query_heads=1, drafts_per_step=drafts)
    manager = KVCacheManager(config, max_requests=1, num_blocks=1)
    plan = prepare_forward(manager, [manager.open_request()], [0], [num_tokens])
    (inputs,) = model_projections(config, num_tokens, seed=0, dtype=torch.bfloat16)
    writes = LayerWrites.of(inputs, model_weights(config, seed=0)[0])
    handle = manager.acquire(0, plan)
    flush_write.write_layer(writes, handle.memory, handle.tokens, launch=launch)
    for name, kernel in kernels.items():
        setattr(flush_write, name, kernel)
    return launches


def record_rope() -> list:
    """Record the launch that makes a token's RoPE rows, at V4-Flash's width."""
    launches: list = []
    kernel = rope._rope_kernel
    rope._rope_kernel = Recorder(kernel, launches)
    manager = KVCacheManager(CacheConfig.v4_flash(), max_requests=1, num_blocks=1)
    rope.make_rope(manager.device_memory.memories[0], torch.zeros(1, dtype=torch.int32))
    rope._rope_kernel = kernel
    return launches


def record_gathers(kv_format: str, ratio: int = 4) -> list:
    """Record the launches of a layer's gathers: windows of steps and chunks, rows, entries."""
    launches: list = []
    kernel = gather._gather_kernel
    gather._gather_kernel = Recorder(kernel, launches)
    config = layer_config(ratio, kv_format=kv_format)
    manager = KVCacheManager(config, max_requests=1, num_blocks=1)
    for num_tokens in (1, 5):
        slot = manager.open_request()
        handle = manager.acquire(0, prepare_forward(manager, [slot], [0], [num_tokens]))
        gather.gather_swa_kv(handle.memory, handle.tokens)
        handle.plan.cancel()
        manager.free_request(slot)
    gather.gather_compressed_kv(handle.memory, torch.zeros(1, 512, dtype=torch.int64))
    gather.gather_all_compressed_kv(handle.memory, handle.plan.tokens, max_entries=1)
    gather._gather_kernel = kernel
    return launches


def record_checkpoints(ratio: int) -> list:
    """Record the launches that checkpoint a layer's rows at a block boundary."""
    launches: list = []
    names = ("_checkpoint_window_kernel", "_checkpoint_tails_kernel")
    kernels = {name: getattr(checkpoint, name) for name in names}
    for name, kernel in kernels.items():
        setattr(checkpoint, name, Recorder(kernel, launches))
    config = layer_config(ratio)
    manager = KVCacheManager(config, max_requests=1, num_blocks=1, num_checkpoints=1)
    plan = prepare_forward(manager, [manager.open_request()], [0], [3])
    (inputs,) = model_projections(config, 3, seed=0, dtype=torch.bfloat16)
    writes = LayerWrites.of(inputs, model_weights(config, seed=0)[0])
    points = torch.zeros(1, 3, dtype=torch.int32)
    boundaries = CheckpointPoints(points, manager.device_memory.checkpoints)
    memory = manager.acquire(0, plan).memory
    checkpoint.checkpoint_window(boundaries, memory, plan.tokens)
    checkpoint.checkpoint_tails(boundaries, memory, plan.tokens, writes)
    for name, kernel in kernels.items():
        setattr(checkpoint, name, kernel)
    return launches


def record_acceptance() -> list:
    """Record the launch that moves a step back by rejected tokens."""
    launches: list = []
    kernel = acceptance._accept_kernel
    acceptance._accept_kernel = Recorder(kernel, launches)
    config = CacheConfig.v4_flash(compress_ratios=(0,))
    buffers = KVCacheManager(config, max_requests=1, num_blocks=1).device_memory.plan_buffers
    acceptance.apply_accepted(buffers.acceptance(1), buffers.token_map(1, 1, 0, 1))
    acceptance._accept_kernel = kernel
    return launches


def record_index(index_format: str, *, length: int, num_tokens: int = 1, heads: int = 64) -> list:
    """Record the launches that select entries of a request of that length, at V4-Flash's width."""
    launches: list = []
    owners = [(indexer, "_query_kernel"), (indexer, "_score_kernel"), (topk, "_group_kernel"),
              (topk, "_topk_kernel"), (chunk_scores, "_operand_kernel"),
              (chunk_scores, "_rescore_kernel"), (index_scores, "_score_kernel")]  # fmt: skip
    kernels = [getattr(module, name) for module, name in owners]
    for (module, name), kernel in zip(owners, kernels, strict=True):
        setattr(module, name, Recorder(kernel, launches))
    config = CacheConfig.v4_flash(
        compress_ratios=(4,), num_query_heads=1, index_format=index_format, index_num_heads=heads
    )
    manager = KVCacheManager(
        config, max_requests=1, num_blocks=1, max_forward_tokens=num_tokens,
        max_request_tokens=length,
    )  # fmt: skip
    plan = prepare_forward(manager, [manager.open_request()], [0], [num_tokens])
    handle = manager.acquire(0, plan)
    (inputs,) = model_projections(config, num_tokens, seed=0, dtype=torch.bfloat16)
    indexer.select_entries(
        inputs.indexer.query, inputs.indexer.head_weights, handle.memory, handle.tokens,
        max_entries=length // 4,
    )  # fmt: skip
    for (module, name), kernel in zip(owners, kernels, strict=True):
        setattr(module, name, kernel)
    return launches


def record_candidates(*, length: int, num_tokens: int = 1) -> list:
    """Record the launches that publish candidate blocks and choose among them, at V4.1's width."""
    launches: list = []
    owners = [(indexer, "_query_kernel"), (indexer, "_score_kernel"), (topk, "_group_kernel"),
              (topk, "_topk_kernel"), (candidates, "_largest_kernel"),
              (candidates, "_score_listed_kernel")]  # fmt: skip
    kernels = [getattr(module, name) for module, name in owners]
    for (module, name), kernel in zip(owners, kernels, strict=True):
        setattr(module, name, Recorder(kernel, launches))
    config = layer_config(
        1, compress_ratios=(1, 1), index_source_layer_ids=(0, 1), candidate_source_layer_id=0
    )
    manager = KVCacheManager(
        config, max_requests=1, num_blocks=1, max_forward_tokens=num_tokens,
        max_request_tokens=length,
    )  # fmt: skip
    plan = prepare_forward(manager, [manager.open_request()], [0], [num_tokens])
    blocks = None
    for idx, inputs in enumerate(model_projections(config, num_tokens, seed=0)):
        memory, query = manager.acquire(idx, plan).memory, inputs.indexer.query.bfloat16()
        blocks = indexer.select_entries(
            query, inputs.indexer.head_weights, memory, plan.tokens, max_entries=length,
            candidates=blocks,
        ).blocks  # fmt: skip
    for (module, name), kernel in zip(owners, kernels, strict=True):
        setattr(module, name, kernel)
    return launches


def record_attention(case: AttentionCase) -> list:
    """Record the launches of one token, which is split over programs, or of a chunk.

    A chunk has room for dense rows, and then none. One token of 64 heads has programs of 64 heads,
    and of 8 where there are enough multiprocessors.
    """
    launches: list = []
    owners = [(attention, "_attend_kernel"), (attention, "_combine_kernel"),
              (hopper, "_attend_kernel"), (hopper, "_attend_chunk_kernel"),
              (dense_rows, "_dense_rows_kernel"),
              (dense_attention, "_attend_dense_kernel")]  # fmt: skip
    kernels = [getattr(module, name) for module, name in owners]
    for (module, name), kernel in zip(owners, kernels, strict=True):
        setattr(module, name, Recorder(kernel, launches))
    config = layer_config(case.ratio, num_query_heads=case.heads, kv_format=case.kv_format)
    num_tokens = 40 if case.is_chunk else 1
    manager = KVCacheManager(config, max_requests=1, num_blocks=1)
    plan = prepare_forward(manager, [manager.open_request()], [0], [num_tokens])
    handle = manager.acquire(0, plan)
    query = torch.zeros(num_tokens, case.heads, 512, dtype=torch.bfloat16)
    rows = torch.zeros(num_tokens, 512, dtype=torch.int64) if 0 < case.ratio <= 4 else None
    memories = [handle.memory, handle.memory._replace(index_scratch=torch.empty(0))]
    is_cut = case.heads == 64 and case.kv_format in ("fp8", "fp8_32")

    short = attention.combine_launch(torch.device("cpu"))._replace(whole_rows=64)
    splitting = {"count_joining": lambda *_: int(case.is_chunk), "combine_launch": lambda *_: short}

    def attend(memory):
        with mock.patch.multiple(attention, **splitting) if case.is_invariant else nullcontext():
            call(memory)

    def call(memory):
        attention.attend(
            query, torch.zeros(case.heads), memory, rows, handle.tokens, max_entries=1,
            is_query_raw=case.is_raw, batch_invariant=case.is_invariant,
        )  # fmt: skip

    for memory in memories if is_cut and case.is_chunk and not case.is_invariant else memories[:1]:
        attend(memory)
    if is_cut and not case.is_chunk:
        with mock.patch.object(attention, "num_multiprocessors", lambda device: 132):
            attend(handle.memory)
    for (module, name), kernel in zip(owners, kernels, strict=True):
        setattr(module, name, kernel)
    return launches


def resources(kernel, arguments: dict, arch: int) -> dict:
    """Compile as the launcher would; return registers, spilled bytes and shared memory.

    Channel widths say in which order each product adds its channels. Arguments have the launcher's
    hints of what is a multiple of 16.
    """
    signature, constants, attributes = {}, {}, {}
    for position, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = arguments[name]
        if parameter.is_constexpr:
            signature[name], constants[(position,)] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            dtype = TYPES[value.base.dtype]
            signature[name] = f"tensordesc<{dtype}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and not parameter.do_not_specialize and value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    options = {
        name: arguments[name]
        for name in ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")
        if name in arguments
    }
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    with redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    can_wait = arch >= 90  # for a launch that it begins beside
    assert can_wait or not arguments.get("launch_pdl"), kernel.__name__
    assert can_wait or "griddepcontrol" not in compiled.asm["ptx"], kernel.__name__
    (registers,) = re.findall(r"Used (\d+) registers", log.getvalue())
    (stores,) = re.findall(r"(\d+) bytes spill stores", log.getvalue())
    (loads,) = re.findall(r"(\d+) bytes spill loads", log.getvalue())
    return {
        "registers": int(registers), "spilled_bytes": int(stores) + int(loads),
        "shared_bytes": compiled.metadata.shared,
        "channel_widths": re.findall(r"tt\.dot .*?kWidth = (\d+)", compiled.asm["ttgir"]),
    }  # fmt: skip


def pretend(arch: int) -> None:
    """Look launches up as if every device were of that architecture."""
    launch_module.architecture = lambda device: f"sm_{arch}"
    primitives.current_target = lambda: GPUTarget("cuda", arch, 32)
    primitives.current_target.__triton_builtin__ = True
    launch_module.work_steps.cache_clear()
    launch_module.starts_early.cache_clear()


def record_all(arch: int) -> Iterator[tuple[str, list]]:
    """Record every launch, with what it is for."""
    steps = architecture_steps(f"sm_{arch}")
    for ratio, kind in itertools.product((0, 4, 128), KINDS):
        for launch in dict.fromkeys(s.launch for s in steps[work_name(ratio, kind)]):
            yield f"{work_name(ratio, kind)} {launch}", record(ratio, kind, launch)
    for ratio, kind in itertools.product(SHARED_RATIOS, KINDS[::2]):
        (step_launch, *_) = steps[work_name(ratio, kind)]
        yield f"ratio {ratio} {kind}", record(ratio, kind, step_launch.launch)
    yield "rope", record_rope()
    for kv_format in KV_FORMATS:
        yield f"gathers of {kv_format}", record_gathers(kv_format)
    yield "gathers of fp8_32 and nvfp4_16", record_gathers("fp8_32", 2)
    for ratio in (1, 4):
        yield f"checkpoints of ratio {ratio}", record_checkpoints(ratio)
    yield "candidates", record_candidates(length=2**20)
    yield "acceptance", record_acceptance()
    for index_format in INDEX_FORMATS:
        yield index_format, record_index(index_format, length=2**14)[:2]
    for index_format, heads in itertools.product(chunk_scores.DTYPES, chunk_scores.HEADS):
        names = ("_operand_kernel", "_score_kernel", "_rescore_kernel")
        launches = []
        for num_tokens in (8, 64):  # without room for operands, and with it
            launches += record_index(index_format, length=2**14, num_tokens=num_tokens, heads=heads)
        first = {launch[0]: launch for launch in launches if launch[0].__name__ in names}
        yield f"{index_format} chunk of {heads} heads", list(first.values())
        launches = record_index(index_format, length=2**17, num_tokens=64, heads=heads)
        yield f"{index_format} tops of {heads} heads", [x for x in launches if x[0].is_gluon()][:1]
    for length in (2**14, 2**18):  # of one part, and of several
        yield f"{length} tokens", record_index("fp8", length=length)[2:]
    for case in ATTENTION:
        yield str(tuple(case)), record_attention(case)


def main(arch: int, step: int) -> None:
    """Compile each step-th launch of every kernel."""
    pretend(arch)
    counts: Counter[object] = Counter()
    for kind, launches in record_all(arch):
        for kernel, arguments in launches:
            if counts[kernel] % step == 0:
                report([(kernel, arguments)], kind, arch)
            counts[kernel] += 1


def report(launches: list, kind: str, arch: int) -> None:
    for kernel, arguments in launches:
        used = resources(kernel, arguments, arch)
        name = f"gluon{kernel.__name__}" if kernel.is_gluon() else kernel.__name__
        print(json.dumps({"kernel": name, "kind": kind, **used}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
