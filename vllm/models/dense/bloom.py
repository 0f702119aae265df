"""BLOOM (arXiv:2211.05100): ALiBi, LayerNorm also of the embeddings, plain MLP."""

from __future__ import annotations

from vllm.models.alibi import alibi_slopes
from vllm.models.checkpoint_names import MEGATRON, CheckpointNames, split_grouped_qkv
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, MlpSpec


class BloomForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"^transformer\.", ""),
            (r"^h\.", "model.layers."),
            (r"^word_embeddings\.", "model.embed_tokens."),
            (r"^word_embeddings_layernorm\.", "model.embed_norm."),
            (r"^ln_f\.", "model.norm."),
            *MEGATRON,
        ),
        (split_grouped_qkv,),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        # They choose between ways to compute the same.
        reader.ignore(
            "slow_but_exact", "skip_bias_add", "skip_bias_add_qkv", "bias_dropout_fusion", "masked_softmax_fusion"
        )
        reader.ignore("offset_alibi", "attention_softmax_in_fp32", "seq_length", "unk_token_id", "n_inner")
        norm = reader.layer_norm()
        attention = reader.attention(rotary=False, bias=True, alibi_slopes=alibi_slopes(reader.num_heads))
        return reader.decoder(
            attention,
            MlpSpec(4 * reader.hidden_size, "gelu_new", gated=False, up_bias=True, down_bias=True),
            norm,
            tied=True,
            # ALiBi has no limit; trained were sequences of this length.
            max_positions=reader.integer("seq_length", default=2048),
            embedding_norm=norm,
            residual_of_norm=reader.boolean("apply_residual_connection_post_layernorm", default=False),
        )
