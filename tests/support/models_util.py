"""Small random models of every architecture, and a driver that runs a model over a paged cache by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata
from vllm.attention.select import select_backend
from vllm.config import ModelConfig
from vllm.config.checkpoint.config import HFConfig, load_hf_config
from vllm.distributed.communicator import ALONE
from vllm.layers.attention import use_backend
from vllm.layers.kv_cache_spec import kv_cache_specs
from vllm.layers.state import allocate_states
from vllm.loader import get_model

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "opt")
SIZES = ("small", "odd")
BLOCK_SIZE = 16

_LLAMA_LIKE = {
    "small": {
        "vocab_size": 199,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "odd": {
        "vocab_size": 503,
        "hidden_size": 72,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 24,
        "tie_word_embeddings": False,
    },
}
_OPT = {
    "small": {
        "vocab_size": 199,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "odd": {
        "vocab_size": 503,
        "hidden_size": 72,
        "ffn_dim": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "word_embed_proj_dim": 40,
        "do_layer_norm_before": False,
    },
}


def make_hf_model(arch: str, size: str = "small", seed: int = 0, **overrides: Any) -> Any:
    """A transformers model in float32 with random weights, biases and norms included.

    Args:
        arch: one of ARCHITECTURES.
        size: one of SIZES; "odd" has widths that are no multiples of a vector, and an untied head.
        overrides: fields of the configuration.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    fields = dict((_OPT if arch == "opt" else _LLAMA_LIKE)[size])
    fields.update(max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    if arch == "mistral":
        fields["sliding_window"] = None
    if arch == "llama" and size == "odd":
        fields.update(attention_bias=True, mlp_bias=True)
    fields.update(overrides)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[arch](**fields)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.15 if parameter.ndim > 1 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            if parameter.ndim == 1:
                parameter.add_(0.5)
    return model


def make_random_model(arch: str, size: str, folder: Path, seed: int = 0, **overrides: Any) -> tuple[Path, Any]:
    """`make_hf_model`, saved with save_pretrained; the folder and the transformers model."""
    model = make_hf_model(arch, size, seed, **overrides)
    model.save_pretrained(folder)
    return folder, model


def load_model(folder: Path, dtype: str = "float32", device: str = "cpu", **fields: Any) -> tuple[nn.Module, HFConfig]:
    """The folder's model by the code under test; `fields` replace those of its ModelConfig."""
    config = load_hf_config(folder)
    wanted = ModelConfig(
        model=folder.name, path=str(folder), tokenizer="", hf_config=config, dtype=dtype, max_model_len=256
    )
    return get_model(replace(wanted, **fields), device), config


def random_prompts(vocab_size: int, lengths: tuple[int, ...] = (1, 16, 5, 37, 2), seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def hf_logits(model: Any, prompts: list[list[int]]) -> list[Tensor]:
    """transformers' logits [length, V] of each prompt, run alone."""
    return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


@torch.inference_mode()
def paged_logits(
    model: torch.nn.Module,
    config: HFConfig,
    prompts: list[list[int]],
    chunk: int | None = None,
    last_only: bool = False,
    dtype: str = "float32",
    device: str = "cpu",
) -> list[Tensor]:
    """Logits of ragged prompts, run in one batch over a cache whose blocks lie in a scrambled order.

    Args:
        chunk: tokens of each prompt that a step takes; None = all.
        last_only: ask the model for each prompt's last row only (through logits_rows, in every step).

    Returns:
        [length, V] for each prompt, or [1, V] with last_only, on the CPU.
    """
    tables = _scrambled_tables(prompts)
    caches = _make_caches(model, config, sum(len(table) for table in tables), getattr(torch, dtype), device)
    allocate_states(model, len(prompts), torch.device(device))
    results: list[list[Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while any(count < len(prompt) for count, prompt in zip(done, prompts, strict=True)):
        rows = [r for r, prompt in enumerate(prompts) if done[r] < len(prompt)]
        spans = [(done[r], min(len(prompts[r]), done[r] + (chunk or len(prompts[r])))) for r in rows]
        ids, positions, attn = _step_inputs([prompts[r] for r in rows], [tables[r] for r in rows], spans, device)
        attn.state_slots = torch.tensor(rows, device=device)
        ends = attn.query_start_loc[1:].long() - 1
        finished = [i for i, r in enumerate(rows) if spans[i][1] == len(prompts[r])]
        hidden = model(ids, positions, caches, attn, ends[finished] if last_only else None)
        logits = model.compute_logits(hidden)
        if last_only:
            for index, i in enumerate(finished):
                results[rows[i]].append(logits[index : index + 1])
        else:
            for i, r in enumerate(rows):
                results[r].append(logits[attn.query_start_loc[i] : attn.query_start_loc[i + 1]])
        for r, (_, end) in zip(rows, spans, strict=True):
            done[r] = end
    return [torch.cat(parts).cpu() for parts in results]


def _scrambled_tables(prompts: list[list[int]]) -> list[list[int]]:
    counts = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    order = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist())
    return [[next(order) for _ in range(count)] for count in counts]


def _make_caches(
    model: nn.Module, config: HFConfig, num_blocks: int, dtype: torch.dtype, device: str
) -> list[tuple[Tensor, ...]]:
    backend = select_backend("auto", device, dtype, config.head_dim, BLOCK_SIZE)
    use_backend(model, backend)
    caches: list[tuple[Tensor, ...]] = []
    for spec in kv_cache_specs(model, config, ALONE):
        if spec.shared_with is not None:
            caches.append(caches[spec.shared_with])
            continue
        shapes = spec.cache_shapes(backend, num_blocks, BLOCK_SIZE)
        # NaN shows when something is read that was never written.
        caches.append(tuple(torch.full(shape, torch.nan, dtype=dtype, device=device) for shape in shapes))
    return caches


def _step_inputs(
    prompts: list[list[int]], tables: list[list[int]], spans: list[tuple[int, int]], device: str
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for prompt, table, (start, end) in zip(prompts, tables, spans, strict=True):
        ids += prompt[start:end]
        positions += range(start, end)
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]
        starts.append(len(ids))
    seq_lens = [end for _, end in spans]
    width = -(-max(seq_lens) // BLOCK_SIZE)
    with torch.device(device):
        attn = AttentionMetadata(
            slot_mapping=torch.tensor(slots),
            block_table=torch.tensor([(table + [0] * width)[:width] for table in tables], dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            max_query_len=max(end - start for start, end in spans),
            max_seq_len=max(seq_lens),
        )
        return torch.tensor(ids, dtype=torch.int32), torch.tensor(positions), attn
