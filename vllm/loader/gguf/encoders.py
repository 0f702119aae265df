"""GGUF's encoders and what pools: configurations, and the files of a sentence-transformers folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from vllm.loader.gguf.changes import rows_of
from vllm.loader.gguf.config_parts import FULL, NULL, SLIDING, Config, activation, with_head_dim
from vllm.loader.gguf.file import GGUFFile
from vllm.loader.gguf.header import GGUFHeader

_LABELS = "cls.output.weight"
# GGUF's numbers of ways to pool, with sentence-transformers' names: none, and a score of pairs, have none.
_MODES = {0: None, 1: "mean", 2: "cls", 3: "lasttoken", 4: None}
_RANK = 4
DENSE = ("dense_2", "dense_3")
"""Layers after the pooling."""


def num_labels(h: GGUFHeader) -> int:
    """Number of a classifier's labels; 0: the file has none."""
    if not h.has(_LABELS):
        return 0
    return rows_of(h.file.tensors[_LABELS].shape)


def _encoder(h: GGUFHeader, family: str) -> Config:
    config: Config = {
        "hidden_size": h.hidden,
        "num_hidden_layers": h.layers,
        "num_attention_heads": h.heads,
        "intermediate_size": h.uniform("feed_forward_length"),
        "max_position_embeddings": h.context,
    }
    if labels := num_labels(h):
        if not h.has("cls.weight"):
            raise ValueError(
                f"{h.file.path.name} has {_LABELS}, but no cls.weight: the layer before the classes is left out, and "
                "scores without it are others; load the model's Hugging Face checkpoint"
            )
        names = h.get("classifier.output_labels")
        names = names if isinstance(names, list) and len(names) == labels else [f"LABEL_{i}" for i in range(labels)]
        config["architectures"] = [f"{family}ForSequenceClassification"]
        config["id2label"] = {str(index): name for index, name in enumerate(names)}
    return config


def _with_types(h: GGUFHeader, family: str) -> Config:
    types = h.file.tensors.get("token_types.weight")
    eps = {"layer_norm_eps": h.need("attention.layer_norm_epsilon")}
    return _encoder(h, family) | eps | {"type_vocab_size": 0 if types is None else rows_of(types.shape)}


def bert(h: GGUFHeader) -> Config:
    """BERT, and RoBERTa, whose table begins with the first token's position."""
    return _with_types(h, "Bert") | {"max_position_embeddings": h.rows("position_embd.weight"), "hidden_act": "gelu"}


def nomic_bert(h: GGUFHeader) -> Config:
    return _with_types(h, "NomicBert") | {"rotary_emb_base": h.get("rope.freq_base", 1000.0)}


def jina_bert(h: GGUFHeader) -> Config:
    return _with_types(h, "JinaBert") | {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}


def jina_roberta(h: GGUFHeader) -> Config:
    rotary = {"position_embedding_type": "rotary", "rotary_emb_base": h.get("rope.freq_base", 10000.0)}
    return _with_types(h, "XLMRoberta") | rotary


def modern_bert(h: GGUFHeader) -> Config:
    every = h.get("attention.sliding_window_pattern", 3)
    slides = every if isinstance(every, list) else [index % every != 0 for index in range(h.layers)]
    return _encoder(h, "ModernBert") | {
        "norm_eps": h.need("attention.layer_norm_epsilon"),
        "hidden_activation": activation(h, "gelu"),
        "local_attention": h.need("attention.sliding_window"),
        "layer_types": [SLIDING if is_windowed else FULL for is_windowed in slides],
        "global_rope_theta": h.get("rope.freq_base", 160000.0),
        "local_rope_theta": h.get("rope.freq_base_swa", 10000.0),
        "classifier_pooling": _MODES.get(h.get("classifier.pooling_type")) or "cls",
    }


def euro_bert(h: GGUFHeader) -> Config:
    if num_labels(h):
        raise h.error(f"{_LABELS} of eurobert is not supported")
    # transformers' default is a token of the published vocabulary.
    return with_head_dim(h) | {"pad_token_id": NULL}


def classifier(h: GGUFHeader, config: Config) -> Config:
    """The configuration of a decoder as a judge of pairs, where the file has its rows for "yes" and "no"."""
    if not (labels := num_labels(h)) or "ForSequenceClassification" in config["architectures"][0]:
        return config
    if h.architecture != "qwen3" or labels != 2:
        problem = "is not supported: of decoders, only Qwen3's with two"
        raise h.error(f"{_LABELS} of {h.architecture} with {labels} labels {problem}")
    return config | {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}


def write_pooling(file: GGUFFile, folder: Path) -> None:
    """modules.json and what it names, as the header says how hidden states are pooled. ValueError: it is not known."""
    header = GGUFHeader(file)
    kind = header.get("pooling_type")
    if kind is not None and kind not in _MODES:
        raise header.wrong("pooling_type", f"must be one of {', '.join(map(str, _MODES))}, got {kind!r}")
    if kind == _RANK or num_labels(header):
        _write_template(file, folder)
        return
    dense = [name for name in DENSE if header.has(f"{name}.weight")]
    mode = _MODES.get(kind)
    if mode is None and not dense:
        return
    modules = ["Transformer"]
    if mode is not None:
        modules.append("Pooling")
        _write(folder / "1_Pooling/config.json", {f"pooling_mode_{_FLAGS[mode]}": True})
    for name in dense:
        _write_dense(file, name, folder / f"{len(modules)}_Dense")
        modules.append("Dense")
    modules.append("Normalize")
    entries = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{module}" * bool(index),
            "type": f"sentence_transformers.models.{module}",
        }
        for index, module in enumerate(modules)
    ]
    _write(folder / "modules.json", entries)


_FLAGS = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}


def _write_dense(file: GGUFFile, name: str, folder: Path) -> None:
    weight = file.dequantize(f"{name}.weight")
    tensors = {"linear.weight": np.ascontiguousarray(weight)}
    if f"{name}.bias" in file.tensors:
        tensors["linear.bias"] = np.ascontiguousarray(file.dequantize(f"{name}.bias"))
    outputs, inputs = weight.shape
    activation = "torch.nn.modules.linear.Identity"
    config = {"in_features": inputs, "out_features": outputs, "bias": len(tensors) > 1}
    _write(folder / "config.json", config | {"activation_function": activation})
    save_file(tensors, folder / "model.safetensors")


_PAIR = re.compile(r"(.*)\{query\}(.*)\{document\}(.*)", re.DOTALL)


def _write_template(file: GGUFFile, folder: Path) -> None:
    """The header's template of pairs, with {query} and {document}, as that of a CrossEncoder's folder."""
    template = file.metadata.get("tokenizer.chat_template.rerank")
    if template is None:
        return
    match = _PAIR.fullmatch(template) if isinstance(template, str) else None
    if match is None or any(template.count(name) > 1 for name in ("{query}", "{document}")):
        raise ValueError(
            f"{file.path.name}: tokenizer.chat_template.rerank must be a text with {{query}}, then {{document}}, once "
            f"each, got {template!r}"
        )
    # Texts as expressions: nothing in them is Jinja, and no newline is trimmed.
    first, second, third = (f"{{{{ {json.dumps(part, ensure_ascii=False)} }}}}" for part in match.groups())
    query, document = ("{{ messages[-2].content }}", "{{ messages[-1].content }}")
    (folder / "chat_template.jinja").write_text(first + query + second + document + third, encoding="utf-8")
    _write(
        folder / "modules.json",
        [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}],
    )
    message = {"method": "apply_chat_template", "format": "flat"}
    _write(folder / "sentence_bert_config.json", {"modality_config": {"message": message}})
    _write(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
