"""Token embeddings and the language-model head, both split by vocabulary over the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed.communicator import split_vocab
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.linear_method import PARTS, QUANTIZED, UNQUANTIZED, LinearMethod, keeps_quantized, pack_parts
from vllm.layers.sharding import Shard, WeightSlot
from vllm.ops.add_lora import AddedAdapters
from vllm.ops.embedding import embedding
from vllm.ops.packed_linear import EXACT, PackedLinear, packed_embedding
from vllm.ops.quantized_linear import PackedQuantized, pack_quantized, quantized_embedding
from vllm.quantization.weight import QuantizedWeight

_ROWS_AT_ONCE = 4096


class Embedding(nn.Module):
    """A row of `weight` [V, H] for each index; every rank holds all of them."""

    def __init__(self, num_rows: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size), requires_grad=False)

    def forward(self, indices: Tensor, first: int = 0) -> Tensor:
        """Index 0 is of row `first`."""
        return embedding(indices, self.weight[first:])


class VocabShard(nn.Module):
    """A [V, H] matrix split over the ranks of `group`: this rank holds the rows of the token ids in `vocab_range` (see
    split_vocab), `weight` [V_rank, H], until a packed copy replaces them."""

    def __init__(self, vocab_size: int, hidden_size: int, has_weight: bool = True) -> None:
        super().__init__()
        self.group = get_tp_group()
        self.vocab_size = vocab_size
        self.vocab_range = split_vocab(vocab_size, self.group.world_size)[self.group.rank]
        self.weight: nn.Parameter | None
        self.register_parameter("weight", None)
        self._hidden_size = self.width = hidden_size
        self._like = self.empty = torch.empty(0)
        # AdaptedProduct and AdaptedEmbedding add adapters' products.
        self.adapters: Callable[..., Tensor] | None = None
        if has_weight:
            self._use_weight(self._new_weight())

    def _new_weight(self) -> Tensor:
        return self._like.new_empty(len(self.vocab_range), self._hidden_size)

    def _use_weight(self, weight: Tensor) -> None:
        self.weight = nn.Parameter(weight, requires_grad=False)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the checkpoint's `weight` goes; empty for a head whose weight is an embedding's."""
        if self._parameters["weight"] is None:
            return {}
        assert self.weight is not None
        shards = Shard(self.vocab_size, self.vocab_range), Shard.whole(self.weight.shape[1])
        return {"weight": WeightSlot(self.weight.data, shards)}


class VocabParallelEmbedding(VocabShard):
    """A row of H values for each token id, the same on every rank."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(vocab_size, hidden_size)
        self._packed: PackedLinear | None = None
        # A weight that came quantised from the checkpoint.
        self.quantized: PackedQuantized | None = None

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the checkpoint's weight goes."""
        return {name: replace(slot, keep=self._keep) for name, slot in super().checkpoint_slots().items()}

    def _keep(self, weight: QuantizedWeight) -> None:
        self.quantized = pack_quantized(weight.to(self._like.device).tensor, None)
        self.weight = None

    def check_update(self) -> None:
        """See LinearBase.check_update."""
        if self.quantized is not None:
            raise keeps_quantized("the embedding")

    def begin_update(self) -> bool:
        """See LinearBase.begin_update; what was a packed copy is looked up in until the head packs anew."""
        if self._parameters["weight"] is not None:
            return False
        self._use_weight(self._new_weight())
        return True

    def __getattr__(self, name: str) -> Any:
        """Callers who reach for a `weight` that a packed copy has replaced get its values, in a tensor of their own."""
        value = super().__getattr__(name)
        if name == "weight" and value is None and not (self._packed is None and self.quantized is None):
            return self.rows(torch.arange(len(self.vocab_range), device=self._like.device))
        return value

    def look_up_in(self, packed: PackedLinear) -> None:
        """Free the weight and read the head's packed copy of it."""
        self._packed = packed
        self.weight = None

    def holds(self, values: Tensor | QuantizedWeight) -> bool:
        """Whether the whole weight [V, H] is what it has, on all ranks. Collective if there are several."""
        whole = values if isinstance(values, Tensor) else values.dequantize()
        is_same = tuple(whole.shape) == (self.vocab_size, self._hidden_size)
        for rows in torch.arange(len(self.vocab_range)).split(_ROWS_AT_ONCE) if is_same else ():
            given = whole[rows + self.vocab_range.start].to(self._like)
            is_same = is_same and torch.equal(self.rows(rows.to(self._like.device)), given)
        if self.group.world_size == 1:
            return is_same
        return not self.group.all_reduce(torch.tensor(float(not is_same), device=self._like.device)).item()

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.group.world_size == 1:
            rows = self.rows(input_ids)
            return rows if self.adapters is None else self.adapters(rows, input_ids)
        local = input_ids - self.vocab_range.start
        is_elsewhere = (local < 0) | (local >= len(self.vocab_range))
        rows = self.rows(local.masked_fill(is_elsewhere, 0)).masked_fill_(is_elsewhere[:, None], 0)
        return self.group.all_reduce(rows if self.adapters is None else self.adapters(rows, local))

    def rows(self, indices: Tensor) -> Tensor:
        """[T, H]: those of this rank's part, by their places in it."""
        if self.quantized is not None:
            return quantized_embedding(indices, self.quantized, self._like.dtype)
        if self._packed is not None:
            return packed_embedding(indices, self._packed)
        assert self.weight is not None
        return embedding(indices, self.weight)


class ParallelLMHead(VocabShard):
    """Logits of hidden states, x W^T + b: on each rank those of its part of the vocabulary. W may be that of the
    embedding `tied_to`, which then reads the head's packed copy if that is exact. Logits are multiplied by `scale`,
    then bounded by `softcap`: c * tanh(logit / c)."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tied_to: VocabParallelEmbedding | None = None,
        bias: bool = False,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__(vocab_size, hidden_size, has_weight=tied_to is None)
        self.bias: nn.Parameter | None = None
        self._has_bias, self._scale, self._softcap = bias, scale, softcap
        if bias:
            self.bias = self._new_bias()
        # In a tuple, so that the embedding is not registered as a submodule of the head, too.
        self._tied_to = (tied_to,)
        self.method: LinearMethod = UNQUANTIZED
        self.packed: Any
        # A weight that came quantised from the checkpoint, until it is packed.
        self._quantized: QuantizedWeight | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """[L, H] -> float32 [L, V_rank], whatever the model's dtype: rounding would make ties."""
        if self.adapters is None:
            return self.bound(self.method.apply(hidden, self.packed, float_out=True))
        return self.bound(self.adapters(self.multiply, hidden, self.packed))

    def multiply(self, hidden: Tensor, packed: Any, norm: None = None, adapters: AddedAdapters | None = None) -> Tensor:
        """float32 sums, before they are bound."""
        return self.method.apply(hidden, packed, float_out=True, **({} if adapters is None else {"adapters": adapters}))

    def bound(self, logits: Tensor) -> Tensor:
        """Sums of this head, float32 and the caller's own, as logits: scaled and bounded."""
        if self._scale != 1.0:
            logits = logits.mul_(self._scale)
        return logits if self._softcap is None else logits.div_(self._softcap).tanh_().mul_(self._softcap)

    def _new_bias(self) -> nn.Parameter:
        return nn.Parameter(self._like.new_empty(len(self.vocab_range)), requires_grad=False)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the checkpoint's weight and bias go."""
        slots = {name: replace(slot, keep=self._keep) for name, slot in super().checkpoint_slots().items()}
        if self.bias is not None:
            slots["bias"] = WeightSlot(self.bias.data, (Shard(self.vocab_size, self.vocab_range),))
        return slots

    def _keep(self, weight: QuantizedWeight) -> None:
        self._quantized = weight.to(self._like.device)

    @property
    def tied_to(self) -> VocabParallelEmbedding | None:
        """The embedding whose weight is W, if it is one's."""
        return self._tied_to[0]

    @property
    def is_plain(self) -> bool:
        """Whether the packed weight is the checkpoint's, as it is."""
        return isinstance(self.packed, PackedLinear) and self.packed.layout == "plain"

    @property
    def plain_weight(self) -> Tensor | None:
        """The weight [V, H] where this rank has all of it, as the checkpoint has it, and x W^T are the logits."""
        is_product = not self._has_bias and self._scale == 1.0 and self._softcap is None
        return self.packed.weight if self.is_plain and is_product and self.group.world_size == 1 else None

    def check_update(self) -> None:
        """See LinearBase.check_update."""
        if self.method in (QUANTIZED, PARTS):
            raise keeps_quantized("lm_head")

    def begin_update(self) -> bool:
        """See LinearBase.begin_update."""
        self._use_weight(self.packed.weight if self.is_plain else self._new_weight())
        if self._has_bias:
            self.bias = self._new_bias()
        return not self.is_plain or self._has_bias

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED) -> None:
        """Pack the loaded weight by `method` and free the plain one, unless an embedding still needs it."""
        (tied_to,) = self._tied_to
        if tied_to is not None and tied_to.quantized is not None:
            self.method = QUANTIZED
            self.packed = replace(tied_to.quantized, bias=None if self.bias is None else self.bias.data)
            self.bias = None
            return
        weight = self.weight if tied_to is None else tied_to.weight
        assert weight is not None
        whole = weight.data if self._quantized is None else self._quantized
        bias = None if self.bias is None else self.bias.data
        self.method, self.packed = pack_parts([whole], bias, method, float_out=True)
        self.weight = self.bias = self._quantized = None
        if tied_to is not None and isinstance(self.packed, PackedLinear) and self.packed.layout in EXACT:
            tied_to.look_up_in(self.packed)
