"""Small models in place of those that upstream's tests of pooling models name."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from minilm import extract_minilm

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def make_pooling_models(folder: Path) -> dict[str, Path]:
    """Folders by kind: "embed" (all-MiniLM-L6-v2), "cross" (one label) and "classes" (two)."""
    embed = folder / "minilm"
    extract_minilm(embed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(embed)
    models = {"embed": embed}
    for kind, labels in (("cross", {0: "LABEL_0"}), ("classes", {0: "Default", 1: "Spoiled"})):
        torch.manual_seed(0)
        # Far from 0, so that scores differ.
        # Ids that tests send are those of larger vocabularies.
        config = transformers.BertConfig(**_SIZES, vocab_size=40000, id2label=labels, initializer_range=0.5)
        models[kind] = folder / kind
        transformers.BertForSequenceClassification(config).save_pretrained(models[kind])
        tokenizer.save_pretrained(models[kind])
    return models
