"""xLSTM Large (arXiv:2503.13427): a matrix memory in place of attention, and an MLP."""

from __future__ import annotations

from torch import Tensor

from vllm.models.checkpoint_names import CheckpointNames, Parts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.hybrids.options import UNBOUNDED
from vllm.models.hybrids.weights import spec_of
from vllm.models.spec import DecoderSpec, MlpSpec, NormSpec
from vllm.models.states.specs import MlstmSpec

_RENAMES = (
    (r"^(backbone\.)?embeddings\.", "model.embed_tokens."),
    (r"^(backbone\.)?out_norm\.", "model.norm."),
    (r"^(backbone\.)?blocks\.", "model.layers."),
    (r"\.norm_mlstm\.", ".input_layernorm."),
    (r"\.norm_ffn\.", ".post_attention_layernorm."),
    (r"\.mlstm_layer\.([qkv])\.", r".self_attn.\1_proj."),
    (r"\.mlstm_layer\.ogate_preact\.", ".self_attn.gate_proj."),
    (r"\.mlstm_layer\.([if])gate_preact\.", r".self_attn.\1_proj."),
    (r"\.mlstm_layer\.multihead_norm\.", ".self_attn.norm."),
    (r"\.mlstm_layer\.", ".self_attn."),
    (r"\.ffn\.proj_up_gate\.", ".mlp.gate_proj."),
    (r"\.ffn\.proj_up\.", ".mlp.up_proj."),
    (r"\.ffn\.proj_down\.", ".mlp.down_proj."),
)


def _of_heads(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """The norm's weight, which is by head."""
    if name.endswith(".self_attn.norm.weight"):
        tensor = tensor.unflatten(0, (spec_of(MlstmSpec, spec).heads, -1))
    yield name, tensor


class xLSTMForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, (_of_heads,))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        # How kernels go about it.
        reader.ignore("chunkwise_kernel", "sequence_kernel", "step_kernel", "chunk_size", "return_last_states", "mode")
        reader.ignore("autocast_kernel_dtype", "norm_reduction_force_float32", "max_inference_chunksize")
        reader.ignore("force_bos_token_insert", "igate_bias_init_range", "mlstm_round_up_to_multiple_of")
        reader.only("weight_mode", "single")
        reader.only("inference_state_dtype", "float32")
        reader.only("use_bias", False)
        reader.only("add_out_norm", True)
        reader.only("add_post_blocks_norm", True)
        size, heads = reader.hidden_size, reader.integer("num_heads", default=8)
        reader.only("embedding_dim", size)
        reader.only("num_blocks", reader.num_layers)
        keys = int(size * reader.number("qk_dim_factor", default=0.5))
        values = int(size * reader.number("v_dim_factor", default=1.0))
        if keys % heads or values % heads:
            raise reader.refuse("num_heads", f"it must divide the widths of keys and values, {keys} and {values}")
        reader.only("head_dim", values // heads)
        eps = reader.number("norm_eps", default=1e-6)
        reader.only("cell_norm_eps", eps)
        memory = MlstmSpec(
            heads,
            keys // heads,
            values // heads,
            cap=reader.number("gate_soft_cap", default=15.0),
            eps=reader.number("eps", default=1e-6),
            norm_eps=eps,
        )
        multiple = reader.integer("ffn_round_up_to_multiple_of", default=64)
        inner = int((size * reader.number("ffn_proj_factor", default=2.667) + multiple - 1) // multiple * multiple)
        return reader.decoder(
            memory,
            MlpSpec(inner, "silu"),
            NormSpec("rms", eps),
            logits_softcap=reader.optional_number("output_logit_soft_cap", default=30.0),
            max_positions=reader.integer("max_position_embeddings", default=UNBOUNDED),
        )
