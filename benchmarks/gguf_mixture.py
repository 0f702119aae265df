"""A random Qwen3-MoE as a GGUF file, of blocks as llama.cpp's quantiser gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

_K_BLOCK, _BLOCK = 256, 32


def make_gguf(path: Path, shape: dict[str, Any], experts: int, chosen: int, width: int, kind: str) -> None:
    """Write the file.

    Args:
        shape: sizes by their names in config.json; the head is the embedding.
        experts, chosen, width: how many there are, a token's, and the size of each.
        kind: "Q8_0", or "Q4_K": matrices whose rows its blocks of 256 do not fill, and the embedding, are Q8_0 then.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3moe")
    hidden, heads, head_dim = shape["hidden_size"], shape["num_attention_heads"], shape["head_dim"]
    kv_heads, layers = shape["num_key_value_heads"], shape["num_hidden_layers"]
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(chosen * width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(chosen)
    writer.add_expert_feed_forward_length(width)
    _add_tokens(writer, shape["vocab_size"])
    random = np.random.default_rng(0)

    def add(name: str, *sizes: int, kind: str = kind) -> None:
        fits = sizes[-1] % _K_BLOCK == 0
        kind = kind if fits else "Q8_0"
        blocks = _q4_k if kind == "Q4_K" else _q8_0
        writer.add_tensor(name, blocks(random, sizes), raw_dtype=gguf.GGMLQuantizationType[kind])

    def add_plain(name: str, *sizes: int) -> None:
        values = np.ones(sizes) if len(sizes) == 1 else random.normal(0, 0.02, sizes)
        writer.add_tensor(name, values.astype(np.float32))

    add("token_embd.weight", shape["vocab_size"], hidden, kind="Q8_0")
    add_plain("output_norm.weight", hidden)
    for layer in range(layers):
        stem = f"blk.{layer}"
        for norm, size in (("attn", hidden), ("ffn", hidden), ("attn_q", head_dim), ("attn_k", head_dim)):
            add_plain(f"{stem}.{norm}_norm.weight", size)
        add(f"{stem}.attn_q.weight", heads * head_dim, hidden)
        add(f"{stem}.attn_k.weight", kv_heads * head_dim, hidden)
        add(f"{stem}.attn_v.weight", kv_heads * head_dim, hidden)
        add(f"{stem}.attn_output.weight", hidden, heads * head_dim)
        add_plain(f"{stem}.ffn_gate_inp.weight", experts, hidden)
        add(f"{stem}.ffn_gate_exps.weight", experts, width, hidden)
        add(f"{stem}.ffn_up_exps.weight", experts, width, hidden)
        add(f"{stem}.ffn_down_exps.weight", experts, hidden, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokens(writer: Any, size: int) -> None:
    """Bytes, one pair of them, and words that no text has."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "Ġt"]
    tokens += [f"<{number}>" for number in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * size)
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(size - 1)


def _q8_0(random: np.random.Generator, sizes: tuple[int, ...]) -> np.ndarray:
    """A block of 32: a float16 scale and as many int8; the standard deviation is 0.02."""
    count = sizes[-1] // _BLOCK
    blocks = np.empty((*sizes[:-1], count, 2 + _BLOCK), dtype=np.uint8)
    blocks[..., :2] = np.float16([0.02 / 73]).view(np.uint8)
    blocks[..., 2:] = random.integers(-127, 128, (*sizes[:-1], count, _BLOCK), dtype=np.int8).view(np.uint8)
    return blocks.reshape(*sizes[:-1], -1)


def _q4_k(random: np.random.Generator, sizes: tuple[int, ...]) -> np.ndarray:
    """A block of 256: float16 factors of scales and of offsets, eight of either in 6 bits, all of them 32, and the
    codes; the standard deviation is 0.02."""
    count = sizes[-1] // _K_BLOCK
    blocks = np.empty((*sizes[:-1], count, 4 + 12 + _K_BLOCK // 2), dtype=np.uint8)
    scale = 0.02 / (32 * 4.61)
    blocks[..., :4] = np.float16([scale, 7.5 * scale]).view(np.uint8)
    # The last four have their upper bits beside those of the first four.
    blocks[..., 4:16] = [32 | 128] * 8 + [0] * 4
    blocks[..., 16:] = random.integers(0, 256, (*sizes[:-1], count, _K_BLOCK // 2), dtype=np.uint8)
    return blocks.reshape(*sizes[:-1], -1)
