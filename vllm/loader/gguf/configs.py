"""config.json of a GGUF file, from its header."""

from __future__ import annotations

from vllm.loader.gguf.architectures import ARCHITECTURES, REFUSED
from vllm.loader.gguf.config_parts import NULL, Config
from vllm.loader.gguf.encoders import classifier
from vllm.loader.gguf.file import GGUFFile
from vllm.loader.gguf.header import GGUFHeader
from vllm.loader.gguf.special import special_ids
from vllm.loader.gguf.unread import check_unread


def hf_config(file: GGUFFile, dtype: str) -> Config:
    """The contents of config.json; ValueError for an unsupported architecture, or a value that the header lacks."""
    architecture = file.metadata.get("general.architecture", "")
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise ValueError(f"{file.path.name}: general.type must be model, got {kind!r}")
    if (reason := REFUSED.get(architecture)) is not None:
        raise ValueError(f"{file.path.name}: general.architecture={architecture} is not supported: {reason}")
    if (row := ARCHITECTURES.get(architecture)) is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"{file.path.name}: general.architecture must be one of {known}, got {architecture!r}")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path.name} has no tensor token_embd.weight")
    header = GGUFHeader(file)
    config = {
        "architectures": [row.name],
        "model_type": row.model_type,
        "dtype": dtype,
        "vocab_size": header.rows("token_embd.weight"),
        "tie_word_embeddings": not header.has("output.weight"),
        **row.config(header),
        **special_ids(file),
    }
    _check_rotated(header, config)
    config = classifier(header, config)
    if row.is_causal and header.get("attention.causal", True) is False:
        config["is_causal"] = False
    check_unread(header, config)
    return {key: None if value is NULL else value for key, value in config.items() if value is not None}


def _check_rotated(h: GGUFHeader, config: Config) -> None:
    """ValueError: the header rotates a part of each head in an architecture that rotates all of it."""
    rope = config.get("rope_parameters") or {}
    ropes = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
    is_whole = "qk_rope_head_dim" not in config and any("partial_rotary_factor" not in rope for rope in ropes)
    if is_whole and (rotated := h.get("rope.dimension_count", h.head_dim)) != h.head_dim:
        raise h.wrong("rope.dimension_count", f"must be the size of a head, {h.head_dim}, got {rotated!r}")
