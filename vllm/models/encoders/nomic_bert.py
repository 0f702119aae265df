"""NomicBERT (arXiv:2402.01613): BERT with rotary positions and gated MLPs, without biases."""

from __future__ import annotations

from typing import Any

from vllm.models.checkpoint_names import CheckpointNames, split_evenly
from vllm.models.config_reader import ConfigReader
from vllm.models.encoders.encoder import EncoderForPooling, EncoderSpec, encoder
from vllm.models.spec import MlpSpec

_RENAMES = (
    (r"^(nomic_bert|bert)\.", ""),
    (r"^emb_ln\.", "model.embeddings.LayerNorm."),
    (r"^embeddings\.", "model.embeddings."),
    (r"^encoder\.layers\.", "model.layers."),
    (r"\.attn\.Wqkv\.", ".qkv_proj."),
    (r"\.attn\.out_proj\.", ".o_proj."),
    (r"\.mlp\.fc11\.", ".mlp.up_proj."),
    (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    (r"\.norm1\.", ".attention_norm."),
    (r"\.norm2\.", ".output_norm."),
)
# The only values that are implemented, besides null.
_FIXED: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rotary", "rope", "absolute"),
    "prenorm": (False,),
    "parallel_block": (False,),
    "use_rms_norm": (False,),
    "causal": (False,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (),
    "rotary_scaling_factor": (),
    "num_experts": (0,),
    "moe_every_n_layers": (0,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}


class NomicBertModel(EncoderForPooling):
    names = CheckpointNames(_RENAMES, (split_evenly("qkv_proj", "q_proj", "k_proj", "v_proj"),))

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        for name, values in _FIXED.items():
            value = reader.get(name)
            if value is not None and value not in values:
                raise reader.refuse(name, f"it must be {' or '.join(map(repr, values)) or None}")
        reader.ignore("max_trained_positions", "pad_vocab_size_multiple", "fused_bias_fc", "fused_dropout_add_ln")
        reader.ignore("use_xentropy", "expert_choice_router", "ffn_div", "dense_seq_output")
        activation = reader.get("activation_function", "hidden_act", default="silu")
        qkv_bias = reader.boolean("qkv_proj_bias", default=False)
        rotary = reader.rotary(
            reader.head_dim,
            theta=1000.0,
            theta_names=("rotary_emb_base", "rope_theta"),
            share_names=("rotary_emb_fraction",),
        )
        size = reader.integer("intermediate_size", "n_inner", default=4 * reader.hidden_size)
        mlp = MlpSpec(
            size,
            _ACTIVATIONS.get(activation, activation),
            up_bias=reader.boolean("mlp_fc1_bias", default=False),
            down_bias=reader.boolean("mlp_fc2_bias", default=False),
        )
        return encoder(
            reader,
            mlp,
            eps=reader.number("layer_norm_eps", "layer_norm_epsilon", default=1e-12),
            context=reader.integer("max_position_embeddings", "n_positions", default=2048),
            num_types=reader.count("type_vocab_size", default=2),
            rotary=(rotary,) * reader.num_layers,
            qkv_bias=qkv_bias,
            out_bias=qkv_bias,
        )
