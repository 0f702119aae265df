"""From an adapter's tensors to what it does to each layer of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vllm.layers.adapted.experts import ExpertProduct
from vllm.layers.adapted.products import AdapterPart, AdapterPlace, LayerChange, TokenRows
from vllm.layers.latent_attention import LatentHeads
from vllm.layers.layernorm import AdaptableNorm
from vllm.layers.linear import LinearBase, RowParallelLinear
from vllm.layers.linear_method import before_gate
from vllm.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.ops.packed_linear import pack_linear
from vllm.v1.features.adapters.adapter import AdapterFile, LoraTensors
from vllm.v1.features.adapters.modules import ModuleMap, Share

# Columns of a base weight that are taken out of it at once.
_UNIT_VECTORS = 256


@dataclass
class _Given:
    """An adapter's tensors for a layer, by part."""

    lora: dict[int, tuple[Share, LoraTensors]] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)
    biases: dict[int, Tensor] = field(default_factory=dict)
    tokens: tuple[Tensor, Tensor] | None = None


@torch.inference_mode()
def layer_changes(found: AdapterFile, modules: ModuleMap) -> dict[Any, LayerChange]:
    """By layer, in the memory of the host or of the layer.

    Raises:
        ValueError: the model has no such layer, or one of another shape, or it cannot change so; names the file and the
            tensor.
    """
    given: dict[Any, _Given] = {}
    for module, tensors in found.modules.items():
        try:
            for share, part in _shares(module, tensors, modules):
                _check_kind(share, part)
                given.setdefault(share.place.module, _Given()).lora[share.place.part] = share, part
        except ValueError as error:
            raise ValueError(f"{found.name}: {module}: {error}") from None
    for name, tensor in found.saved.items():
        try:
            for place, kind, values in modules.tensors(name.replace(".base_layer.", "."), tensor):
                if ".base_layer." in name and kind == "weight":
                    _check_base(place, values)
                    continue
                if isinstance(place.module, ExpertProduct | LatentHeads):
                    raise ValueError(f"the weight of {_kind(place.module)} cannot be replaced")
                own = given.setdefault(place.module, _Given())
                (own.weights if kind == "weight" else own.biases)[place.part] = values
        except ValueError as error:
            raise ValueError(f"{found.name}: {name}: {error}") from None
    for module, tokens in found.tokens.items():
        try:
            for layer in modules.tables(f"{module}.weight", found.tokens):
                given.setdefault(layer, _Given()).tokens = tokens
        except ValueError as error:
            raise ValueError(f"{found.name}: {module}: {error}") from None
    return {layer: _change(layer, own) for layer, own in given.items()}


def _shares(module: str, tensors: LoraTensors, modules: ModuleMap) -> Iterator[tuple[Share, LoraTensors]]:
    """The places of a module in the model, each with its own part of the tensors."""
    num_rows, num_columns = len(tensors.b), tensors.a.shape[1]
    if tensors.stacks:
        yield from _of_stack(module, tensors, modules)
        return
    if tensors.group_size > 1 and (whole := _without_groups(module, tensors, modules)) is not None:
        yield from whole
        return
    # An embedding's A is [r, tokens], its B [width, r].
    shape = (num_columns, num_rows) if tensors.is_embedding else (num_rows, num_columns)
    yield from ((share, tensors) for share in modules.shares(f"{module}.weight", *shape))


def _without_groups(
    module: str, tensors: LoraTensors, modules: ModuleMap
) -> Iterator[tuple[Share, LoraTensors]] | None:
    """QA-LoRA's A, spread over the inputs; None: it is not of groups, as of layers that are not quantised."""
    num_groups, size = tensors.a.shape[1], tensors.group_size
    try:
        shares = modules.shares(f"{module}.weight", len(tensors.b), num_groups * size)
    except ValueError:
        return None
    a = tensors.a.float().repeat_interleave(size, 1) * (num_groups / size)
    return ((share, replace(tensors, a=a)) for share in shares)


def _of_stack(module: str, tensors: LoraTensors, modules: ModuleMap) -> Iterator[tuple[Share, LoraTensors]]:
    """A has the ranks of one expert after another, and B each rank's of all experts. Names do not say which of a
    module's stacks it is, but shapes do."""
    failure: ValueError | None = None
    module = module.replace(".base_layer", "")
    for name, (count, scale) in tensors.stacks.items():
        try:
            shares = modules.shares(f"{module}.{name}", count, len(tensors.b), tensors.a.shape[1])
        except ValueError as error:
            failure = error
            continue
        a, b = tensors.a.unflatten(0, (count, -1)), tensors.b.unflatten(1, (-1, count))
        for share in shares:
            expert = share.place.module.number
            yield share, LoraTensors(scale, a[expert], b[..., expert])
        return
    raise failure or ValueError("it is no stack of experts")


def _check_base(place: AdapterPlace, values: Tensor) -> None:
    """peft stores adapted embeddings and heads whole, too."""
    layer = place.module
    if isinstance(layer, VocabParallelEmbedding):
        own = layer.rows(torch.arange(len(values), device=layer.empty.device))
    elif isinstance(layer, ParallelLMHead):
        own = (
            _product(layer, torch.eye(values.shape[1])).T - _product(layer, torch.zeros(1, values.shape[1]))[0][:, None]
        )
    else:
        raise ValueError("the base model's own tensor is not supported beside an adapter")
    if not torch.allclose(own.float(), values.to(layer.empty).float(), rtol=1e-2, atol=1e-4):
        raise ValueError("it differs from the base model's, and cannot be replaced where it is adapted")


def _check_kind(share: Share, tensors: LoraTensors) -> None:
    is_embedding = isinstance(share.place.module, VocabParallelEmbedding)
    if is_embedding != tensors.is_embedding:
        raise ValueError("lora_embedding_A and lora_embedding_B are of an embedding, lora_A and lora_B of a linear")
    has_vectors = tensors.magnitude is not None or tensors.bias is not None
    if has_vectors and isinstance(share.place.module, ExpertProduct | LatentHeads):
        raise ValueError(f"lora_magnitude_vector and lora_B.bias of {_kind(share.place.module)} are not supported")


def _kind(layer: Any) -> str:
    return "an expert" if isinstance(layer, ExpertProduct) else "latent attention's kv_b_proj, which is taken apart,"


def _change(layer: Any, given: _Given) -> LayerChange:
    change = LayerChange()
    if isinstance(layer, AdaptableNorm):
        assert layer.weight is not None
        bias = given.biases.get(0, layer.bias)
        own_bias = None if bias is None else _owned(bias, layer)
        change.norm = _owned(given.weights.get(0, layer.weight), layer), own_bias
        return change
    for part, (share, tensors) in given.lora.items():
        if tensors.is_embedding:
            a, b = share.held_rows(tensors.a.T).T, tensors.b.float()[share.columns]
        else:
            a, b = share.held_columns(tensors.a), share.held_rows(tensors.b)
        change.parts[part] = AdapterPart(a, b, tensors.scale)
    has_vectors = any(each.magnitude is not None or each.bias is not None for _, each in given.lora.values())
    if isinstance(layer, VocabParallelEmbedding):
        change.table = None if 0 not in given.weights else _owned(given.weights[0], layer)
        if has_vectors:
            _scale_embedding(change, layer, given)
    else:
        if has_vectors or given.biases.keys() - given.weights.keys():
            _add_vectors(change, layer, given)
        for part, weight in given.weights.items():
            bias = given.biases.get(part)
            if bias is None:
                bias = _columns(layer, part, _product(layer, torch.zeros(1, weight.shape[1]))[0])
            # The first one of the ranks that add up has the bias.
            own_bias = _owned(bias, layer) if _adds_bias(layer) else None
            change.weights[part] = pack_linear(_owned(weight, layer), own_bias, float_out=True)
    if given.tokens is not None:
        change.tokens = _token_rows(layer, *given.tokens)
    for own in change.parts.values():
        own.a, own.b = own.a.to(layer.empty), own.b.to(layer.empty)
    return change


def _owned(tensor: Tensor, layer: Any) -> Tensor:
    """A copy, as a file's tensors may be mapped, of the layer's dtype and on its device."""
    return tensor.to(layer.empty, copy=True, memory_format=torch.contiguous_format)


def _token_rows(layer: Any, ids: Tensor, rows: Tensor) -> TokenRows:
    held = layer.vocab_range
    is_held = (ids >= held.start) & (ids < held.stop)
    own, weight = (ids[is_held] - held.start).to(layer.empty.device), _owned(rows[is_held], layer)
    place_of = torch.full((len(held),), -1, dtype=torch.int64, device=layer.empty.device)
    place_of[own] = torch.arange(len(own), device=layer.empty.device)
    if isinstance(layer, VocabParallelEmbedding):
        return TokenRows(own, weight, place_of)
    bias = _product(layer, torch.zeros(1, rows.shape[1]))[0, own].to(layer.empty)
    return TokenRows(own, pack_linear(weight, bias, float_out=True), place_of)


def _scale_embedding(change: LayerChange, layer: VocabParallelEmbedding, given: _Given) -> None:
    """DoRA of a table: its columns are scaled to the lengths m."""
    share, tensors = given.lora[0]
    part = change.parts[0]
    squares = torch.zeros(layer.width, device=layer.empty.device)
    for start in range(0, len(layer.vocab_range), _UNIT_VECTORS):
        tokens = torch.arange(start, min(start + _UNIT_VECTORS, len(layer.vocab_range)), device=layer.empty.device)
        added = part.scale * (part.a[:, tokens.to(part.a.device)].T @ part.b.T).to(squares)
        squares += (layer.rows(tokens).float() + added).square().sum(0)
    assert tensors.magnitude is not None
    lengths = layer.group.all_reduce(squares).sqrt()
    factor = tensors.magnitude.float()[share.columns].to(lengths) / lengths
    change.gain, part.b = factor - 1, part.b * factor[:, None].to(part.b)


def _add_vectors(change: LayerChange, layer: Any, given: _Given) -> None:
    """DoRA (Liu et al. 2024): a row of W + s B A is scaled to the length m, so that outputs are multiplied by
    c = m / |W + s B A|, all but the bias; and biases that are added, or take the place of the layer's."""
    base = _product(layer, torch.zeros(1, _width(layer)))[0]
    gain, shift = torch.zeros_like(base), torch.zeros_like(base)
    for index in given.lora.keys() | given.biases.keys():
        own_gain, own_shift = _columns(layer, index, gain), _columns(layer, index, shift)
        own_base = _columns(layer, index, base)
        factor = torch.ones_like(own_base)
        if index in given.lora:
            share, tensors = given.lora[index]
            part = change.parts[index]
            if tensors.magnitude is not None:
                factor = share.held_rows(tensors.magnitude).to(base) / _row_lengths(layer, index, part)
                part.b = part.b * factor[:, None].to(part.b)
            if tensors.bias is not None and _adds_bias(layer):
                own_shift += factor * tensors.scale * share.held_rows(tensors.bias).to(base)
        own_gain.copy_(factor - 1)
        wanted = given.biases.get(index)
        own_shift += (own_base if wanted is None or not _adds_bias(layer) else wanted.to(base)) - factor * own_base
    change.gain, change.shift = gain, shift


def _row_lengths(layer: Any, index: int, part: AdapterPart) -> Tensor:
    """float32 [rows held]: |W + s B A| of each row, W the base weight that the layer multiplies with."""
    width = _width(layer)
    base = _product(layer, torch.zeros(1, width))
    squares = torch.zeros_like(_columns(layer, index, base[0]))
    a, b = part.a.to(base), part.b.to(base)
    for start in range(0, width, _UNIT_VECTORS):
        stop = min(start + _UNIT_VECTORS, width)
        units = torch.zeros(stop - start, width)
        units[:, start:stop].fill_diagonal_(1)
        weight = _columns(layer, index, (_product(layer, units) - base).T)
        squares += (weight + part.scale * (b @ a[:, start:stop])).square().sum(1)
    if isinstance(layer, RowParallelLinear):
        squares = layer.group.all_reduce(squares)
    return squares.sqrt()


def _product(layer: Any, x: Tensor) -> Tensor:
    """float32 [T, outputs held]: the layer's own product."""
    x = x.to(layer.empty)
    if not isinstance(layer, LinearBase):
        return layer.multiply(x, getattr(layer, "packed", None)).float()
    # The one layout without float32 results.
    wide = {} if getattr(layer.packed, "layout", "") == "packed_fp16" else {"float_out": True}
    return before_gate(layer.method.apply, x, layer.packed, **wide).float()


def _width(layer: Any) -> int:
    return len(layer.inputs.held) if isinstance(layer, LinearBase) else layer.width


def _columns(layer: Any, index: int, values: Tensor) -> Tensor:
    """The columns of a part, of values of all outputs: a view."""
    if not isinstance(layer, LinearBase):
        return values
    sizes = [len(rows.held) for rows in layer.parts.values()]
    return values[sum(sizes[:index]) : sum(sizes[: index + 1])]


def _adds_bias(layer: Any) -> bool:
    return not isinstance(layer, RowParallelLinear) or layer.group.rank == 0
