"""Mamba (arXiv:2312.00752), Falcon Mamba (arXiv:2410.05355) and Mamba 2 (arXiv:2405.21060), Codestral Mamba among its
models: layers without attention and MLP."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.hybrids.options import UNBOUNDED, time_step_limits
from vllm.models.hybrids.weights import BACKBONE, MAMBA_RENAMES, split_mamba, split_mamba2
from vllm.models.spec import DecoderSpec, NormSpec
from vllm.models.states.specs import Mamba2Spec, MambaSpec

_RENAMES = (
    *BACKBONE,
    (r"(layers\.\d+)\.norm\.", r"\1.input_layernorm."),
    (r"\.mixer\.", ".mamba."),
    *MAMBA_RENAMES,
)


class MambaForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, (split_mamba,))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        _ignore_training(reader)
        reader.ignore("use_mambapy", "use_falcon_mambapy", "use_associative_scan")
        rank = reader.get("time_step_rank", default="auto")
        mamba = MambaSpec(
            reader.integer("intermediate_size", "d_inner", default=cls._expand(reader)),
            reader.integer("state_size", default=16),
            -(-reader.hidden_size // 16) if rank == "auto" else reader.integer("time_step_rank"),
            reader.integer("conv_kernel", default=4),
            cls._inner_norm(reader),
            conv_bias=reader.boolean("use_conv_bias", default=True),
            bias=reader.boolean("use_bias", default=False),
        )
        return _decoder(reader, mamba, tied=True)

    @staticmethod
    def _expand(reader: ConfigReader) -> int:
        return int(reader.number("expand", default=2) * reader.hidden_size)

    @staticmethod
    def _inner_norm(reader: ConfigReader) -> NormSpec | None:
        return None


class FalconMambaForCausalLM(MambaForCausalLM):
    """Steps, B and C are normalised, without weights."""

    @staticmethod
    def _inner_norm(reader: ConfigReader) -> NormSpec | None:
        return NormSpec("rms", reader.number("mixer_rms_eps", default=1e-6), weight=False)


class Mamba2ForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, (split_mamba2,))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        _ignore_training(reader)
        reader.ignore("expand", "chunk_size", "time_step_rank", "norm_before_gate")
        groups = reader.integer("n_groups", default=8)
        has_bias = reader.boolean("use_bias", default=False)
        mamba = Mamba2Spec(
            heads=reader.integer("num_heads", default=128),
            head_dim=reader.integer("head_dim", default=64),
            state_dim=reader.integer("state_size", default=128),
            groups=groups,
            kernel_size=reader.integer("conv_kernel", default=4),
            norm_groups=groups,
            norm_eps=reader.norm(eps=1e-5).eps,
            conv_bias=reader.boolean("use_conv_bias", default=True),
            in_bias=has_bias,
            out_bias=has_bias,
            dt_limits=time_step_limits(reader),
        )
        reader.only("intermediate_size", mamba.heads * mamba.head_dim)
        return _decoder(reader, mamba)


def _ignore_training(reader: ConfigReader) -> None:
    """Options that make weights and change nothing computed with them; residuals have the model's dtype here."""
    reader.ignore("residual_in_fp32", "rescale_prenorm_residual", "time_step_min", "time_step_max", "time_step_floor")
    reader.ignore("time_step_scale", "time_step_init_scheme", "fused_add_norm", "pad_vocab_size_multiple")
    reader.ignore("layer_types")
    reader.only("rms_norm", True)
    reader.only("hidden_act", "silu")


def _decoder(reader: ConfigReader, mamba: MambaSpec | Mamba2Spec, tied: bool = False) -> DecoderSpec:
    """Layers of nothing else."""
    context = reader.integer("max_position_embeddings", default=UNBOUNDED)
    return reader.decoder(mamba, [None] * reader.num_layers, reader.norm(eps=1e-5), tied, max_positions=context)
