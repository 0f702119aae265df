"""Parameters that a user's quantisation method registers on a layer, and what of a checkpoint fills them."""

from __future__ import annotations

from fractions import Fraction

from torch import Tensor, nn

from vllm.layers.sharding import Shard, WeightSlot


def parameter_slots(
    name: str, parameter: nn.Parameter, parts: dict[str, Shard], inputs: Shard
) -> dict[str, WeightSlot]:
    """Where the tensors `part.name` of a checkpoint go, for a layer that stacks `parts` and takes `inputs`.

    A parameter's `output_dim` and `input_dim`, where it has these, are the dimensions that follow the layer's outputs
    and inputs, each for one or several of them. Without `output_dim`, a parameter of a layer with several parts has an
    element for each.

    Raises:
        ValueError: its shape does not follow the layer's, or it has a `weight_loader`, which is not called.
    """
    if getattr(parameter, "weight_loader", None) is not None:
        raise ValueError(f"weight_loader of parameter {name} is not called: set input_dim and output_dim in its place")
    output_dim, input_dim = getattr(parameter, "output_dim", None), getattr(parameter, "input_dim", None)
    shards = [Shard.whole(size) for size in parameter.shape]
    if input_dim is not None:
        shards[input_dim] = _scaled(name, inputs, parameter.shape[input_dim], len(inputs.held))
    total = sum(len(rows.held) for rows in parts.values())
    slots = {}
    start = 0
    for index, (part, rows) in enumerate(parts.items()):
        own = list(shards)
        target: Tensor = parameter.data
        if output_dim is not None:
            own[output_dim] = _scaled(name, rows, parameter.shape[output_dim], total)
            count = len(own[output_dim].held)
            target = parameter.data.narrow(output_dim, start, count)
            start += count
        elif len(parts) > 1:
            if not own or own[0].size != len(parts):
                raise ValueError(
                    f"parameter {name} of a layer with {len(parts)} parts must have an output_dim, or an element for "
                    f"each part; its shape is {tuple(parameter.shape)}"
                )
            own[0] = Shard.whole(1)
            target = parameter.data[index : index + 1]
        slots[f"{part}.{name}"] = WeightSlot(target, tuple(own))
    return slots


def _scaled(name: str, shard: Shard, size: int, layer_size: int) -> Shard:
    """`shard` of a layer's size, for a parameter of `size` there."""
    ratio = Fraction(size, layer_size)
    ends = [ratio * end for end in (shard.size, shard.held.start, shard.held.stop)]
    if any(end.denominator != 1 for end in ends):
        raise ValueError(f"parameter {name} has size {size}, which does not follow the layer's {layer_size}")
    whole, start, stop = map(int, ends)
    return Shard(whole, range(start, stop))
