"""OLMo hybrid: OLMo 3's attention in some layers, and linear attention by the gated delta rule in the others, in blocks
like Llama's."""

from __future__ import annotations

import re

from torch import Tensor

from vllm.models.checkpoint_names import CheckpointNames, Parts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.hybrids.options import delta_rule
from vllm.models.hybrids.weights import WITH_PREFIX, split_delta_conv
from vllm.models.spec import Block, DecoderSpec

_RENAMES = (
    WITH_PREFIX,
    (r"\.attention_layer_norm\.", ".input_layernorm."),
    (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    (r"\.linear_attn\.conv1d\.", ".self_attn.conv."),
    (r"\.linear_attn\.(A_log|dt_bias)$", r".self_attn.decays.\1"),
    (r"\.linear_attn\.g_proj\.", ".self_attn.z_proj."),
    (r"\.linear_attn\.o_norm\.", ".self_attn.norm."),
    (r"\.linear_attn\.o_proj\.", ".self_attn.out_proj."),
    (r"\.linear_attn\.", ".self_attn."),
)
_NORM = re.compile(r"(model\.layers\.(\d+))\.(post_attention|post_feedforward)_layernorm\.weight")


def _norms_of_outputs(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """Norms of what attention and its MLP give."""
    match = _NORM.fullmatch(name)
    if match is not None and spec.blocks is not None and spec.blocks[int(match[2])] == "output":
        name = f"{match[1]}.{'attention' if match[3] == 'post_attention' else 'mlp'}_output_norm.weight"
    yield name, tensor


class OlmoHybridForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, (split_delta_conv, _norms_of_outputs), r"mtp\..*")

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
        norm = reader.norm()
        # A base that is null stands for no positions, and none for the usual one.
        rope = reader.get("rope_parameters", default={})
        has_positions = rope.get("rope_theta", 10000.0) is not None
        attention = reader.attention(rotary=has_positions, qk_norm=norm, qk_norm_over="width")
        default = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(reader.num_layers)]
        if "full_attention" not in default:
            default[-1] = "full_attention"
        kinds = reader.kinds("layer_types", default, "linear_attention", "full_attention")
        heads = reader.num_heads
        key_dim = int(0.75 * reader.hidden_size / reader.integer("linear_num_key_heads", default=heads))
        key_dim = reader.integer("linear_key_head_dim", default=key_dim)
        scale = 2.0 if reader.boolean("linear_allow_neg_eigval", default=True) else 1.0
        linear = delta_rule(reader, heads, heads, key_dim, 2 * key_dim, 1e-5, scale)
        layers = [linear if kind == "linear_attention" else attention for kind in kinds]
        blocks: list[Block] = ["pre" if kind == "linear_attention" else "output" for kind in kinds]
        return reader.decoder(layers, reader.mlp(bias=False), norm, blocks=tuple(blocks))
