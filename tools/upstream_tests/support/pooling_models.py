"""Small models in place of those that upstream's tests of pooling models name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from minilm import extract_minilm
from safetensors.torch import load_file, save_file

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
# Ids that tests send are those of larger vocabularies.
_BERT = {**_SIZES, "vocab_size": 40000}
_DECODER = {
    **_SIZES, "vocab_size": 40000, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}  # fmt: skip
_TWO = {0: "Default", 1: "Spoiled"}
_PADDED = {"pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102}
_ROBERTA = {**_BERT, "max_position_embeddings": 514, "pad_token_id": 1, "type_vocab_size": 1}
# By kind: transformers' class of the configuration, of the model, and the sizes; far from 0, so that scores differ.
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "cross": ("BertConfig", "ForSequenceClassification", {**_BERT, "id2label": {0: "LABEL_0"}}),
    # As its scores are the logits.
    "cross logits": (
        "BertConfig",
        "ForSequenceClassification",
        {**_BERT, "id2label": {0: "LABEL_0"}, "sbert_ce_default_activation_function": "torch.nn.Identity"},
    ),
    "classes": ("BertConfig", "ForSequenceClassification", {**_BERT, "id2label": _TWO}),
    "decoder classes": ("Qwen3Config", "ForSequenceClassification", {**_DECODER, **_PADDED, "id2label": _TWO}),
    "roberta classes": ("XLMRobertaConfig", "ForSequenceClassification", {**_ROBERTA, "num_labels": 3}),
    "several": (
        "RobertaConfig",
        "ForSequenceClassification",
        {**_ROBERTA, "num_labels": 4, "problem_type": "multi_label_classification"},
    ),
    "gpt2 classes": (
        "GPT2Config",
        "ForSequenceClassification",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 40000, **_PADDED},
    ),
    "words": ("BertConfig", "ForTokenClassification", {**_BERT, "num_labels": 5}),
    "modernbert words": ("ModernBertConfig", "ForTokenClassification", {**_BERT, **_PADDED, "num_labels": 5}),
    "roberta words": ("XLMRobertaConfig", "ForTokenClassification", {**_ROBERTA, "num_labels": 5}),
    "decoder": ("Qwen3Config", "ForCausalLM", {**_DECODER, **_PADDED}),
}


def make_pooling_models(folder: Path) -> dict[str, Path]:
    """Folders by kind: _KINDS, "embed" (all-MiniLM-L6-v2), "matryoshka" (the same, to be cut), "decoder embed",
    "both ways", whose tokens see those after them, and "colbert"."""
    embed = folder / "minilm"
    extract_minilm(embed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(embed)
    models = {"embed": embed, "matryoshka": folder / "matryoshka", "decoder embed": folder / "decoder-embed"}
    models["both ways"] = folder / "both-ways"
    shutil.copytree(embed, models["matryoshka"])
    config = json.loads((embed / "config.json").read_text())
    (models["matryoshka"] / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [256]}))
    for kind, (config_class, head, sizes) in _KINDS.items():
        torch.manual_seed(0)
        models[kind] = folder / kind.replace(" ", "-")
        own = getattr(transformers, config_class)(**{"initializer_range": 0.5, **sizes})
        model = getattr(transformers, config_class.removesuffix("Config") + head)(own)
        model.save_pretrained(models[kind])
        own_tokenizer = tokenizer
        if "Bert" not in config_class and "Roberta" not in config_class:
            # transformers gives a decoder's folder the decoder's own class of tokenizers, whatever it names.
            names = {name: getattr(tokenizer, name) for name in ("cls_token", "sep_token", "pad_token", "unk_token")}
            own_tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **names)
        own_tokenizer.save_pretrained(models[kind])
    models["colbert"] = folder / "colbert"
    _add_colbert(embed, models["colbert"])
    _add_pooling(models["decoder"], models["decoder embed"])
    shutil.copytree(models["decoder embed"], models["both ways"])
    path = models["both ways"] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_causal": False}))
    return models


def _add_colbert(model: Path, folder: Path) -> None:
    """A folder as Stanford's, with a projection of the model's hidden states to 96 numbers."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        if (model / name).is_file():
            shutil.copy(model / name, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "architectures": ["HF_ColBERT"], "dim": 96}))
    weights = {f"bert.{name}": value for name, value in load_file(model / "model.safetensors").items()}
    torch.manual_seed(0)
    save_file({**weights, "linear.weight": torch.randn(96, raw["hidden_size"])}, folder / "model.safetensors")


def _add_pooling(model: Path, folder: Path) -> None:
    """A copy that is a sentence-transformers folder as Qwen3-Embedding's: the last token, normalised."""
    shutil.copytree(model, folder)
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": index, "name": str(index), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for index, (place, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
