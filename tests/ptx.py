"""Execute the PTX of inline assembly on arrays: instructions without branches or memory."""

import re

import numpy as np
import torch


def execute(text: str, inputs: list[np.ndarray], *, num_outputs: int) -> list[np.ndarray]:
    """Run instructions on bits, uint32 or 64-bit addresses; return the outputs' bits.

    `$n` is the nth of the outputs, then of the inputs.
    """
    registers = {f"${num_outputs + nth}": bits for nth, bits in enumerate(inputs)}
    shape = inputs[0].shape
    for line in re.sub(r"^\s*{|}\s*$", "", text.strip()).split(";"):
        line = line.strip()
        if line and not line.startswith(".reg"):
            name, _, operands = line.partition(" ")
            _run(name, _operands(operands), registers, shape)
    return [np.broadcast_to(registers[f"${nth}"], shape).copy() for nth in range(num_outputs)]


def _operands(text: str) -> list[str | tuple[str, ...]]:
    found = re.findall(r"{[^}]*}|[^,]+", text)
    return [
        tuple(part.strip() for part in each.strip()[1:-1].split(","))
        if each.strip().startswith("{")
        else each.strip()
        for each in found
        if each.strip()
    ]


def _run(name: str, operands: list, registers: dict, shape: tuple[int, ...]) -> None:
    if name.startswith("prefetch"):
        return

    def read(operand) -> np.ndarray:
        if isinstance(operand, tuple):
            low, high = (read(part) & 0xFFFF for part in operand)
            return low | high << np.uint32(16)
        if operand in registers:
            return registers[operand]
        return np.full(shape, int(operand, 0) & 0xFFFFFFFF, np.uint32)

    target, sources = operands[0], operands[1:]
    result = INSTRUCTIONS[name](*map(read, sources))
    if isinstance(target, tuple):
        registers[target[0]], registers[target[1]] = result & 0xFFFF, result >> np.uint32(16)
    else:
        registers[target] = result


def _floats(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits, np.uint32).view(np.float32)


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def _halves(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """BF16 numbers of words, the low one first."""
    return _floats(bits << np.uint32(16)), _floats(bits & np.uint32(0xFFFF0000))


def _pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Words of two fp32 numbers rounded to BF16."""
    words = [
        torch.from_numpy(np.array(each)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        for each in (low, high)
    ]
    return words[0].astype(np.uint32) | words[1].astype(np.uint32) << np.uint32(16)


def _multiply_pairs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return _pair(*(x * y for x, y in zip(_halves(a), _halves(b), strict=True)))


def _e4m3_to_f16(codes: np.ndarray) -> np.ndarray:
    """Words of two FP16 numbers from two E4M3 codes in the low half."""
    halves = []
    for shift in (0, 8):
        byte = (codes >> np.uint32(shift) & 0xFF).astype(np.uint8)
        values = torch.from_numpy(byte).view(torch.float8_e4m3fn).half()
        halves.append(values.view(torch.int16).numpy().view(np.uint16).astype(np.uint32))
    return halves[0] | halves[1] << np.uint32(16)


def _f16_to_f32(bits: np.ndarray) -> np.ndarray:
    return _bits((bits & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32))


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt: each byte of the result is one of eight, or its sign repeated."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for nth in range(4):
        choice = selector >> np.uint32(4 * nth) & np.uint32(0xF)
        byte = (both >> (choice & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32)
        byte &= np.uint32(0xFF)
        byte = np.where(choice & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype(np.uint32)
        result |= byte << np.uint32(8 * nth)
    return result


def _by_table(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """lop3: any function of three bits."""
    result, bits = np.zeros_like(a), int(table.flat[0])
    for nth in range(8):
        if bits >> nth & 1:
            terms = [x if nth >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            result |= terms[0] & terms[1] & terms[2]
    return result


def _shuffle(values: np.ndarray, lane_bit: np.ndarray, _clamp, _mask) -> np.ndarray:
    """shfl.bfly over the last axis."""
    (bit,) = np.unique(lane_bit)
    lanes = np.arange(values.shape[-1]) ^ int(bit)
    return values[..., lanes]


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": _by_table,
    "prmt.b32": _permute,
    "cvt.u16.u32": lambda a: a & np.uint32(0xFFFF),
    "cvt.rn.f16x2.e4m3x2": _e4m3_to_f16,
    "cvt.f32.f16": _f16_to_f32,
    "cvt.rn.bf16x2.f32": lambda high, low: _pair(_floats(low), _floats(high)),
    "mul.rn.bf16x2": _multiply_pairs,
    "mul.rn.f32": lambda a, b: _bits(_floats(a) * _floats(b)),
    "shfl.sync.bfly.b32": _shuffle,
}
