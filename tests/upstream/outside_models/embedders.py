"""Models that embed by a pooler: upstream's, one of their own, and attention to all of a text."""

from __future__ import annotations

import torch
from outside_models.biased import BiasedModel
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import EncoderOnlyAttention
from vllm.model_executor.layers.pooler import DispatchPooler, Pooler, PoolingParamsUpdate
from vllm.model_executor.models.interfaces_base import attn_type, default_pooling_type
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix


@default_pooling_type(seq_pooling_type="MEAN")
class MeanEmbedder(nn.Module):
    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.model = BiasedModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.pooler = self.make_pooler(vllm_config)

    def make_pooler(self, vllm_config):
        return DispatchPooler.for_embedding(vllm_config.model_config.pooler_config)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def load_weights(self, weights):
        return AutoWeightsLoader(self, skip_prefixes=["lm_head."]).load_weights(weights)


@attn_type("encoder_only")
class TwoWayEmbedder(MeanEmbedder):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for index, layer in enumerate(self.model.layers):
            own = layer.self_attn
            own.attn = EncoderOnlyAttention(
                own.num_heads,
                own.head_dim,
                own.head_dim**-0.5,
                num_kv_heads=own.num_kv_heads,
                prefix=f"model.layers.{index}.self_attn.attn",
            )


class LongestPooler(Pooler):
    """The greatest of each value over the tokens, and the sum of the ids."""

    def get_supported_tasks(self):
        return {"embed"}

    def get_pooling_updates(self, task):
        return PoolingParamsUpdate(requires_token_ids=True)

    def forward(self, hidden_states, pooling_metadata):
        parts = hidden_states.split(pooling_metadata.prompt_lens.tolist())
        ids = pooling_metadata.get_prompt_token_ids()
        return [torch.cat([part.max(0).values, own.sum()[None].to(part)]) for part, own in zip(parts, ids, strict=True)]


class OwnEmbedder(MeanEmbedder):
    def make_pooler(self, vllm_config):
        return LongestPooler()


class BareEmbedder(nn.Module):
    """It has no layers of attention here: transformers' model runs in it, one text at a time."""

    is_pooling_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        from transformers import AutoModel

        super().__init__()
        self.backbone = AutoModel.from_config(vllm_config.model_config.hf_config, attn_implementation="eager")
        self.pooler = LongestPooler()

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs):
        return self.backbone(input_ids=input_ids[None], position_ids=positions[None]).last_hidden_state[0]

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            name = name.replace("model.", "backbone.", 1)
            if name in params:
                params[name].data.copy_(tensor)
                loaded.add(name)
        return loaded
