"""BGE-M3's layers on single tokens (arXiv:2402.03216): how much a token weighs, and its vector."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from vllm.config.checkpoint.weight_files import iterate_tensors
from vllm.layers.dummy_weights import dummy_weight


class TokenHeads(nn.Module):
    """The layers of sparse_linear.pt and colbert_linear.pt, in float32.

    Args:
        first, last: ids of the tokens that begin and end a text; None: there is none.
        seed: of layers that are made up; None: they are read.

    Raises:
        ValueError: a file is missing, or not of such a layer.
    """

    def __init__(
        self, folder: Path, hidden_size: int, first: int | None, last: int | None, seed: int | None = None
    ) -> None:
        super().__init__()
        if seed is None:
            self.sparse_linear = _linear(folder / "sparse_linear.pt", hidden_size, 1)
            self.colbert_linear = _linear(folder / "colbert_linear.pt", hidden_size)
        else:
            self.sparse_linear = nn.Linear(hidden_size, 1)
            self.colbert_linear = nn.Linear(hidden_size, hidden_size)
            for name, values in self.named_parameters():
                values.requires_grad_(False).copy_(dummy_weight(name, values.shape, values.dtype, values.device, seed))
        self._first, self._last = first, last

    def weigh(self, rows: Tensor) -> Tensor:
        """[R, H] -> [R, 1]."""
        return self.sparse_linear(rows.float())

    def embed(self, rows: Tensor) -> Tensor:
        """[R, H] -> [R, D]."""
        return self.colbert_linear(rows.float())

    def without_ends(self, token_ids: Sequence[int] | np.ndarray, keeps_last: bool = False) -> slice:
        """The tokens of a text between its first one and its last one."""
        ends = len(token_ids) > 0 and token_ids[-1] == self._last and not keeps_last
        begins = len(token_ids) > 0 and token_ids[0] == self._first
        return slice(int(begins), len(token_ids) - int(ends))


def _linear(path: Path, inputs: int, outputs: int | None = None) -> nn.Linear:
    if not path.is_file():
        raise ValueError(f"{path.parent.name} lacks {path.name}, a layer of BgeM3EmbeddingModel")
    tensors = {name: values.float() for name, values in iterate_tensors([path])}
    found = {name: tuple(values.shape) for name, values in tensors.items()}
    width = outputs or (found.get("weight") or (0,))[0]
    wanted = {"weight": (width, inputs), "bias": (width,)}
    if found != wanted:
        raise ValueError(f"{path.parent.name}/{path.name} has weights {found}, expected {wanted}")
    linear = nn.Linear(inputs, width)
    linear.load_state_dict(tensors)
    return linear.requires_grad_(False)
