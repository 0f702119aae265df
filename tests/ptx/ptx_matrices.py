"""Matrix instructions of the machine that runs PTX: ldmatrix, stmatrix, mma, and Hopper's wgmma."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from ptx_memory import Memory
from ptx_numbers import from_16_bit, names

WARP = 32


class MatrixInstructions(ABC):
    """A part of Block, which knows the registers."""

    _memory: Memory
    _threads: np.ndarray

    @abstractmethod
    def _get(self, operand: str, kind: str) -> np.ndarray: ...

    @abstractmethod
    def _put(self, operand: str, value: np.ndarray, mask: np.ndarray | None) -> None: ...

    @abstractmethod
    def _address(self, operand: str) -> np.ndarray: ...

    @abstractmethod
    def _predicate(self, name: str) -> np.ndarray: ...

    def _rows_of_matrices(self, operand: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The memory that holds the warps' 8x8 matrices of 16 bits, and where their rows are: [warps, count, 8, 16]."""
        addresses = self._address(operand).reshape(-1, WARP)[:, : 8 * count].reshape(-1, count, 8)
        return self._memory.at(addresses, 16)

    def _ldmatrix(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        assert mask is None and kinds[2] == "m8n8", kinds
        registers = names(operands[0])
        piece, places = self._rows_of_matrices(operands[1], len(registers))
        matrices = piece[places].view(np.uint16)  # [warps, matrices, 8, 8]
        if "trans" in kinds:
            matrices = matrices.swapaxes(2, 3)
        pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(len(matrices), len(registers), WARP)
        for index, name in enumerate(registers):
            self._put(name, pairs[:, index].reshape(-1), None)

    def _stmatrix(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        assert mask is None and "m8n8" in kinds, kinds
        registers = names(operands[1])
        piece, places = self._rows_of_matrices(operands[0], len(registers))
        pairs = np.stack([self._get(name, "b32").reshape(-1, 8, 4) for name in registers], axis=1)
        matrices = np.ascontiguousarray(pairs).view(np.uint16)
        if "trans" in kinds:
            matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
        piece[places] = matrices.view(np.uint8)

    def _halves(self, operand: str, kind: str) -> np.ndarray:
        """float64 [warps, 8, 4, registers, 2] of 16-bit matrices: lanes are rows and pairs of columns."""
        bits = np.stack([self._get(name, "b32") for name in names(operand)], axis=1).view(np.uint16)
        return from_16_bit(bits, kind).astype(np.float64).reshape(-1, 8, 4, bits.shape[1] // 2, 2)

    def _left(self, operand: str, kind: str) -> np.ndarray:
        """[warps, 16, 16]: register r is at row + 8 * (r % 2), column + 8 * (r // 2)."""
        halves = self._halves(operand, kind).reshape(-1, 8, 4, 2, 2, 2)
        return halves.transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 16)

    def _put_product(self, targets: list[str], added: list[str] | None, product: np.ndarray) -> None:
        """A product, [warps, 16, columns]: lanes are rows and pairs of columns of 8x8 matrices."""
        by_lane = product.reshape(len(product), 2, 8, -1, 4, 2).transpose(0, 2, 4, 3, 1, 5)
        parts = by_lane.reshape(len(self._threads), -1)
        for index, name in enumerate(targets):
            before = self._get(added[index], "f32") if added else np.float32(0)
            self._put(name, (before + parts[:, index]).astype(np.float32), None)

    def _mma(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        assert mask is None and kinds[2:5] == ["m16n8k16", "row", "col"] and kinds[6] == kinds[7], kinds
        right = self._halves(operands[2], kinds[6]).transpose(0, 3, 2, 4, 1).reshape(-1, 16, 8)
        self._put_product(names(operands[0]), names(operands[3]), self._left(operands[1], kinds[6]) @ right)

    def _wgmma(self, kinds: list[str], operands: list[str], mask: Any) -> None:
        """Done at once, so there is nothing to wait for."""
        if kinds[0] != "mma_async":
            return
        shape = re.fullmatch(r"m64n(\d+)k16", kinds[3])
        assert mask is None and shape and kinds[5] == kinds[6], kinds
        if operands[1].startswith("{"):
            left = self._left(operands[1], kinds[5])
        else:
            left = self._described(operands[1], 64, operands[-2] == "1", kinds[5]).reshape(-1, 16, 16)
        right = self._described(operands[2], int(shape[1]), operands[-1] == "1", kinds[5])
        product = left.reshape(len(right), 64, 16) @ right.swapaxes(1, 2)
        adds = operands[3] == "1" or (operands[3] != "0" and bool(self._predicate(operands[3]).all()))
        targets = names(operands[0])
        self._put_product(targets, targets if adds else None, product.reshape(-1, 16, int(shape[1])))

    def _described(self, operand: str, rows: int, is_transposed: bool, kind: str) -> np.ndarray:
        """float64 [warpgroups, rows, 16] of shared memory that a matrix descriptor tells of: its 16 columns follow each
        other there, or where it is transposed its rows."""
        words = self._get(operand, "b64").reshape(-1, 4 * WARP)[:, 0].astype(np.int64)
        start, leading, stride = (((words >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
        span = {1: 128, 2: 64, 3: 32}[int(words[0] >> 62) & 3]  # bytes that are next to each other, before they swap
        row, column = np.arange(rows)[:, None], np.arange(16)
        leading, stride = leading[:, None, None], stride[:, None, None]
        if is_transposed:
            place = row // (span // 2) * leading + column // 8 * stride + column % 8 * span + row % (span // 2) * 2
        else:
            place = row // 8 * stride + row % 8 * span + column * 2
        place = place + start[:, None, None]
        place ^= ((place >> 7) & (span // 16 - 1)) << 4
        values = from_16_bit(self._memory.shared.view(np.uint16)[place // 2].reshape(-1, 1), kind)
        return values.astype(np.float64).reshape(-1, rows, 16)
