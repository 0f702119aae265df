"""GGUF's mixtures of experts: their configurations, and the matrices of single experts, which the file stacks."""

from __future__ import annotations

from vllm.model_executor.model_loader.gguf_config_parts import Config, is_biased, modern, with_head_dim
from vllm.model_executor.model_loader.gguf_header import GGUFHeader

NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""The checkpoint's names of tensors beside the experts' own."""

_STACKS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def expert_pieces(header: GGUFHeader, part: str, shape: tuple[int, ...]) -> list[tuple[str, slice, tuple[int, ...]]]:
    """Of a stack [E, N, K], each expert's name, rows and shape; of other tensors nothing. ValueError: the header means
    another number of experts."""
    if part not in _STACKS:
        return []
    count = header.need("expert_count")
    if len(shape) != 3 or shape[0] != count:
        name = f"{header.architecture}.expert_count"
        raise ValueError(f"{header.file.path.name}: tensors {part} have shape {shape}, but {name} is {count}")
    _, rows, width = shape
    return [
        (f"mlp.experts.{index}.{_STACKS[part]}", slice(index * rows, (index + 1) * rows), (rows, width))
        for index in range(count)
    ]


def mixtral(h: GGUFHeader) -> Config:
    return with_head_dim(h) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": h.need("expert_count"),
        "num_experts_per_tok": h.need("expert_used_count"),
        "sliding_window": h.get("attention.sliding_window"),
    }


def qwen2_moe(h: GGUFHeader) -> Config:
    return _qwen(modern(h), h, norm_topk_prob=False) | {
        "shared_expert_intermediate_size": h.rows("blk.0.ffn_up_shexp.weight"),
        "qkv_bias": is_biased(h),
    }


def qwen3_moe(h: GGUFHeader) -> Config:
    return _qwen(with_head_dim(h), h, norm_topk_prob=True)


def _qwen(config: Config, h: GGUFHeader, norm_topk_prob: bool) -> Config:
    return config | {
        "num_experts": h.need("expert_count"),
        "num_experts_per_tok": h.need("expert_used_count"),
        "moe_intermediate_size": _width(h),
        "norm_topk_prob": norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def olmoe(h: GGUFHeader) -> Config:
    return modern(h) | {
        "intermediate_size": _width(h),
        "num_experts": h.need("expert_count"),
        "num_experts_per_tok": h.need("expert_used_count"),
        "norm_topk_prob": False,
        "clip_qkv": h.get("attention.clamp_kqv"),
    }


def _width(h: GGUFHeader) -> int:
    """Outputs of an expert's first matrices."""
    shape = h.file.tensors["blk.0.ffn_up_exps.weight"].shape if h.has("blk.0.ffn_up_exps.weight") else ()
    if len(shape) != 3:
        raise ValueError(
            f"{h.file.path.name}: tensor blk.0.ffn_up_exps.weight must stack matrices, got {shape or None}"
        )
    return shape[1]
