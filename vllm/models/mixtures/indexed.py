"""DeepSeek V3's kin whose tokens attend to the positions that an indexer chooses (arXiv:2512.02556): as many as
`index_topk`, so that a shorter sequence has all of them, and so long are contexts here. The indexer's weights are not
loaded."""

from __future__ import annotations

from dataclasses import replace

from vllm.config.checkpoint.config import HFConfig
from vllm.models.checkpoint_names import CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.mixtures.latent import sigmoid_decoder
from vllm.models.prediction_layers import DEEPSEEK
from vllm.models.spec import DecoderSpec


class _IndexedForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        transforms=(split_experts(),), ignored=r".*\.self_attn\.indexer\..*", has_further_layers=True
    )
    prediction = DEEPSEEK

    def __init__(self, config: HFConfig, max_model_len: int) -> None:
        longest = self.spec_of(config).max_positions
        if max_model_len > longest:
            raise ValueError(
                f"max_model_len must be at most index_topk, {longest}, beyond which tokens attend to a choice of "
                f"positions, which is not implemented; got {max_model_len}"
            )
        super().__init__(config, max_model_len)

    @staticmethod
    def _within_choice(reader: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
        """`spec` with contexts of which the indexer chooses all positions."""
        reader.kinds("layer_types", ["indexed_attention"] * reader.num_layers, "indexed_attention")
        reader.ignore("index_head_dim", "index_n_heads")
        return replace(spec, max_positions=min(spec.max_positions, reader.integer("index_topk", default=2048)))


class DeepseekV32ForCausalLM(_IndexedForCausalLM):
    """DeepSeek V3.2."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        spec = sigmoid_decoder(reader, 2048, 256, 8, mlp_size=18432, dense=3, groups=(8, 4), scale=2.5)
        return cls._within_choice(reader, spec)


class GlmMoeDsaForCausalLM(_IndexedForCausalLM):
    """GLM-5 (arXiv:2602.15763): some layers take an earlier one's choice."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("indexer_types", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
        spec = sigmoid_decoder(reader, 2048, 256, 8, mlp_size=12288, dense=3, eps=1e-5, value_dim=256, scale=2.5)
        return cls._within_choice(reader, spec)
