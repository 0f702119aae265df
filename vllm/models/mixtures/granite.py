"""Granite's mixtures (huggingface.co/ibm-granite/granite-3.0-1b-a400m-instruct), also with an MLP that all tokens take,
and with windows."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames, split_evenly, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.dense.granite import GraniteForCausalLM, GraniteSWAForCausalLM
from vllm.models.spec import MoeSpec

RENAMES = (
    (r"\.block_sparse_moe\.input_linear\.weight", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear\.weight", ".mlp.experts.down_proj"),
    (r"\.block_sparse_moe\.router\.(layer\.)?", ".mlp.gate."),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.shared_mlp\.input_linear\.", ".mlp.shared_experts.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.shared_experts.down_proj."),
)
_SHARED = [f"shared_experts.{part}_proj" for part in ("gate_up", "gate", "up")]
TRANSFORMS = split_experts(), split_evenly(*_SHARED)
_NAMES = CheckpointNames(RENAMES, TRANSFORMS)


def mixture(reader: ConfigReader, shared_size: int = 0) -> MoeSpec:
    """Granite's, with an MLP of this size that all tokens take; 0: none."""
    size = reader.integer("intermediate_size", default=11008)
    return reader.mixture(size, 8, 2, compares_logits=True, shared_size=shared_size)


class GraniteMoeForCausalLM(GraniteForCausalLM):
    names = _NAMES

    @classmethod
    def mlp(cls, reader: ConfigReader) -> MoeSpec:
        return mixture(reader)


class GraniteMoeSharedForCausalLM(GraniteForCausalLM):
    names = _NAMES

    @classmethod
    def mlp(cls, reader: ConfigReader) -> MoeSpec:
        return mixture(reader, reader.count("shared_intermediate_size", default=0))


class GraniteMoeSWAForCausalLM(GraniteSWAForCausalLM):
    names = _NAMES
    default_eps = 1e-6
    is_tied = False
    mlp = GraniteMoeSharedForCausalLM.mlp
