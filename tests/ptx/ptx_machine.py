"""Runs PTX on the CPU, so that what Triton's compiler made of a kernel can be held to the truth without a GPU.

A block's threads go through each instruction together, blocks one after the other. Programs without races mean the same
then, and races by memory outside of a block's own are an error here (ptx_races.py); so are branches that threads of a
block take apart, of which Triton makes none. Meanings are those of the PTX ISA (NVIDIA, version 9.0).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from ptx_matrices import WARP, MatrixInstructions
from ptx_memory import SHARED_BASE, Memory
from ptx_numbers import from_16_bit, names, to_16_bit
from ptx_races import Races

_UNSIGNED = {bits // 8: np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)}
_DTYPES: dict[str, np.dtype[Any]] = {
    **{f"b{8 * size}": dtype for size, dtype in _UNSIGNED.items()},
    **{f"u{8 * size}": dtype for size, dtype in _UNSIGNED.items()},
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    "bf16": np.dtype(np.uint16),
    "bf16x2": np.dtype(np.uint32),
    "f16x2": np.dtype(np.uint32),
    "s16x2": np.dtype(np.uint32),
    "u16x2": np.dtype(np.uint32),
    "pred": np.dtype(np.bool_),
}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    # Also where one is no number.
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": lambda a, b: ~(a == b),
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}


class Program:
    """A module's one kernel."""

    def __init__(self, text: str) -> None:
        body = text[text.index(".entry") :]
        self.num_params = len(re.findall(r"\.param [^,)]*_param_\d+", body[: body.index("{")]))
        self.instructions: list[tuple[str | None, str, list[str], list[str]]] = []  # guard, name, kinds, operands
        self.labels: dict[str, int] = {}
        self.constants: dict[tuple[str, str], np.ndarray] = {}  # by operand and kind, [threads]
        for line in re.sub(r"//[^\n]*", "", body[body.index("{") + 1 :]).splitlines():
            self._add_line(line.strip())

    def _add_line(self, line: str) -> None:
        label = re.match(r"([$\w]+):$", line)
        if label:
            self.labels[label[1]] = len(self.instructions)
        if not line.endswith(";") or line.startswith("."):
            return
        found = re.match(r"(?:@(!?%p\w+)\s+)?([a-z][\w.:]*)\s*(.*);$", line)
        assert found, line
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", found[3])
        name, *kinds = found[2].split(".")
        self.instructions.append((found[1], name, kinds, operands))


class Block(MatrixInstructions):
    """A block's threads and their registers."""

    def __init__(
        self, program: Program, params: list[np.ndarray], memory: Memory, races: Races, num_threads: int
    ) -> None:
        self._program, self._params, self._memory, self._races = program, params, memory, races
        self._threads = np.arange(num_threads, dtype=np.uint32)
        self._registers: dict[str, np.ndarray] = {}
        self._special: dict[str, np.ndarray] = {}

    def run(self, place: tuple[int, ...], grid: tuple[int, ...]) -> None:
        """Run the block of this place in the grid."""
        # Another block's leavings mean nothing: NaN, or a number too large for an index.
        self._memory.shared.fill(0xFF)
        self._races.begin_block()
        self._special = {"%tid.x": self._threads, "%laneid": self._threads % WARP}
        for axis, (own, size) in zip("xyz", zip(place, grid, strict=True), strict=True):
            self._special[f"%ctaid.{axis}"] = np.full_like(self._threads, own)
            self._special[f"%nctaid.{axis}"] = np.full_like(self._threads, size)
        position = 0
        with np.errstate(all="ignore"):
            while position < len(self._program.instructions):
                guard, name, kinds, operands = self._program.instructions[position]
                mask = None if guard is None else self._predicate(guard)
                position += 1
                if name == "ret" and (mask is None or mask.all()):
                    return
                if name in ("bra", "ret"):
                    if mask is None or mask.any():
                        assert mask is None or mask.all(), f"threads part at {name} {operands}"
                        position = self._program.labels[operands[0]]
                elif name not in ("membar", "fence"):
                    self._do(name, kinds, operands, mask)

    def _do(self, name: str, kinds: list[str], operands: list[str], mask: np.ndarray | None) -> None:
        try:
            getattr(self, f"_{name}")(kinds, operands, mask)
        except Exception as error:
            raise RuntimeError(f"at {'.'.join([name, *kinds])} {', '.join(operands)}") from error

    def _predicate(self, name: str) -> np.ndarray:
        """bool [threads]."""
        value = self._registers[name.lstrip("!")]
        return ~value if name.startswith("!") else value

    def _get(self, operand: str, kind: str) -> np.ndarray:
        """[threads]: a register, a vector of two that is packed, a special register or a constant."""
        dtype = _DTYPES[kind]
        value = self._registers.get(operand)
        if value is not None:
            if value.dtype.itemsize > dtype.itemsize:
                value = value.astype(_UNSIGNED[dtype.itemsize])  # the low bits
            return value if value.dtype == dtype else value.view(dtype)
        if operand.startswith("{"):
            parts = [self._get(part, f"b{8 * dtype.itemsize // 2}") for part in names(operand)]
            return np.stack(parts, axis=1).view(dtype)[:, 0]
        if operand in self._special:
            return self._special[operand].view(dtype)
        constant = self._program.constants.get((operand, kind))
        if constant is None:
            constant = self._program.constants[operand, kind] = self._constant(operand, dtype)
            constant.flags.writeable = False
        return constant

    def _constant(self, operand: str, dtype: np.dtype[Any]) -> np.ndarray:
        if operand.startswith("0f"):
            return np.full(len(self._threads), int(operand[2:], 16), dtype=np.uint32).view(dtype)
        if operand == "global_smem":
            return np.full(len(self._threads), SHARED_BASE, dtype=np.uint64).astype(dtype)
        number = int(operand.rstrip("U"), 0) & (2 ** (8 * dtype.itemsize) - 1)
        return np.full(len(self._threads), number).astype(_UNSIGNED[dtype.itemsize]).view(dtype)

    def _put(self, operand: str, value: np.ndarray, mask: np.ndarray | None) -> None:
        if operand.startswith("{"):
            half = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize // 2}").reshape(len(value), 2)
            for column, part in enumerate(names(operand)):
                self._put(part, np.ascontiguousarray(half[:, column]), mask)
            return
        if value.dtype != np.bool_:
            value = np.ascontiguousarray(value).view(_UNSIGNED[value.dtype.itemsize])
        if mask is not None and not mask.all():
            before = self._registers.get(operand, np.zeros_like(value))
            value = np.where(mask, value, before)
        if operand != "_":
            self._registers[operand] = value

    def _binary(self, kinds: list[str], operands: list[str], mask: Any, compute: Callable[..., Any]) -> None:
        values, kind = [self._get(each, kinds[-1]) for each in operands[1:]], kinds[-1]
        if kind in ("bf16", "bf16x2", "f16x2"):
            wide = [from_16_bit(value, kind) for value in values]
            result = to_16_bit(np.asarray(compute(*wide), dtype=np.float32), kind).view(_DTYPES[kind]).reshape(-1)
        elif kind in ("s16x2", "u16x2"):
            halves = [np.ascontiguousarray(value).view(_DTYPES[kind[:3]]) for value in values]
            result = np.asarray(compute(*halves), dtype=_DTYPES[kind[:3]]).view(np.uint32)
        else:
            result = np.asarray(compute(*values), dtype=_DTYPES[kind])
        self._put(operands[0], result, mask)

    def _add(self, *call: Any) -> None:
        self._binary(*call, np.add)

    def _sub(self, *call: Any) -> None:
        self._binary(*call, np.subtract)

    def _and(self, *call: Any) -> None:
        self._binary(*call, np.bitwise_and)

    def _or(self, *call: Any) -> None:
        self._binary(*call, np.bitwise_or)

    def _xor(self, *call: Any) -> None:
        self._binary(*call, np.bitwise_xor)

    def _not(self, *call: Any) -> None:
        self._binary(*call, np.invert)

    def _neg(self, *call: Any) -> None:
        self._binary(*call, np.negative)

    def _abs(self, *call: Any) -> None:
        self._binary(*call, np.abs)

    def _max(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        self._binary(kinds, operands, mask, np.maximum if "NaN" in kinds else np.fmax)

    def _min(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        self._binary(kinds, operands, mask, np.minimum if "NaN" in kinds else np.fmin)

    def _div(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        if kinds[-1].startswith("f"):
            self._binary(kinds, operands, mask, np.divide)
        else:
            # Towards 0; float64 holds numbers of 32 bits.
            assert kinds[-1] in ("s32", "u32"), kinds
            self._binary(kinds, operands, mask, lambda a, b: np.trunc(a.astype(np.float64) / b))

    def _rem(self, *call: Any) -> None:
        self._binary(*call, np.fmod)

    def _shl(self, *call: Any) -> None:
        self._shift(*call, np.left_shift)

    def _shr(self, *call: Any) -> None:
        self._shift(*call, np.right_shift)

    def _shift(self, kinds: list[str], operands: list[str], mask: Any, shift: Callable[..., Any]) -> None:
        value, count = self._get(operands[1], kinds[-1]), self._get(operands[2], "u32")
        bits = 8 * value.dtype.itemsize
        shifted = shift(value, np.minimum(count, bits - 1).astype(value.dtype))
        # By all bits and more; of a negative number that goes down its sign is left, as by one bit less.
        far = shifted if shift is np.right_shift and kinds[-1][0] == "s" else 0
        self._put(operands[0], np.where(count < bits, shifted, far).astype(value.dtype), mask)

    def _bfe(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        value, first, count = (self._get(each, "u32").astype(np.int64) for each in operands[1:])
        kept = (value >> first) & ((1 << count) - 1)
        if kinds == ["s32"]:
            kept -= np.where(kept >> (count - 1), 1 << count, 0)
        self._put(operands[0], kept.astype(_DTYPES[kinds[0]]), mask)

    def _popc(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        bits = np.unpackbits(np.ascontiguousarray(self._get(operands[1], "b32")).view(np.uint8).reshape(-1, 4), axis=1)
        self._put(operands[0], bits.sum(axis=1).astype(np.uint32), mask)

    def _prmt(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        assert kinds == ["b32"], kinds
        pair = np.stack([self._get(each, "b32") for each in operands[1:3]], axis=1).view(np.uint8)
        selector = self._get(operands[3], "b32")
        chosen = np.zeros((len(selector), 4), dtype=np.uint8)
        for place in range(4):
            which = (selector >> np.uint32(4 * place)) & np.uint32(15)
            byte = np.take_along_axis(pair, (which & np.uint32(7)).astype(np.int64)[:, None], axis=1)[:, 0]
            chosen[:, place] = np.where(which & np.uint32(8), np.where(byte & 128, 255, 0), byte)
        self._put(operands[0], chosen.view(np.uint32)[:, 0], mask)

    def _mul(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        if kinds[0] == "wide":
            self._put(operands[0], self._wide(kinds[-1], operands[1], operands[2]), mask)
        elif kinds[0] == "hi":
            wide = self._wide(kinds[-1], operands[1], operands[2])
            high = wide >> np.array(wide.dtype.itemsize * 4, dtype=wide.dtype)
            self._put(operands[0], high.astype(_DTYPES[kinds[-1]]), mask)
        else:
            self._binary(kinds, operands, mask, np.multiply)

    def _wide(self, kind: str, first: str, second: str) -> np.ndarray:
        wide = _DTYPES[f"{kind[0]}{2 * int(kind[1:])}"]
        return self._get(first, kind).astype(wide) * self._get(second, kind).astype(wide)

    def _mad(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        if kinds[0] == "wide":
            wide = self._wide(kinds[-1], operands[1], operands[2])
            self._put(operands[0], wide + self._get(operands[3], f"{kinds[-1][0]}64"), mask)
        else:
            self._binary(kinds, operands, mask, lambda a, b, c: a * b + c)

    def _fma(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        # The product is exact in float64; rounding its sum twice is once in 2**29 another rounding.
        self._binary(kinds, operands, mask, lambda a, b, c: a.astype(np.float64) * b + c)

    def _ex2(self, *call: Any) -> None:
        self._binary(*call, np.exp2)

    def _lg2(self, *call: Any) -> None:
        self._binary(*call, np.log2)

    def _sqrt(self, *call: Any) -> None:
        self._binary(*call, np.sqrt)

    def _rsqrt(self, *call: Any) -> None:
        self._binary(*call, lambda a: 1 / np.sqrt(a.astype(np.float64)))

    def _rcp(self, *call: Any) -> None:
        self._binary(*call, lambda a: 1 / a.astype(np.float64))

    def _setp(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        first, second = (self._get(each, kinds[-1]) for each in operands[1:3])
        result = _COMPARE[kinds[0]](first, second)
        if len(operands) == 4:
            other = self._predicate(operands[3])
            result = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[kinds[1]](result, other)
        self._put(operands[0], result, mask)

    def _set(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        assert kinds[-1] in ("bf16x2", "f16x2") and kinds[-2] == "u32", kinds
        is_true = _COMPARE[kinds[0]](*(from_16_bit(self._get(each, kinds[-1]), kinds[-1]) for each in operands[1:3]))
        self._put(operands[0], np.where(is_true, 0xFFFF, 0).astype(np.uint16).view(np.uint32)[:, 0], mask)

    def _selp(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        chosen = self._predicate(operands[3])
        first, second = (self._get(each, kinds[-1]) for each in operands[1:3])
        self._put(operands[0], np.where(chosen, first, second).astype(first.dtype), mask)

    def _mov(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        self._put(operands[0], self._get(operands[1], kinds[-1]), mask)

    def _cvt(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        target, source = kinds[-2:]
        if target in ("bf16x2", "f16x2"):
            # The first operand becomes the high half.
            halves = [to_16_bit(self._get(each, source), target[:-2]) for each in reversed(operands[1:3])]
            self._put(operands[0], np.stack(halves, axis=1).view(np.uint32)[:, 0], mask)
            return
        value = self._get(operands[1], source)
        if source == "bf16":
            value = from_16_bit(value, source)[:, 0]
        if target in ("bf16", "f16"):
            self._put(operands[0], to_16_bit(value, target), mask)
            return
        if source[0] in "fb" and target[0] in "us":
            rounded = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[kinds[0]](value)
            limits = np.iinfo(_DTYPES[target])
            value = np.nan_to_num(np.clip(rounded.astype(np.float64), limits.min, limits.max))
        self._put(operands[0], value.astype(_DTYPES[target]), mask)

    def _cvta(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        self._put(operands[0], self._get(operands[1], "u64"), mask)

    def _address(self, operand: str) -> np.ndarray:
        base, _, offset = operand[1:-1].replace(" ", "").partition("+")
        value = self._registers.get(base)
        if value is None:
            address = self._get(base, "u64")
        else:
            address = value.astype(np.uint64)
            if value.dtype == np.uint32:
                address |= np.uint64(SHARED_BASE)
        return address + np.array(int(offset or 0)).astype(np.int64).view(np.uint64)

    def _ld(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        dtype = np.dtype(_DTYPES[kinds[-1]])
        if kinds[0] == "param":
            index = int(operands[1][1:-1].rpartition("_")[2])
            self._put_loaded(operands[0], np.repeat(self._params[index].view(dtype), len(self._threads)), mask)
            return
        registers = names(operands[0])
        loaded = np.zeros((len(self._threads), len(registers)), dtype=dtype)
        active = np.ones(len(self._threads), dtype=bool) if mask is None else mask
        if active.any():
            loaded[active] = self._read(self._address(operands[1]), active, loaded[0].nbytes).view(dtype)
        for column, name in enumerate(registers):
            self._put_loaded(name, np.ascontiguousarray(loaded[:, column]), mask)

    def _put_loaded(self, name: str, value: np.ndarray, mask: np.ndarray | None) -> None:
        """Into a register that may be wider, as a number of the same value."""
        digits = {"%rs": 2, "%r": 4, "%rd": 8}.get(name.rstrip("0123456789"), value.dtype.itemsize)
        if digits > value.dtype.itemsize:
            value = value.astype(f"{value.dtype.kind}{digits}")
        self._put(name, value, mask)

    def _st(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        registers = names(operands[1])
        values = np.stack([self._get(name, kinds[-1]) for name in registers], axis=1)
        active = np.ones(len(self._threads), dtype=bool) if mask is None else mask
        if active.any():
            raw = np.ascontiguousarray(values[active]).view(np.uint8)
            self._write(self._address(operands[0]), active, raw)

    def _atom(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        assert kinds[-2] == "add", kinds
        values, addresses = self._get(operands[2], kinds[-1]), self._address(operands[1])
        before = np.zeros_like(values)
        for thread in np.flatnonzero(np.ones(len(values), dtype=bool) if mask is None else mask):
            piece, cells = self._memory.at(addresses[thread : thread + 1], values.dtype.itemsize)
            self._races.atomic(piece, cells[0], thread, synchronises="acq_rel" in kinds)
            cell = piece[cells[0]].view(values.dtype)
            before[thread] = cell[0]
            piece[cells[0]] = (cell + values[thread]).view(np.uint8)
        self._put(operands[0], before, mask)

    def _red(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        self._atom(kinds, ["_", *operands], mask)

    def _shfl(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        assert kinds[:1] == ["sync"] and kinds[1] in ("bfly", "idx", "up"), kinds
        value, other = self._get(operands[1], "b32"), self._get(operands[2], "u32")
        lane, first = self._threads % WARP, self._threads // WARP * WARP
        if kinds[1] == "up":
            # A lane without one so far below it keeps its own value.
            assert operands[3] == "0", operands
            source = np.where(lane >= other, lane - other, lane)
        else:
            source = lane ^ other if kinds[1] == "bfly" else other % WARP
        self._put(operands[0].partition("|")[0], value[first + source], mask)

    def _redux(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        value = self._get(operands[1], kinds[-1]).reshape(-1, WARP)
        reduced = {"add": np.add, "min": np.minimum, "max": np.maximum}[kinds[1]].reduce(
            value, axis=1, dtype=value.dtype
        )
        self._put(operands[0], np.repeat(reduced, WARP), mask)

    def _vote(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        value = self._predicate(operands[1]).reshape(-1, WARP)
        if kinds[1] == "ballot":
            bits = (value * (1 << np.arange(WARP, dtype=np.uint64))).sum(axis=1).astype(np.uint32)
            self._put(operands[0], np.repeat(bits, WARP), mask)
        else:
            self._put(operands[0], np.repeat({"any": np.any, "all": np.all}[kinds[1]](value, axis=1), WARP), mask)

    def _cp(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        """Done at once, so there is nothing to wait for."""
        if kinds[1] in ("commit_group", "wait_group", "wait_all"):
            return
        size = int(operands[2], 0)
        active = np.ones(len(self._threads), dtype=bool) if mask is None else mask.copy()
        read = self._get(operands[3], "u32") if len(operands) > 3 else np.full(len(self._threads), size)
        assert np.isin(read, (0, size)).all(), "copies of a part"
        data = np.zeros((len(self._threads), size), dtype=np.uint8)
        is_read = active & (read == size)
        if is_read.any():
            data[is_read] = self._read(self._address(operands[1]), is_read, size)
        if active.any():
            self._write(self._address(operands[0]), active, data[active])

    def _bar(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        assert mask is None and (kinds == ["warp", "sync"] or (kinds == ["sync"] and operands == ["0"])), operands
        if kinds == ["sync"] or len(self._threads) == WARP:
            self._races.barrier()

    def _read(self, addresses: np.ndarray, active: np.ndarray, num_bytes: int) -> np.ndarray:
        """uint8 [active threads, num_bytes]."""
        piece, cells = self._memory.at(addresses[active], num_bytes)
        if piece is not self._memory.shared:
            self._races.read(piece, cells, self._threads[active])
        return piece[cells]

    def _write(self, addresses: np.ndarray, active: np.ndarray, data: np.ndarray) -> None:
        """Data is uint8 [active threads, bytes]."""
        piece, cells = self._memory.at(addresses[active], data.shape[1])
        piece[cells] = data
        if piece is not self._memory.shared:
            self._races.write(piece, cells, self._threads[active], data)


def run(text: str, params: list[np.ndarray], memory: Memory, grid: tuple[int, ...], num_threads: int) -> None:
    """Run a kernel.

    Args:
        text: its PTX.
        params: of each parameter its one value; those that Triton adds come after them, and are 0.

    Raises:
        RuntimeError: an access outside of the memory, or one that races with another thread's; it names the
            instruction.
    """
    program = Program(text)
    zeros = [np.zeros(1, dtype=np.uint64)] * (program.num_params - len(params))
    races = Races(math.prod(grid))
    for place in product(*(range(size) for size in reversed(grid))):
        Block(program, [*params, *zeros], memory, races, num_threads).run(place[::-1], grid)
