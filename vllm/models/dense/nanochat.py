"""nanochat (github.com/karpathy/nanochat): norms without weights, squared ReLU, bounded logits."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from vllm.models.checkpoint_names import TWO_LAYERS, CheckpointNames, Parts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


def turn_back(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """Its rotation is by the negative angle: ours of heads whose halves are exchanged, in queries and keys alike."""
    if re.search(r"self_attn\.[qk]_proj", name):
        first, second = tensor.unflatten(0, (-1, 2, spec.cached[0].head_dim // 2)).unbind(1)
        tensor = torch.stack((second, first), dim=1).flatten(0, 2)
    yield name, tensor


class NanoChatForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(TWO_LAYERS, (turn_back,))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.norm(weight=False)
        return reader.decoder(
            reader.attention(qk_norm=norm, qk_norm_after_rotary=True),
            reader.mlp("relu2", bias=False, gated=False),
            norm,
            embedding_norm=norm,
            logits_softcap=reader.optional_number("final_logit_softcapping", default=15.0),
        )
