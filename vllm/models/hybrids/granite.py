"""Granite 4 hybrid (huggingface.co/ibm-granite/granite-4.0-h-small): Mamba 2 in most layers of a Granite mixture, and
attention in the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from vllm.models.checkpoint_names import CheckpointNames, Parts
from vllm.models.config_reader import ConfigReader
from vllm.models.dense.granite import GraniteForCausalLM
from vllm.models.hybrids.options import layer_kinds, mamba2_of_hybrid
from vllm.models.hybrids.weights import MAMBA_RENAMES, split_mamba2
from vllm.models.mixtures.granite import RENAMES, TRANSFORMS, mixture
from vllm.models.spec import AnyMixer, AttentionSpec, DecoderSpec, MlpSpec, MoeSpec


def _of_dense(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """Without experts what all tokens take is the MLP."""
    yield name.replace(".shared_experts.", ".") if isinstance(spec.mlps[0], MlpSpec) else name, tensor


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    names = CheckpointNames((*MAMBA_RENAMES, *RENAMES), (split_mamba2, *TRANSFORMS, _of_dense))

    @classmethod
    def layers(cls, reader: ConfigReader) -> Sequence[AnyMixer]:
        (attention, *_) = super().layers(reader)
        assert isinstance(attention, AttentionSpec)
        reader.only("position_embedding_type", "rope", "nope")
        reader.only("normalization_function", "rmsnorm")
        if reader.get("position_embedding_type") != "rope":
            attention = replace(attention, rotary=None)
        default = ["linear_attention"] * reader.num_layers
        kinds = layer_kinds(reader, default, "linear_attention", "full_attention")
        mamba = mamba2_of_hybrid(reader, norm_eps=reader.norm().eps)
        return [mamba if kind == "linear_attention" else attention for kind in kinds]

    @classmethod
    def mlp(cls, reader: ConfigReader) -> MlpSpec | MoeSpec:
        shared_size = reader.integer("shared_intermediate_size", default=1024)
        if reader.count("num_local_experts", default=8):
            return mixture(reader, shared_size)
        reader.ignore("num_experts_per_tok", "intermediate_size")
        return reader.mlp(bias=False, sizes=(shared_size,))
