"""Tiny random encoders, and what is compared with them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from vllm import PoolingParams

SIZES = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
PROMPTS = [[5, 7, 9], [11, 12, 13, 14, 15, 16, 17], [3], [4, 5, 6], list(range(20, 60))]
# float32, summed in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def save(folder: Path, config: transformers.PretrainedConfig, auto=transformers.AutoModel) -> Path:
    """With a random model, biases and norms included."""
    torch.manual_seed(0)
    model = auto.from_config(config)
    with torch.no_grad():
        for values in model.parameters():
            values += 0.05 * torch.randn_like(values)
    model.save_pretrained(folder)
    return folder


def add_modules(folder: Path, mode: str, normalize: bool) -> None:
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    places = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": places[i], "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))


def tensors(outputs) -> list[torch.Tensor]:
    return [output.outputs.data for output in outputs]


TOKENS = PoolingParams(task="token_embed", use_activation=False)
# model_type: sizes under other names than SIZES'.
OTHERS = {
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "modernbert": {"local_attention": 16, "pad_token_id": 0, "classifier_pooling": "mean"},
    "nomic_bert": {},
    "jina_embeddings_v3": {},
    "gte": {},
    "eurobert": {"pad_token_id": 0},
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
    "mpnet": {"max_position_embeddings": 66},
    "deberta-v2": {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
}


def other_config(kind: str, **options) -> transformers.PretrainedConfig:
    return transformers.CONFIG_MAPPING[kind](**(SIZES | {"max_position_embeddings": 64} | OTHERS[kind] | options))
