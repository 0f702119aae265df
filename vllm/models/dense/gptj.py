"""GPT-J and CodeGen: attention and MLP of one norm in parallel, interleaved rotary positions."""

from __future__ import annotations

from torch import Tensor

from vllm.config.checkpoint.config import RopeConfig
from vllm.models.checkpoint_names import CheckpointNames, Parts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.dense.gpt2 import GPT2_MASKS, GPT2_RENAMES
from vllm.models.spec import DecoderSpec, RotarySpec


class GPTJForCausalLM(DecoderForCausalLM):
    """github.com/kingoflolz/mesh-transformer-jax."""

    names = CheckpointNames(
        (
            *GPT2_RENAMES,
            (r"\.attn\.([qkv]_proj)\.", r".self_attn.\1."),
            (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.mlp\.fc_in\.", ".mlp.up_proj."),
            (r"\.mlp\.fc_out\.", ".mlp.down_proj."),
        ),
        ignored=GPT2_MASKS,
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("rotary", "scale_attn_weights")
        rotary = RotarySpec(reader.integer("rotary_dim", default=reader.head_dim), RopeConfig(), interleaved=True)
        return reader.decoder(
            reader.attention(bias=False, rotary=rotary),
            reader.mlp("gelu_new", bias=True, gated=False, size=4 * reader.hidden_size),
            reader.layer_norm(),
            block="parallel",
            head_bias=True,
        )


# Shards that the checkpoints were trained in.
_NUM_PARTS = 4


def split_parts(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """qkv_proj: for each of the parts, its queries, its values and its keys."""
    if not name.endswith("self_attn.qkv_proj.weight"):
        yield name, tensor
        return
    parts = tensor.unflatten(0, (_NUM_PARTS, 3, -1))
    for index, part in enumerate(("q_proj", "v_proj", "k_proj")):
        yield name.replace("qkv_proj", part), parts[:, index].flatten(0, 1)


class CodeGenForCausalLM(GPTJForCausalLM):
    """arXiv:2203.13474: queries, values and keys are stored in four parts."""

    names = CheckpointNames(
        ((r"\.attn\.qkv_proj\.", ".self_attn.qkv_proj."), *GPTJForCausalLM.names.renames),
        (split_parts,),
        r".*\.attn\.causal_mask",
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        if reader.num_heads % _NUM_PARTS:
            raise reader.refuse("n_head", f"it must be a multiple of {_NUM_PARTS}")
        return super().describe(reader)
