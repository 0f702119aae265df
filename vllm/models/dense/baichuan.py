"""Baichuan and Baichuan 2 (arXiv:2309.10305): Llama with one matrix for queries, keys and values. The 13B models have
ALiBi; the heads of the second have rows of unit length."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vllm.models.alibi import alibi_slopes
from vllm.models.checkpoint_names import CheckpointNames, Parts, split_qkv
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec

_WIDTH_WITH_ROTARY = 4096
_VOCAB_WITH_UNIT_ROWS = 125696


def unit_rows(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """The head's rows, scaled to length one, where the vocabulary is that of Baichuan 2."""
    if name == "lm_head.weight" and spec.vocab_size == _VOCAB_WITH_UNIT_ROWS:
        tensor = F.normalize(tensor.float(), dim=-1).to(tensor.dtype)
    yield name, tensor


class BaichuanForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(((r"\.W_pack\.", ".qkv_proj."),), (split_qkv, unit_rows))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        max_positions = reader.integer("model_max_length", "max_position_embeddings")
        reader.ignore("z_loss_weight")
        if reader.hidden_size == _WIDTH_WITH_ROTARY or reader.get("rope_theta") is not None:
            attention = reader.attention(bias=False)
        else:
            attention = reader.attention(rotary=False, bias=False, alibi_slopes=alibi_slopes(reader.num_heads))
        return reader.decoder(attention, reader.mlp(bias=False), reader.norm(), max_positions=max_positions)
