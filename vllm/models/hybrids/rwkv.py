"""RWKV 4 (arXiv:2305.13048): each block's two mixings are two layers here, of which either keeps the last input."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from torch import Tensor

from vllm.models.attention import RotaryTables
from vllm.models.checkpoint_names import CheckpointNames, Parts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import Decoder, DecoderForCausalLM, DecoderLayer
from vllm.models.hybrids.options import UNBOUNDED
from vllm.models.spec import DecoderSpec
from vllm.models.states.specs import ChannelMixSpec, WkvSpec

_BLOCK = re.compile(r"(?:rwkv\.)?blocks\.(\d+)\.(.+)")


def _layers_of_block(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """A block's tensors, as those of its two layers; shares also of the input before."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        yield name, tensor
        return
    index, own = 2 * int(match[1]), match[2]
    if own.startswith("pre_ln."):
        yield own.replace("pre_ln.", "model.embed_norm."), tensor
    elif own.startswith(("ln1.", "ln2.")):
        layer = index + int(own[2]) - 1
        yield f"model.layers.{layer}.input_layernorm.{own[4:]}", tensor
    else:
        part, _, own = own.partition(".")
        prefix = f"model.layers.{index + (part == 'feed_forward')}.self_attn."
        if own.startswith("time_mix_"):
            share = tensor.flatten().float()
            yield f"{prefix}shift.{own}", share
            yield f"{prefix}shift.{own.replace('time_mix_', 'time_rest_')}", 1 - share
        else:
            yield prefix + own, tensor


@dataclass(frozen=True)
class RwkvSpec(DecoderSpec):
    """`halving`: so many layers have an epsilon that is right for half the residual stream of those before; 0: all
    have the same. The blocks of the reference halve the stream as they go, which only norms' epsilons notice."""

    halving: int = 0


class RwkvLayer(DecoderLayer):
    """A block's first or second half."""

    def __init__(self, spec: DecoderSpec, index: int, tables: RotaryTables) -> None:
        assert isinstance(spec, RwkvSpec)
        halvings = index // spec.halving if spec.halving else 0
        super().__init__(replace(spec, norm=replace(spec.norm, eps=spec.norm.eps * 4.0**halvings)), index, tables)


class RwkvDecoder(Decoder):
    layer_class = RwkvLayer


class RwkvForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"^(rwkv\.)?embeddings\.", "model.embed_tokens."),
            (r"^(rwkv\.)?ln_out\.", "model.norm."),
            (r"^head\.", "lm_head."),
        ),
        (_layers_of_block,),
    )
    decoder_class = RwkvDecoder

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        size = reader.hidden_size
        time = WkvSpec(reader.integer("attention_hidden_size", default=size))
        channel = ChannelMixSpec(reader.integer("intermediate_size", default=4 * size))
        # It bounds what was trained at a time, not what can be read.
        reader.ignore("context_length", "max_position_embeddings")
        norm = reader.layer_norm()
        every = reader.get("rescale_every", default=6)
        if isinstance(every, bool) or not isinstance(every, int):
            raise reader.refuse("rescale_every", "it must be an integer")
        halving = 2 * max(every, 0)
        count = 2 * reader.num_layers
        last = 4.0 ** (count // halving) if halving else 1.0
        spec = reader.decoder(
            [time, channel] * reader.num_layers,
            [None] * count,
            norm,
            embedding_norm=norm,
            final_norm=replace(norm, eps=1e-5 * last),
            max_positions=UNBOUNDED,
        )
        return RwkvSpec(**{field.name: getattr(spec, field.name) for field in fields(spec)}, halving=halving)
