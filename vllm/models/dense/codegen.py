"""CodeGen (arXiv:2203.13474): GPT-J with queries, values and keys stored in four parts."""

from __future__ import annotations

from torch import Tensor

from vllm.models.checkpoint_names import CheckpointNames, Parts
from vllm.models.config_reader import ConfigReader
from vllm.models.dense.gptj import GPTJForCausalLM
from vllm.models.spec import DecoderSpec

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
