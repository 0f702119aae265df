"""LongCat-Flash (arXiv:2509.01322): two blocks of latent attention and an MLP a layer, and a mixture beside them, whose
further experts give what they take."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from torch import Tensor

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.models.attention import RotaryTables
from vllm.models.checkpoint_names import CheckpointNames, Parts, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import Decoder, DecoderForCausalLM, DecoderLayer, enter
from vllm.models.latent_options import read_latent_attention
from vllm.models.moe import make_mlp
from vllm.models.spec import DecoderSpec, MoeSpec
from vllm.ops.elementwise import added

_BLOCK = re.compile(r"(model\.layers)\.(\d+)\.(self_attn|mlps|input_layernorm|post_attention_layernorm)\.([01])\.")
_BESIDE = re.compile(r"(model\.layers)\.(\d+)\.mlp\.")
_EXPERT = re.compile(r".*\.experts\.(\d+)\..*")


@dataclass(frozen=True)
class LongcatSpec(DecoderSpec):
    """`beside`: the mixture of every other layer, from the first on. It takes what the layer's MLP takes, and what it
    gives is added to the residual stream after the next layer's MLP."""

    beside: MoeSpec | None = None


class LongcatLayer(DecoderLayer):
    """A block; the stream comes with the mixture's result, which is None between the pairs of blocks."""

    def __init__(self, spec: DecoderSpec, index: int, tables: RotaryTables) -> None:
        super().__init__(spec, index, tables)
        assert isinstance(spec, LongcatSpec) and spec.beside is not None
        self.beside = None if index % 2 else make_mlp(spec.beside, spec.hidden_size)

    def forward(
        self,
        positions: Tensor,
        stream: Any,
        pending: Tensor | None,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None,
        given: Tensor | None = None,
    ) -> tuple[Any, Tensor | None]:
        """See DecoderLayer.forward; `stream` and the result are pairs."""
        hidden, result = stream
        if self.beside is None:
            hidden, pending = super().forward(positions, hidden, pending, kv_cache, attn, rows)
            return (added(hidden, result if rows is None else result.index_select(0, rows)), None), pending
        assert self.self_attn is not None and self.mlp is not None and rows is None
        hidden, x, norm = enter(self.input_layernorm, hidden, pending)
        attended = self.self_attn(positions, x, kv_cache, attn, None, norm)
        hidden, x, norm = enter(self.post_attention_layernorm, hidden, attended)
        x = x if norm is None else norm(x)
        return (hidden, self.beside(x)), self.mlp(x)


class LongcatDecoder(Decoder):
    layer_class = LongcatLayer

    def spread(self, hidden: Tensor) -> Any:
        return hidden, None

    def join(self, stream: Any) -> Tensor:
        return stream[0]


def _in_pairs(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """Blocks as layers of their own, without weights of experts that give what they take."""
    assert isinstance(spec, LongcatSpec) and spec.beside is not None
    if block := _BLOCK.match(name):
        part = "mlp" if block[3] == "mlps" else block[3]
        name = f"{block[1]}.{2 * int(block[2]) + int(block[4])}.{part}.{name[block.end() :]}"
    elif beside := _BESIDE.match(name):
        name = f"{beside[1]}.{2 * int(beside[2])}.beside.{name[beside.end() :]}"
        if (expert := _EXPERT.fullmatch(name)) and int(expert[1]) >= spec.beside.num_experts:
            return
        if name.endswith("experts.gate_up_proj"):
            tensor = tensor[: spec.beside.num_experts]
    yield name, tensor


class LongcatFlashForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        ((r"\.router\.classifier\.", ".gate."), (r"\.router\.e_score", ".gate.e_score")),
        (_in_pairs, split_experts()),
        ignored=r"model\.mtp\..*",
    )
    decoder_class: ClassVar[type[Decoder]] = LongcatDecoder

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        count = 2 * reader.integer("num_layers", default=28)
        if reader.integer("num_hidden_layers", default=count) != count:
            raise reader.refuse("num_hidden_layers", f"it must be twice num_layers, {count}")
        reader.num_layers = count
        reader.only("attention_method", "MLA")
        reader.only("zero_expert_type", "identity")
        for name in ("mla_scale_q_lora", "mla_scale_kv_lora"):
            reader.only(name, True)
        attention = read_latent_attention(reader, interleaved=True, theta=1e7)
        if attention.query_dim is None:
            raise reader.refuse("q_lora_rank", "queries are made of a latent")
        attention = replace(
            attention,
            query_scale=(reader.hidden_size / attention.query_dim) ** 0.5,
            latent_scale=(reader.hidden_size / attention.latent_dim) ** 0.5,
        )
        mlp = reader.mlp(bias=False, size=12288)
        beside = reader.mixture(
            reader.integer("expert_ffn_hidden_size", default=2048),
            512,
            12,
            num_identities=reader.count("zero_expert_num", default=256),
            correction=True,
            router_is_float32=True,
            scale=reader.number("routed_scaling_factor", default=6.0),
        )
        spec = reader.decoder(attention, mlp, reader.norm(eps=1e-5))
        return LongcatSpec(**{each.name: getattr(spec, each.name) for each in fields(spec)}, beside=beside)
