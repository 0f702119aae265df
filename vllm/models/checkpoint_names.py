"""From the names and layouts of a family's checkpoints to those of `decoder.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vllm.models.spec import DecoderSpec, MoeSpec

Parts = Iterable[tuple[str, Tensor]]
Transform = Callable[[str, Tensor, DecoderSpec], Parts]

# Names that several families have.
MEGATRON = (
    (r"\.(self_attention|attention|self_attn)\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.(self_attention|attention|self_attn)\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
)
FAIRSEQ = (
    (r"\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"(layers\.\d+)\.final_layer_norm\.", r"\1.post_attention_layernorm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
)
TWO_LAYERS = ((r"(\.mlp)?\.fc1\.", ".mlp.up_proj."), (r"(\.mlp)?\.fc2\.", ".mlp.down_proj."))
QK_LAYERNORMS = ((r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),)
OUTPUT_NORMS = (
    (r"\.post_attention_layernorm\.", ".attention_output_norm."),
    (r"\.post_feedforward_layernorm\.", ".mlp_output_norm."),
)
BLOCK_SPARSE = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.experts\.(\d+)\.w1\.", r".experts.\1.gate_proj."),
    (r"\.experts\.(\d+)\.w2\.", r".experts.\1.down_proj."),
    (r"\.experts\.(\d+)\.w3\.", r".experts.\1.up_proj."),
)
# Tables that older checkpoints hold and every model computes.
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_COMPUTED = re.compile(r".*(rotary_emb\.(inv_freq|cos_cached|sin_cached)|rotary_pos_emb\.inv_freq|attn\.masked_bias)")


@dataclass(frozen=True)
class CheckpointNames:
    """A family's names.

    Attributes:
        renames: regular expressions and what replaces them, in order, towards `decoder.py`'s names.
        transforms: functions of a renamed tensor, in order; each gives one tensor or several.
        ignored: regular expression of whole names that hold no weight.
        has_further_layers: those after the model's last, which predict further tokens, are ignored.
    """

    renames: tuple[tuple[str, str], ...] = ()
    transforms: tuple[Transform, ...] = ()
    ignored: str | None = None
    has_further_layers: bool = False

    def read(self, name: str, tensor: Tensor, spec: DecoderSpec) -> Iterator[tuple[str, Tensor]]:
        """Our names and tensors of a checkpoint's. ValueError for one that does not have the shape to be split."""
        if _COMPUTED.fullmatch(name) or (self.ignored is not None and re.fullmatch(self.ignored, name)):
            return
        if self.has_further_layers and (layer := _LAYER.match(name)) and int(layer[1]) >= len(spec.layers):
            return
        own_name = name
        for pattern, replacement in self.renames:
            own_name = re.sub(pattern, replacement, own_name)
        parts: list[tuple[str, Tensor]] = [(own_name, tensor)]
        try:
            for transform in self.transforms:
                parts = [new for old in parts for new in transform(*old, spec)]
        except RuntimeError:
            raise ValueError(
                f"weight {name} has shape {tuple(tensor.shape)}, which does not fit config.json's sizes"
            ) from None
        yield from parts


def _of(name: str, layer_name: str) -> bool:
    """Whether `name` is the weight or bias of a layer called so."""
    return re.search(rf"(^|\.)({layer_name})\.(weight|bias)$", name) is not None


def transposed(layer_names: str) -> Transform:
    """Weights [inputs, outputs] of layers whose names match, as [outputs, inputs]."""

    def transform(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
        yield name, tensor.t() if _of(name, layer_names) and tensor.dim() == 2 else tensor

    return transform


def split_evenly(layer_name: str, *parts: str) -> Transform:
    """A layer's rows, of which each of `parts` has as many, one after another."""

    def transform(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
        if not _of(name, layer_name):
            yield name, tensor
            return
        for part, rows in zip(parts, tensor.unflatten(0, (len(parts), -1)), strict=True):
            yield name.replace(layer_name, part), rows

    return transform


def split_qkv(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """qkv_proj: all queries, then all keys, then all values."""
    if not _of(name, "qkv_proj"):
        yield name, tensor
        return
    layer = spec.cached[0]
    sizes = [count * layer.head_dim for count in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)]
    for part, rows in zip(("q_proj", "k_proj", "v_proj"), tensor.split(sizes), strict=True):
        yield name.replace("qkv_proj", part), rows


def split_grouped_qkv(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """qkv_proj: for each key head, the queries that read it, its key and its value."""
    if not _of(name, "qkv_proj"):
        yield name, tensor
        return
    layer = spec.cached[0]
    num_queries = layer.num_heads // layer.num_kv_heads
    groups = tensor.unflatten(0, (layer.num_kv_heads, num_queries + 2, layer.head_dim))
    for part, heads in zip(("q_proj", "k_proj", "v_proj"), groups.split([num_queries, 1, 1], dim=1), strict=True):
        yield name.replace("qkv_proj", part), heads.flatten(0, 2)


def split_gate_up(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """gate_up_proj: the gate, then up."""
    if not _of(name, "gate_up_proj"):
        yield name, tensor
        return
    for part, rows in zip(("gate_proj", "up_proj"), tensor.split(_mlp_size(spec)), strict=True):
        yield name.replace("gate_up_proj", part), rows


def _mlp_size(spec: DecoderSpec) -> int:
    """Width of the first layer's MLP of those that have one."""
    return next(mlp.split_size for mlp in spec.mlps if mlp is not None)


def split_experts(is_transposed: bool = False, alternates: bool = False) -> Transform:
    """Experts' stacked matrices [E, outputs, inputs] and biases [E, outputs], as those of each expert; of gate_up_proj
    gates and ups, which are halves, or in turn where it `alternates`. With `is_transposed` stacks are
    [E, inputs, outputs]."""

    def transform(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
        match = _EXPERTS.fullmatch(name)
        if match is None:
            yield name, tensor
            return
        stem, expert, kind, ending = match.groups()
        ending = "bias" if ending is not None and ending.endswith("bias") else "weight"
        is_alternating = any(isinstance(mlp, MoeSpec) and mlp.alternates for mlp in spec.mlps)
        matrices = [(expert, tensor)] if expert is not None else enumerate(tensor)
        for index, matrix in matrices:
            if expert is None and is_transposed and ending == "weight":
                matrix = matrix.t()
            if kind != "gate_up_proj":
                yield f"{stem}.{index}.{kind}.{ending}", matrix
                continue
            if alternates and not is_alternating:
                parts = matrix[::2], matrix[1::2]
            else:
                parts = tuple(matrix.unflatten(0, (2, -1)))
            for part, rows in zip(("gate_proj", "up_proj"), parts, strict=True):
                yield f"{stem}.{index}.{part}.{ending}", rows

    return transform


_EXPERTS = re.compile(r"(.+\.experts)(?:\.(\d+))?\.(gate_up_proj|gate_proj|up_proj|down_proj)(\.weight|\.bias|_bias)?")


def gates_are_halves(raw: dict[str, Any]) -> bool:
    """Whether a checkpoint's gate_proj and up_proj of single experts are halves of the model's stacked rows even where
    these alternate, as in gpt-oss: GPTQModel cuts them so. `raw`: the content of config.json."""
    settings = raw.get("quantization_config")
    meta = settings.get("meta") if isinstance(settings, dict) else None
    writer = meta.get("quantizer") if isinstance(meta, dict) else None
    return "gptqmodel" in str(writer).lower()
