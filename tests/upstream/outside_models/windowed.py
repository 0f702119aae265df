"""A decoder whose layers alternate between windows and whole contexts, by upstream's former spellings: norms of one
plus a weight, bounded scores and logits, a shared head, and its layers' weights by one loop."""

from __future__ import annotations

from torch import nn

from vllm.attention.layer import Attention
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import GeluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import extract_layer_index, maybe_prefix


class SelfAttention(nn.Module):
    def __init__(self, config, cache_config, prefix):
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        self.heads, self.kv_heads = config.num_attention_heads // ranks, config.num_key_value_heads // ranks
        width, total, total_kv = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = ColumnParallelLinear(config.hidden_size, total * width, bias=False, prefix=f"{prefix}.q_proj")
        self.k_proj = ColumnParallelLinear(config.hidden_size, total_kv * width, bias=False, prefix=f"{prefix}.k_proj")
        self.v_proj = ColumnParallelLinear(
            config.hidden_size, total_kv * width, bias=False, prefix=f"{prefix}.v_proj", return_bias=False
        )
        self.o_proj = RowParallelLinear(total * width, config.hidden_size, bias=False, prefix=f"{prefix}.o_proj")
        self.rotary_emb = get_rope(width, width, config.max_position_embeddings, config.rope_theta, True)
        is_local = config.layer_types[extract_layer_index(prefix)] == "sliding_attention"
        self.attn = Attention(
            self.heads,
            width,
            config.query_pre_attn_scalar**-0.5,
            num_kv_heads=self.kv_heads,
            cache_config=cache_config,
            per_layer_sliding_window=config.sliding_window if is_local else None,
            logits_soft_cap=config.attn_logit_softcapping,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions, hidden_states):
        (q, _), (k, _) = self.q_proj(hidden_states), self.k_proj(hidden_states)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, self.v_proj(hidden_states)))[0]


class Mlp(nn.Module):
    def __init__(self, config, prefix):
        super().__init__()
        sizes = [config.intermediate_size] * 2
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, sizes, bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, bias=False, prefix=f"{prefix}.down_proj"
        )
        self.act_fn = GeluAndMul(approximate="tanh")

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class Layer(nn.Module):
    def __init__(self, config, cache_config, prefix):
        super().__init__()
        self.self_attn = SelfAttention(config, cache_config, f"{prefix}.self_attn")
        self.mlp = Mlp(config, f"{prefix}.mlp")
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(self, f"{name}_layernorm", GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.post_attention_layernorm(self.self_attn(positions, hidden_states))
        hidden_states, residual = self.pre_feedforward_layernorm(hidden_states, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden_states)), residual


class WindowedModel(nn.Module):
    def __init__(self, config, cache_config, prefix=""):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.normalizer = config.hidden_size**0.5
        self.layers = nn.ModuleList(
            Layer(config, cache_config, f"{prefix}.layers.{index}") for index in range(config.num_hidden_layers)
        )
        self.norm = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def get_input_embeddings(self, input_ids):
        return self.embed_tokens(input_ids)

    def forward(self, input_ids, positions, inputs_embeds=None):
        hidden_states = (inputs_embeds or self.get_input_embeddings(input_ids)) * self.normalizer
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return self.norm(hidden_states, residual)[0]


class WindowedForCausalLM(nn.Module):
    def __init__(self, config, cache_config=None, quant_config=None, lora_config=None, prefix=""):
        super().__init__()
        self.config = config
        self.model = WindowedModel(config, cache_config, prefix=maybe_prefix(prefix, "model"))
        self.logits_processor = LogitsProcessor(config.vocab_size, soft_cap=config.final_logit_softcapping)

    def get_input_embeddings(self, input_ids):
        return self.model.get_input_embeddings(input_ids)

    def forward(self, input_ids, positions, kv_caches, attn_metadata, intermediate_tensors=None):
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states, sampling_metadata):
        return self.logits_processor(self.model.embed_tokens, hidden_states, sampling_metadata)

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        for name, loaded_weight in weights:
            for shard, part in enumerate(("gate_proj", "up_proj")):
                if part in name:
                    name = name.replace(part, "gate_up_proj")
                    params[name].weight_loader(params[name], loaded_weight, shard)
                    break
            else:
                if "lm_head" in name:
                    continue
                loader = getattr(params[name], "weight_loader", default_weight_loader)
                loader(params[name], loaded_weight)
