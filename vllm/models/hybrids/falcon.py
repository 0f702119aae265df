"""Falcon-H1 (arXiv:2507.22448): attention and Mamba 2 beside each other in every layer, and factors on its products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from vllm.config.checkpoint.config import HFConfig
from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.hybrids.options import mamba2_of_hybrid
from vllm.models.hybrids.weights import MAMBA_RENAMES, split_mamba2
from vllm.models.spec import BesideSpec, DecoderSpec

_RENAMES = (
    (r"\.self_attn\.", ".self_attn.attention."),
    *((pattern, new.replace(".self_attn.", ".self_attn.state.")) for pattern, new in MAMBA_RENAMES),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
    (r"\.final_layernorm\.", ".norm."),
)


class FalconH1ForCausalLM(DecoderForCausalLM):
    """Factors are on the weights that are kept."""

    names = CheckpointNames(_RENAMES, (split_mamba2,))

    def __init__(self, config: HFConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self._factors = _factors(ConfigReader(config))

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Our names and tensors of a checkpoint's one, times its factor."""
        for own, value in super().checkpoint_tensors(name, tensor):
            layer_name = own.rpartition(".layers.")[2].partition(".")[2]
            factor = self._factors.get(layer_name, 1.0)
            yield own, value if factor == 1.0 else value.float() * factor

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("num_logits_to_keep", "layer_types", "mamba_use_mlp", "mlp_expansion_factor")
        reader.ignore("time_step_min", "time_step_max", "time_step_floor", "time_step_rank")
        _factors(reader)
        gate_first = not reader.boolean("mamba_norm_before_gate", default=True)
        is_normed = reader.boolean("mamba_rms_norm", default=False)
        fields: dict[str, Any] = {} if is_normed else {"norm_groups": 0}
        state = mamba2_of_hybrid(
            reader,
            inner=1024,
            gate_first=gate_first or not is_normed,
            out_bias=reader.boolean("projectors_bias", default=False),
            **fields,
        )
        return reader.decoder(
            BesideSpec(reader.attention(), state),
            reader.mlp(size=14336),
            reader.norm(eps=1e-5),
            embedding_scale=reader.number("embedding_multiplier", default=1.0),
            logits_scale=reader.number("lm_head_multiplier", default=1.0),
        )


def _factors(reader: ConfigReader) -> dict[str, float]:
    """By the name of a layer's tensor, what its values are multiplied with."""

    def number(name: str) -> float:
        return reader.number(name, default=1.0)

    def numbers(name: str, count: int) -> list[float]:
        found = reader.get(name, default=[1.0] * count)
        if (
            not isinstance(found, list)
            or len(found) != count
            or not all(isinstance(each, int | float) for each in found)
        ):
            raise reader.refuse(name, f"it must have {count} numbers")
        return found

    inward, own_inward = number("attention_in_multiplier"), number("ssm_in_multiplier")
    keys, outward, own_outward = (
        number(name) for name in ("key_multiplier", "attention_out_multiplier", "ssm_out_multiplier")
    )
    gate, down = numbers("mlp_multipliers", 2)
    attention, state = "self_attn.attention", "self_attn.state"
    # On inputs, which biases do not have, and on results.
    layers = {f"{attention}.{part}_proj": (inward, keys if part == "k" else 1.0) for part in "qkv"}
    parts = zip(("z", "x", "b", "c", "dt"), numbers("ssm_multipliers", 5), strict=True)
    layers |= {f"{state}.{part}_proj": (own_inward, factor) for part, factor in parts}
    layers |= {f"{attention}.o_proj": (1.0, outward), f"{state}.out_proj": (1.0, own_outward)}
    layers |= {"mlp.gate_proj": (1.0, gate), "mlp.down_proj": (1.0, down)}
    weights = {f"{name}.weight": before * after for name, (before, after) in layers.items()}
    return weights | {f"{name}.bias": after for name, (_, after) in layers.items()}
