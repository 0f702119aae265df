"""Upstream's linear layers: our packed ones, which return (product, bias that was not added)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.distributed.communicator import ALONE, Communicator, split_kv_heads
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers import linear as ours
from vllm.layers.linear_method import UNQUANTIZED, LinearMethod
from vllm.layers.sharding import Shard
from vllm.upstream.outside.refused import refuse_quantization
from vllm.upstream.outside.weights import fill, set_loader, split_rows


class KindOfOurs(type(nn.Module)):  # type: ignore[misc]
    """Lets isinstance know the layers of the engine's own models, too: quantisation methods ask for them."""

    ours: type[nn.Module]

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, cls.ours)


@contextlib.contextmanager
def parameters_of(dtype: torch.dtype | None) -> Iterator[None]:
    """Parameters that are made within get this dtype; None: the model's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Linear(ours.LinearBase):
    """A linear layer of a caller's model.

    Args:
        inputs, parts: see LinearBase; parts are named by their places until the model names them.
        prefix: the layer's name in its model.
    """

    def __init__(
        self,
        inputs: Shard,
        parts: dict[str, Shard],
        bias: bool,
        skip_bias_add: bool,
        params_dtype: torch.dtype | None,
        quant_config: Any,
        prefix: str,
        return_bias: bool,
    ) -> None:
        refuse_quantization(quant_config, prefix)
        with parameters_of(params_dtype):
            super().__init__(inputs, parts, bias)
        self.prefix, self.skip_bias_add, self.return_bias = prefix, skip_bias_add, return_bias
        self.input_size, self.output_size = inputs.size, sum(rows.size for rows in parts.values())
        self.input_size_per_partition = len(inputs.held)
        self.output_partition_sizes = [len(rows.held) for rows in parts.values()]
        self.output_size_per_partition = sum(self.output_partition_sizes)
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.takes_adapters = not skip_bias_add
        self._use_loaders()

    def name_parts(self, names: Sequence[str]) -> None:
        """Let the layer's parts have their checkpoint's names. ValueError: they are not as many."""
        if len(names) != len(self.parts):
            raise ValueError(
                f"packed_modules_mapping names {len(names)} parts of {self.prefix}, which has {len(self.parts)}"
            )
        self.parts = dict(zip(names, self.parts.values(), strict=True))

    def weight_loader(self, param: Tensor, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
        """Take a checkpoint's tensor.

        Args:
            param: the layer's weight or bias.
            loaded_weight: the whole tensor: of one part, of several that are fused, or of all.
            loaded_shard_id: which part it is: its number, a tuple of numbers, or "q", "k" or "v"; None: all.

        Raises:
            ValueError: its shape is not that of these parts.
        """
        kind = "bias" if param is self.bias else "weight"
        slots = self.checkpoint_slots()
        chosen = [slots[f"{name}.{kind}"] for name in self._part_names(loaded_shard_id)]
        if len(chosen) > 1:
            for slot, rows in zip(chosen, split_rows(loaded_weight, chosen, self.prefix), strict=True):
                fill(slot, rows, self.prefix)
        else:
            fill(chosen[0], loaded_weight, self.prefix)

    def _part_names(self, shard_id: Any) -> list[str]:
        names = list(self.parts)
        if shard_id is None:
            return names
        numbers = shard_id if isinstance(shard_id, tuple) else (shard_id,)
        places = ["qkv".find(each) if isinstance(each, str) else each for each in numbers]
        if any(not isinstance(place, int) or not 0 <= place < len(names) for place in places):
            raise ValueError(f"{self.prefix} has {len(names)} parts, and no shard {shard_id!r}")
        return [names[place] for place in places]

    def _use_loaders(self) -> None:
        set_loader(self.weight, self.weight_loader, output_dim=0, input_dim=1)
        set_loader(self.bias, self.weight_loader, output_dim=0)

    def begin_update(self) -> bool:
        is_new = super().begin_update()
        self._use_loaders()
        return is_new

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED, gated: bool = False) -> None:
        # A bias that is not added stays as it is.
        kept = self.bias if self.skip_bias_add else None
        if kept is not None:
            self.bias = None
        super().process_weights_after_loading(method, gated)
        if kept is not None:
            self.bias = kept

    def multiply(self, x: Tensor) -> Tensor:
        """[..., inputs held] -> [..., outputs held]."""
        if x.dim() == 2:
            return ours.LinearBase.forward(self, x)
        return ours.LinearBase.forward(self, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def _answer(self, out: Tensor) -> Any:
        if not self.return_bias:
            return out
        return out, self.bias if self.skip_bias_add else None

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        """[..., inputs held] -> (product, bias that was not added or None), or the product where not `return_bias`."""
        return self._answer(self.multiply(x))


class LinearBase(_Linear, metaclass=KindOfOurs):
    """The base of upstream's linear layers."""

    ours: ClassVar[Any] = ours.LinearBase


class ReplicatedLinear(LinearBase):
    """A linear that every rank holds whole."""

    ours = ours.ReplicatedLinear

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        parts = {_last(prefix): Shard.whole(output_size)}
        inputs = Shard.whole(input_size)
        super().__init__(inputs, parts, bias, skip_bias_add, params_dtype, quant_config, prefix, return_bias)


class ColumnParallelLinear(LinearBase):
    """A linear whose outputs are split over the ranks.

    Args:
        gather_output: every rank gets all outputs.
        output_sizes: of several matrices that are stacked.
        disable_tp: every rank holds all of it.
    """

    ours: ClassVar[Any] = ours.ColumnParallelLinear

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        output_sizes: list[int] | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        group = _group(disable_tp)
        sizes = output_sizes or [output_size]
        shards = [_even(size, group, prefix) for size in sizes]
        self._init(input_size, shards, bias, skip_bias_add, params_dtype, quant_config, prefix, return_bias, group)
        self.gather_output = gather_output
        if gather_output and len(shards) > 1 and group.world_size > 1:
            raise ValueError(f"{prefix}: gather_output=True of several matrices is not served: give each a layer")

    def _init(
        self,
        input_size: int,
        shards: list[Shard],
        bias: bool,
        skip_bias_add: bool,
        params_dtype: torch.dtype | None,
        quant_config: Any,
        prefix: str,
        return_bias: bool,
        group: Communicator,
    ) -> None:
        name = _last(prefix)
        parts = {name if len(shards) == 1 else f"{name}.{place}": rows for place, rows in enumerate(shards)}
        inputs = Shard.whole(input_size)
        LinearBase.__init__(self, inputs, parts, bias, skip_bias_add, params_dtype, quant_config, prefix, return_bias)
        self.tp_group, self.gather_output = group, False
        self.tp_size, self.tp_rank = group.world_size, group.rank

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        out = self.multiply(x)
        return self._answer(_gathered(out, self.tp_group) if self.gather_output else out)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Linears of the same input as one product; each one's outputs are split over the ranks."""

    ours = ours.StackedLinear

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        self_sizes = list(output_sizes)
        super().__init__(
            input_size,
            sum(self_sizes),
            bias,
            gather_output,
            skip_bias_add,
            params_dtype,
            quant_config,
            self_sizes,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )
        self.output_sizes = self_sizes


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections as one product. Query heads are split over the ranks, and so are key and
    value heads, unless there are more ranks than those: then several ranks hold the same one.

    Attributes:
        num_heads, num_kv_heads: this rank's.
    """

    ours = ours.QKVParallelLinear

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        v_head_size: int | None = None,
    ) -> None:
        group = _group(disable_tp)
        ranks, kv_heads = group.world_size, total_num_kv_heads or total_num_heads
        if kv_heads % ranks and ranks % kv_heads:
            raise ValueError(
                f"tensor_parallel_size={ranks} does not fit the {kv_heads} key/value heads of {prefix}: one must be a "
                "multiple of the other"
            )
        own = split_kv_heads(kv_heads, ranks)[group.rank]
        self_v = v_head_size or head_size
        shards = [_even(total_num_heads * head_size, group, prefix)]
        shards += [Shard(kv_heads * size, range(own.start * size, own.stop * size)) for size in (head_size, self_v)]
        self._init(hidden_size, shards, bias, skip_bias_add, params_dtype, quant_config, prefix, return_bias, group)
        self.parts = dict(zip(("q_proj", "k_proj", "v_proj"), shards, strict=True))
        self.hidden_size, self.head_size, self.v_head_size = hidden_size, head_size, self_v
        self.total_num_heads, self.total_num_kv_heads = total_num_heads, kv_heads
        self.num_heads, self.num_kv_heads = total_num_heads // ranks, len(own)
        self.num_kv_head_replicas = max(1, ranks // kv_heads)
        self.output_sizes = [shard.size for shard in shards]


class RowParallelLinear(LinearBase):
    """A linear whose inputs are split over the ranks; every rank gets the sum. The first rank adds the bias.

    Args:
        input_is_parallel: what it is given is the rank's part; else it takes that.
        reduce_results: False: each rank gets its part of the sum.
        disable_tp: every rank holds all of it.
    """

    ours = ours.RowParallelLinear

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        group = _group(disable_tp)
        parts = {_last(prefix): Shard.whole(output_size)}
        inputs = _even(input_size, group, prefix)
        super().__init__(inputs, parts, bias, skip_bias_add, params_dtype, quant_config, prefix, return_bias)
        self.tp_group, self.input_is_parallel, self.reduce_results = group, input_is_parallel, reduce_results
        self.tp_size, self.tp_rank = group.world_size, group.rank

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        if not self.input_is_parallel:
            x = x[..., self.inputs.held.start : self.inputs.held.stop]
        out = self.multiply(x)
        return self._answer(self.tp_group.all_reduce(out) if self.reduce_results else out)

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED, gated: bool = False) -> None:
        if self.tp_group.rank > 0 and not self.skip_bias_add:
            self.bias = None
        super().process_weights_after_loading(method, gated)


def _last(prefix: str) -> str:
    return prefix.rpartition(".")[2] or "linear"


def _group(disable_tp: bool) -> Communicator:
    return ALONE if disable_tp else get_tp_group()


def _even(size: int, group: Communicator, prefix: str) -> Shard:
    """ValueError: the ranks cannot share `size` equally."""
    if size % group.world_size:
        raise ValueError(f"tensor_parallel_size={group.world_size} does not divide the {size} rows of {prefix}")
    return Shard.even(size, group)


def _gathered(part: Tensor, group: Communicator) -> Tensor:
    """[..., outputs] of every rank's equal part."""
    return part if group.world_size == 1 else torch.cat(group.all_gather(part).unbind(), dim=-1)
