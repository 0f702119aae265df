"""ERNIE 4.5's mixtures (huggingface.co/baidu/ERNIE-4.5-21B-A3B-PT): interleaved rotary positions, a softmax with a
correction of the choice."""

from __future__ import annotations

from torch import Tensor

from vllm.models.checkpoint_names import CheckpointNames, Parts, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.prediction_layers import ERNIE
from vllm.models.spec import DecoderSpec


def _flat_correction(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """[1, E] as [E]."""
    yield name, tensor.flatten() if name.endswith(".e_score_correction_bias") else tensor


class Ernie4_5_MoeForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        ((r"\.mlp\.(gate\.)?moe_statics\.", ".mlp.gate."),), (_flat_correction, split_experts()), r".*mtp.*"
    )
    prediction = ERNIE

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("moe_capacity", "moe_use_aux_free", "num_nextn_predict_layers")
        reader.only("moe_gate", "topk", "top2_fused")
        bias = reader.boolean("use_bias", default=False)
        rotary = reader.rotary(reader.head_dim, theta=500000.0, interleaved=True)
        attention = reader.attention(bias=bias, rotary=rotary)
        size = reader.integer("moe_intermediate_size", default=1536)
        mixture = reader.mixture(
            size,
            64,
            6,
            correction=True,
            renormalised=True,
            least_sum=reader.number("moe_norm_min", default=1e-12),
            shared_size=reader.count("moe_num_shared_experts", default=2) * size,
            mlp_bias=bias,
            router_is_float32=True,
        )
        first = reader.count("moe_layer_start_index", default=1)
        last = reader.get("moe_layer_end_index", default=27)
        last = reader.num_layers - 1 if last == -1 else last
        step = reader.integer("moe_layer_interval", default=1)
        kinds = ["dense" if (i + 1) % step or not first <= i <= last else "sparse" for i in range(reader.num_layers)]
        mlps = reader.mixed(mixture, reader.mlp(bias=bias, size=12288), kinds)
        return reader.decoder(attention, mlps, reader.norm(eps=1e-5), tied=True, head_bias=bias)
