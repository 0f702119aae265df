"""The dense decoder with a short convolution behind the first norm of each block, which has a state."""

from __future__ import annotations

import torch
from outside_models.biased import BiasedForCausalLM
from torch import nn

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid

WIDTH = 3


class Convolution(MambaBase):
    def __init__(self, size: int, prefix: str) -> None:
        super().__init__()
        self.size, self.prefix = size, prefix
        self.weight = nn.Parameter(torch.empty(size, WIDTH), requires_grad=False)
        config = get_current_vllm_config()
        config.compilation_config.static_forward_context[prefix] = self
        self.model_config, self.cache_config = config.model_config, config.cache_config
        self.kv_cache = (torch.tensor([]),)

    def get_state_shape(self):
        return MambaStateShapeCalculator.short_conv_state_shape(1, self.size, WIDTH)

    def get_state_dtype(self):
        return MambaStateDtypeCalculator.short_conv_state_dtype(
            self.model_config.dtype, self.cache_config.mamba_cache_dtype
        )

    def forward(self, hidden_states):
        output = torch.empty_like(hidden_states)
        # As a custom operation finds its layer.
        get_forward_context().no_compile_layers[self.prefix].forward_cuda(hidden_states, output)
        return output

    def forward_cuda(self, hidden_states, output):
        context = get_forward_context()
        meta = context.attn_metadata[self.prefix]
        pool = self.kv_cache[context.virtual_engine][0]
        count = meta.num_decode_tokens
        tail = pool[meta.state_indices_tensor[:count].long()]
        window = torch.cat([tail, hidden_states[:count, None]], dim=1)
        output[:count] = hidden_states[:count] + (window * self.weight.T).sum(1)
        pool[meta.state_indices_tensor[:count].long()] = window[:, 1:]
        starts = meta.query_start_loc_p.tolist() if meta.num_prefills else [0]
        for slot, start, stop in zip(meta.state_indices_tensor[count:].tolist(), starts, starts[1:], strict=False):
            rows = hidden_states[count + start : count + stop]
            padded = torch.cat([rows.new_zeros(WIDTH - 1, self.size), rows])
            output[count + start : count + stop] = rows + convolved(padded, self.weight)
            pool[slot] = padded[-(WIDTH - 1) :]


def convolved(padded: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T + WIDTH - 1, H] -> [T, H]."""
    return (padded.unfold(0, WIDTH, 1) * weight).sum(-1)


class StatefulForCausalLM(BiasedForCausalLM, HasInnerState, IsHybrid):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        size = vllm_config.model_config.hf_config.hidden_size
        for index, layer in enumerate(self.model.layers):
            layer.convolution = Convolution(size, f"model.layers.{index}.convolution")
            layer.self_attn = Behind(layer.convolution, layer.self_attn)

    def load_weights(self, weights):
        renamed = ((name.replace(".self_attn.", ".self_attn.attention."), tensor) for name, tensor in weights)
        return super().load_weights(renamed)


class Behind(nn.Module):
    def __init__(self, convolution: nn.Module, attention: nn.Module) -> None:
        super().__init__()
        self.convolution, self.attention = (convolution,), attention

    def forward(self, positions, hidden_states):
        return self.attention(positions, self.convolution[0](hidden_states))
