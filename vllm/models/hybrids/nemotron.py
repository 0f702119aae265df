"""Nemotron-H (arXiv:2504.03624) and Nemotron 3: each layer is Mamba 2, attention, an MLP or a mixture alone."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from vllm.models.checkpoint_names import CheckpointNames, Parts, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.hybrids.options import layer_kinds
from vllm.models.hybrids.weights import BACKBONE, MAMBA_RENAMES, split_mamba2
from vllm.models.mixtures.deepseek import deepseek_mixture
from vllm.models.spec import AnyMixer, DecoderSpec, MlpSpec, MoeSpec
from vllm.models.states.specs import Mamba2Spec

_OF_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_RENAMES = (
    *BACKBONE,
    (r"\.mixer\.(up_proj|down_proj|gate|experts|shared_experts)\.", r".mlp.\1."),
    (r"\.mixer\.", ".mamba."),
    *MAMBA_RENAMES,
)


def _norm_of_layer(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """A layer's one norm, which is that of what the layer has."""
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    if name.startswith("model.layers.") and rest == "norm.weight":
        own = "post_attention_layernorm" if spec.layers[int(layer)] is None else "input_layernorm"
        name = f"model.layers.{layer}.{own}.weight"
    yield name, tensor


class NemotronHForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, (split_mamba2, _norm_of_layer, split_experts()), r"mtp\..*")

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("num_logits_to_keep", "residual_in_fp32", "rescale_prenorm_residual", "use_mamba_kernels")
        reader.ignore("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
        reader.ignore("num_query_groups", "rope_theta")  # attention has no positions
        reader.only("attention_bias", False)
        letters = reader.get("hybrid_override_pattern", default="")
        default = [_OF_LETTERS.get(letter, letter) for letter in letters]
        kinds = layer_kinds(reader, default, "linear_attention", "full_attention", "mlp", "moe")
        if "moe" not in kinds:
            # These are options of mixtures, and there are none.
            reader.ignore(*_OF_MIXTURES)
        of_kind: dict[str, AnyMixer] = {}
        if "linear_attention" in kinds:
            of_kind["linear_attention"] = _mamba(reader)
        if "full_attention" in kinds:
            head_dim = reader.integer("head_dim", "attention_head_dim", default=128)
            of_kind["full_attention"] = reader.attention(head_dim=head_dim, rotary=False, bias=False)
        mlp = reader.mlp("relu2", activation_names=("mlp_hidden_act",), size=21504, gated=False)
        mlp_of_kind: dict[str, MlpSpec | MoeSpec] = {"mlp": mlp}
        if "moe" in kinds:
            mlp_of_kind["moe"] = _mixture(reader, mlp)
        layers = [of_kind.get(kind) for kind in kinds]
        return reader.decoder(layers, [mlp_of_kind.get(kind) for kind in kinds], reader.norm(eps=1e-5))


_OF_MIXTURES = (
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_overlap",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "norm_topk_prob",
)


def _mixture(reader: ConfigReader, mlp: MlpSpec) -> MoeSpec:
    """Nemotron 3's (arXiv:2512.20848): experts without gates, chosen as in DeepSeek V3."""
    reader.ignore("moe_shared_expert_overlap")
    if reader.get("moe_latent_size") is not None:
        raise reader.refuse("moe_latent_size", "experts over a latent are not implemented")
    reader.only("mlp_bias", False)
    reader.only("n_shared_experts", 1)
    mixture = deepseek_mixture(
        reader,
        7688,
        8,
        2,
        own_activation=mlp.activation,
        gated=False,
        router_is_float32=True,
    )
    width = reader.integer("moe_shared_expert_intermediate_size", default=7688)
    return replace(mixture, shared=replace(mlp, intermediate_size=width))


def _mamba(reader: ConfigReader) -> Mamba2Spec:
    reader.ignore(
        "expand", "mamba_expand", "chunk_size", "mamba_chunk_size", "mamba_proj_bias", "mamba_ssm_cache_dtype"
    )
    reader.ignore("time_step_max", "time_step_limit", "time_step_floor", "mamba_dt_max", "mamba_dt_limit")
    reader.ignore("mamba_dt_init_floor", "time_step_rank")
    reader.only("mamba_hidden_act", "silu")
    groups = reader.integer("n_groups", "mamba_n_groups", default=8)
    has_bias = reader.boolean("use_bias", default=False)
    heads = reader.integer("mamba_num_heads", default=128)
    if heads % groups:
        raise reader.refuse("n_groups", f"it must divide mamba_num_heads={heads}")
    return Mamba2Spec(
        heads,
        reader.integer("mamba_head_dim", default=64),
        reader.integer("ssm_state_size", default=128),
        groups,
        reader.integer("conv_kernel", "mamba_d_conv", default=4),
        norm_groups=groups,
        norm_eps=reader.norm(eps=1e-5).eps,
        conv_bias=reader.boolean("use_conv_bias", "mamba_conv_bias", default=True),
        in_bias=has_bias,
        out_bias=has_bias,
        dt_limits=(reader.number("time_step_min", "mamba_dt_min", default=0.001), math.inf),
    )
