"""A mixture of experts with norms of queries and keys, as upstream's documentation has models written."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import MixtureOfExperts, SupportsLoRA
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, make_layers, maybe_prefix


class SparseMlp(nn.Module):
    def __init__(self, config, prefix):
        super().__init__()
        self.gate = ReplicatedLinear(config.hidden_size, config.num_experts, bias=False, prefix=f"{prefix}.gate")
        self.experts = FusedMoE(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            reduce_results=False,
            renormalize=config.norm_topk_prob,
            prefix=f"{prefix}.experts",
        )
        self.tp_size = get_tensor_model_parallel_world_size()

    def forward(self, hidden_states):
        router_logits, _ = self.gate(hidden_states)
        out = self.experts(hidden_states=hidden_states, router_logits=router_logits)
        return tensor_model_parallel_all_reduce(out) if self.tp_size > 1 else out


class Layer(nn.Module):
    def __init__(self, vllm_config, prefix):
        super().__init__()
        config, ranks = vllm_config.model_config.hf_config, get_tensor_model_parallel_world_size()
        self.heads, self.kv_heads, self.width = (
            config.num_attention_heads // ranks,
            config.num_key_value_heads // ranks,
            config.hidden_size // config.num_attention_heads,
        )
        self.qkv = QKVParallelLinear(
            config.hidden_size,
            self.width,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=False,
            prefix=f"{prefix}.qkv",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.width, config.hidden_size, bias=False, prefix=f"{prefix}.o_proj"
        )
        self.q_norm, self.k_norm = (RMSNorm(self.width, eps=config.rms_norm_eps) for _ in range(2))
        self.rotary_emb = get_rope(self.width, config.max_position_embeddings, True, config.rope_parameters)
        self.attn = Attention(
            self.heads,
            self.width,
            self.width**-0.5,
            self.kv_heads,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.attn",
        )
        self.mlp = SparseMlp(config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, positions, hidden_states, residual):
        hidden_states, residual = (
            (self.input_layernorm(hidden_states), hidden_states)
            if residual is None
            else self.input_layernorm(hidden_states, residual)
        )
        qkv, _ = self.qkv(hidden_states)
        q, k, v = qkv.split([self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.width], dim=-1)
        q = self.q_norm(q.view(*q.shape[:-1], self.heads, self.width)).view(q.shape)
        k = self.k_norm(k.view(*k.shape[:-1], self.kv_heads, self.width)).view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        hidden_states, _ = self.o_proj(self.attn(q, k, v))
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class MixtureModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.num_experts = config.num_experts
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, org_num_embeddings=None)
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers, lambda prefix: Layer(vllm_config, prefix), prefix=f"{prefix}.layers"
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return self.norm(hidden_states, residual)[0]

    def load_weights(self, weights):
        experts = FusedMoE.make_expert_params_mapping(
            self,
            ckpt_gate_proj_name="gate_proj",
            ckpt_down_proj_name="down_proj",
            ckpt_up_proj_name="up_proj",
            num_experts=self.num_experts,
        )
        params, loaded = dict(self.named_parameters()), set()
        for name, loaded_weight in weights:
            stacked = [
                (part, shard) for part, shard in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")) if part in name
            ]
            chosen = [each for each in experts if each[1] in name]
            if stacked:
                name = name.replace(stacked[0][0], "qkv")
                params[name].weight_loader(params[name], loaded_weight, stacked[0][1])
            elif chosen:
                param_name, weight_name, expert_id, shard_id = chosen[0]
                name = name.replace(weight_name, param_name)
                params[name].weight_loader(params[name], loaded_weight, name, shard_id=shard_id, expert_id=expert_id)
            else:
                getattr(params[name], "weight_loader", default_weight_loader)(params[name], loaded_weight)
            loaded.add(name)
        return loaded


class MixtureForCausalLM(nn.Module, SupportsLoRA, MixtureOfExperts):
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"model.": "decoder."}, orig_to_new_substr={".self_attn.": "."}
    )
    packed_modules_mapping: ClassVar = {"qkv": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.decoder = MixtureModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "decoder"))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids):
        return self.decoder.embed_tokens(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs):
        return self.decoder(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states):
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights):
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
