"""Values of a GGUF file's header under the name of its architecture."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vllm.loader.gguf.file import GGUFFile


class GGUFHeader:
    """Typed access to `general.architecture`'s keys. All methods raise ValueError, which names the file and key."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._read: set[str] = set()
        self.architecture: str = file.metadata.get("general.architecture", "")
        # Blocks that predict further tokens come last, and are not read.
        self._blocks = self._count("block_count", self.need("block_count"))
        self.layers = self._count("block_count", self._blocks - self.get("nextn_predict_layers", 0))
        self.hidden = self._count("embedding_length", self.need("embedding_length"))

    def error(self, problem: str) -> ValueError:
        """An error that names the file."""
        return ValueError(f"{self.file.path.name}: {problem}")

    def wrong(self, key: str, problem: str) -> ValueError:
        """An error that names the file and the key."""
        return self.error(f"{self.architecture}.{key} {problem}")

    @property
    def context(self) -> int:
        """Longest text in tokens."""
        return self._count("context_length", self.need("context_length"))

    @property
    def heads(self) -> int:
        """Number of query heads, of a model that has attention."""
        return self._count("attention.head_count", self.uniform("attention.head_count"))

    @property
    def head_dim(self) -> int:
        """Size of a query or key."""
        return self._count("attention.key_length", self.get("attention.key_length", self.hidden // self.heads))

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads of layers with attention; others may have 0."""
        if isinstance(self.get("attention.head_count_kv"), list):
            return self._count("attention.head_count_kv", self.of_some("attention.head_count_kv", self.heads))
        return self._count("attention.head_count_kv", self.uniform("attention.head_count_kv", self.heads))

    @property
    def further(self) -> range:
        """The blocks after the layers."""
        return range(self.layers, self._blocks)

    def get(self, key: str, default: Any = None) -> Any:
        """A value, which is no NaN or infinity, or `default`."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, float) and not math.isfinite(value):
            raise self.wrong(key, f"must be finite, got {value}")
        if key.endswith("epsilon") and value is not None and (not isinstance(value, int | float) or value < 0):
            raise self.wrong(key, f"must be at least 0, got {value!r}")
        return value

    def unread(self) -> dict[str, Any]:
        """Entries under the architecture's name that no call has asked for."""
        prefix = f"{self.architecture}."
        given = {key.removeprefix(prefix): value for key, value in self.file.metadata.items() if key.startswith(prefix)}
        return {key: value for key, value in given.items() if key not in self._read}

    def was_read(self, key: str) -> bool:
        """Whether a call has asked for it."""
        return key in self._read

    def _count(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, f"must be a positive integer, got {value!r}")
        return value

    def need(self, key: str) -> Any:
        """A value that must be there."""
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.file.path.name} has no {self.architecture}.{key}")
        return value

    def uniform(self, key: str, default: Any = None) -> Any:
        """A value that may be given layer by layer, and must be the same in all."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.error(f"layers that differ in {key} are not supported, got {value}")
            return value[0]
        return value

    def by_layer(self, key: str) -> list[Any]:
        """A value that must be there, for each layer or once for all."""
        value = self.need(key)
        values = value if isinstance(value, list) else [value] * self._blocks
        if len(values) != self._blocks:
            raise self.wrong(key, f"must have {self._blocks} values, got {len(values)}")
        return values[: self.layers]

    def size(self, key: str) -> int:
        """A positive integer that must be there."""
        return self._count(key, self.need(key))

    def of_some(self, key: str, default: Any) -> Any:
        """A value for each layer that is 0 in some and the same in the others; `default` where it is 0 in all."""
        values = self.by_layer(key)
        found = set(values) - {0}
        if len(found) > 1:
            raise self.wrong(key, f"must be the same in all layers that have any, got {values}")
        return found.pop() if found else default

    def having(self, part: str) -> list[bool]:
        """For each layer, whether it has a tensor `part`."""
        return [self.has(f"blk.{index}.{part}") for index in range(self.layers)]

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor."""
        return tensor in self.file.tensors

    def rows(self, tensor: str) -> int:
        """First dimension of a tensor that must be there."""
        if tensor not in self.file.tensors:
            raise ValueError(f"{self.file.path.name} has no tensor {tensor}")
        return self.file.tensors[tensor].shape[0]

    def values(self, tensor: str) -> list[float]:
        """A small tensor's values."""
        return np.ravel(self.file.dequantize(tensor)).tolist()
