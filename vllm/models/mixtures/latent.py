"""DeepSeek V2 and V3 and models made like them: latent attention, MLPs in the first layers and mixtures after them."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from vllm.models.checkpoint_names import CheckpointNames, Parts, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.latent_options import read_latent_attention
from vllm.models.mixtures.deepseek import deepseek_mixture, shared_size
from vllm.models.prediction_layers import DEEPSEEK
from vllm.models.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec, MoeSpec

_NAMES = CheckpointNames(transforms=(split_experts(),), has_further_layers=True)


def _latent_decoder(
    reader: ConfigReader,
    attention: LatentAttentionSpec | AttentionSpec,
    mixture: MoeSpec,
    size: int,
    dense: int,
    eps: float,
) -> DecoderSpec:
    """Width of the MLPs, number of layers that have them, and the norms' epsilon are the family's defaults."""
    # Layers that predict further tokens are not run, and losses are of training.
    reader.ignore("num_nextn_predict_layers", "num_mtp_layers", "ep_size", "seq_aux")
    if reader.integer("moe_layer_freq", default=1) != 1:
        raise reader.refuse("moe_layer_freq", "every layer after the first ones is a mixture")
    kinds = reader.first_dense(min(reader.count("first_k_dense_replace", default=dense), reader.num_layers))
    mlps = reader.mixed(mixture, reader.mlp(bias=False, size=size), kinds)
    return reader.decoder(attention, mlps, reader.norm(eps=eps))


def _expect(reader: ConfigReader, name: str, *values: str) -> str:
    """The option's value, the first of `values` if there is none. ValueError: it is another one."""
    value = reader.get(name, default=values[0])
    if value not in values:
        raise reader.refuse(name, f"it must be {' or '.join(values)}")
    return str(value)


class DeepseekV2ForCausalLM(DecoderForCausalLM):
    """DeepSeek V2 and V2 Lite (arXiv:2405.04434): experts by softmax. DeepSeek-OCR has usual attention."""

    names = _NAMES

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        groups: dict[str, Any] = {}
        reader.get("n_group", "topk_group")
        if _expect(reader, "topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy":
            groups = {"num_groups": reader.integer("n_group"), "num_groups_kept": reader.integer("topk_group")}
        _expect(reader, "scoring_func", "softmax")
        if reader.boolean("norm_topk_prob", default=False):
            raise reader.refuse("norm_topk_prob", "weights of experts are not renormalised")
        mixture = reader.mixture(
            reader.integer("moe_intermediate_size", default=1407),
            64,
            None,
            scale=reader.number("routed_scaling_factor", default=1.0),
            shared_size=shared_size(reader, "n_shared_experts", size=1407, count=2),
            router_is_float32=True,
            **groups,
        )
        if reader.boolean("use_mla", default=True):
            attention: Any = read_latent_attention(reader, interleaved=True, value_dim=128)
        else:
            attention = reader.attention()
        return _latent_decoder(reader, attention, mixture, 11008, 0, 1e-6)


def sigmoid_decoder(
    reader: ConfigReader,
    size: int,
    experts: int,
    chosen: int,
    mlp_size: int,
    dense: int,
    eps: float = 1e-6,
    value_dim: int = 128,
    **fields: Any,
) -> DecoderSpec:
    """DeepSeek V3's, with the family's defaults: width of an expert, how many there are and of a token, width of MLPs,
    how many layers have those, the norms' epsilon and a head's values. `fields` are those of `deepseek_mixture`."""
    _expect(reader, "scoring_func", "sigmoid")
    shared = shared_size(reader, "n_shared_experts", size=size)
    mixture = deepseek_mixture(reader, size, experts, chosen, shared_size=shared, router_is_float32=True, **fields)
    attention = read_latent_attention(reader, interleaved=True, value_dim=value_dim)
    return _latent_decoder(reader, attention, mixture, mlp_size, dense, eps)


class DeepseekV3ForCausalLM(DecoderForCausalLM):
    """DeepSeek V3 and R1 (arXiv:2412.19437), Kimi K2 (arXiv:2507.20534)."""

    names = _NAMES
    prediction = DEEPSEEK

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        _expect(reader, "topk_method", "noaux_tc")
        return sigmoid_decoder(reader, 2048, 256, 8, mlp_size=18432, dense=3, groups=(8, 4), scale=2.5)


def _without_norms_of_dense_layers(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """Published checkpoints have the norm in all layers."""
    found = re.match(r"model\.layers\.(\d+)\.mlp\.output_norm\.", name)
    if found is None or int(found[1]) >= len(spec.mlps) or isinstance(spec.mlps[int(found[1])], MoeSpec):
        yield name, tensor


class AXK1ForCausalLM(DecoderForCausalLM):
    """A.X K1 (huggingface.co/skt/A.X-K1): a mixture's sum is normalised. Published checkpoints have no correction."""

    names = CheckpointNames(
        ((r"(layers\.\d+)(\.mlp)?\.post_mlp_layernorm\.", r"\1.mlp.output_norm."),),
        (*_NAMES.transforms, _without_norms_of_dense_layers),
        has_further_layers=True,
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        # Whether there is a correction is in the files.
        reader.ignore("topk_method")
        return sigmoid_decoder(
            reader,
            2048,
            192,
            8,
            mlp_size=18432,
            dense=1,
            groups=(8, 4),
            scale=2.5,
            correction_may_lack=True,
            output_norm=reader.norm(eps=1e-6),
        )


class Glm4MoeLiteForCausalLM(DecoderForCausalLM):
    """GLM 4.7 Flash (huggingface.co/zai-org/GLM-4.7-Flash)."""

    names = _NAMES
    prediction = DEEPSEEK

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        _expect(reader, "topk_method", "noaux_tc")
        return sigmoid_decoder(reader, 1536, 64, 4, mlp_size=10240, dense=1, eps=1e-5, value_dim=256, scale=1.8)


class Mistral4ForCausalLM(DecoderForCausalLM):
    """Mistral Small 4 (huggingface.co/mistralai): experts by softmax; queries grow with their position's logarithm."""

    names = _NAMES

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.need("rope_parameters", "rope_scaling")
        mixture = deepseek_mixture(
            reader,
            2048,
            128,
            4,
            scores="softmax",
            correction=False,
            shared_size=shared_size(reader, "n_shared_experts", size=2048),
        )
        attention = read_latent_attention(reader, interleaved=True, value_dim=128, shares_rope=True, query_growth=True)
        return _latent_decoder(reader, attention, mixture, 12288, 0, 1e-6)
