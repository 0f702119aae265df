"""The text decoder of a model that reads images or sound, too: it runs alone, as the architecture of its kind."""

from __future__ import annotations

import copy
import re
from typing import Any

MARK = "_text_part_of"
"""The option that `text_part` adds: the whole model's architecture."""
WHOLE = "_whole_config"
"""Another one: the whole model's config.json."""

_GEMMA_3 = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_GEMMA_3N = {
    "model_type": "gemma3n_text",
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
_GEMMA_4 = _GEMMA_3 | {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "sliding_window": 512,
}
_MISTRAL_3 = {
    "model_type": "mistral",
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
    "sliding_window": None,
}
_LLAMA_4 = {
    "model_type": "llama4_text",
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_QWEN_3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}
_QWEN_3_5_MOE = _QWEN_3_5 | {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
}
# By architecture, what its text_config leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": _GEMMA_3,
    "Gemma3nForConditionalGeneration": _GEMMA_3N,
    "Gemma4ForConditionalGeneration": _GEMMA_4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA_4
    | {"model_type": "gemma4_unified_text", "max_position_embeddings": 262144, "sliding_window": 1024},
    "Llama4ForConditionalGeneration": _LLAMA_4,
    "Mistral3ForConditionalGeneration": _MISTRAL_3,
    "Qwen3_5ForConditionalGeneration": _QWEN_3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_3_5_MOE,
}
WITH_TEXT_PART = frozenset(_DEFAULTS)
"""The architectures whose text decoder runs here."""

_ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "granite4_vision_text": "GraniteForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    # These differ from the decoders of text by the positions that pictures have.
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm_ocr_text": "Glm4ForCausalLM",
    "paddleocr_vl_text": "LlamaForCausalLM",
    "deepseek_ocr2_text": "DeepseekV2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
RETRIEVERS = frozenset({"ColPaliForRetrieval", "ColQwen2ForRetrieval"})
"""These embed each token: a whole model of `vlm_config`, and a linear layer after it."""
PROJECTION = "embedding_proj_layer."
"""The beginning of this layer's names."""

# Options of the whole model that its text decoder gets, if that does not have them itself.
_INHERITED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")
# Beginnings of names that only its tensors have; files of some models name its layers without the part that they are.
_OF_TEXT = ("lm_head.", "model.embed_tokens.", "model.layers.", "model.norm.")
# The head is the whole model's.
_OF_WHOLE = "tie_word_embeddings"


def text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """The text decoder's config.json for that of a whole model, which is otherwise returned as it is."""
    names = raw.get("architectures") or ()
    retriever, vlm = next((name for name in names if name in RETRIEVERS), None), raw.get("vlm_config")
    if retriever is not None and isinstance(vlm, dict):
        inner = vlm | {"architectures": ["ForConditionalGeneration"]}
        size = {"embedding_dim": raw.get("embedding_dim", 128)}
        inner |= {name: raw[name] for name in _INHERITED if raw.get(name) is not None}
        return text_part(inner) | size | {MARK: retriever, WHOLE: vlm}
    whole = next((name for name in names if name in WITH_TEXT_PART), None)
    text = raw.get("text_config")
    if whole is not None and isinstance(text, dict):
        own = _DEFAULTS[whole] | text
        if raw.get(_OF_WHOLE) is not None:
            own[_OF_WHOLE] = raw[_OF_WHOLE]
        architecture = _ARCHITECTURES.get(own["model_type"])
    else:
        whole = next((name for name in names if name.endswith("ForConditionalGeneration")), None)
        own = _by_transformers(raw) if whole is not None and "vision_config" in raw else {}
        architecture = next(iter(own.get("architectures") or ()), None)
    if whole is None or architecture is None:
        return raw
    for name in _INHERITED:
        if own.get(name) is None and raw.get(name) is not None:
            own[name] = raw[name]
    return own | {"architectures": [architecture], MARK: whole, WHOLE: raw}


def _by_transformers(raw: dict[str, Any]) -> dict[str, Any]:
    """The text decoder's options as transformers reads them; {} where it has none for the model, or no such decoder."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    kind = str(raw.get("model_type"))
    if kind not in CONFIG_MAPPING:
        return {}
    whole = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(raw))
    text = whole.get_text_config()
    architecture = _ARCHITECTURES.get(text.model_type) or causal.get(text.model_type)
    if not isinstance(architecture, str):
        return {}
    usual = PreTrainedConfig().to_dict()
    own = {name: value for name, value in text.to_dict().items() if name not in usual or usual[name] != value}
    own |= {"architectures": [architecture], "model_type": text.model_type}
    if raw.get(_OF_WHOLE) is not None:
        own[_OF_WHOLE] = whole.tie_word_embeddings  # some classes take the text decoder's word, too
    if kind == "paligemma":
        # The whole model says by its prompts which tokens see those after them.
        own.pop("use_bidirectional_attention", None)
    if kind in ("aya_vision", "cohere2_vision"):
        # The whole model's head has no scale.
        own["logit_scale"] = 1.0
    if text.model_type == "qwen3_vl_moe_text":
        # Whatever config.json says; Qwen3MoeForCausalLM has the option, and another default.
        own["norm_topk_prob"] = True
    if text.model_type == "paddleocr_vl_text":
        bias = own.pop("use_bias", False)
        own |= {"attention_bias": bias, "mlp_bias": bias}
    if text.model_type == "deepseek_ocr2_text":
        own["use_mla"] = False
    if text.model_type in ("glm4v_text", "glm_ocr_text"):
        # Glm4ForCausalLM's defaults are others.
        own.setdefault("attention_bias", text.model_type == "glm4v_text")
        own.setdefault("head_dim", text.hidden_size // text.num_attention_heads)
        own["rope_parameters"] = {"partial_rotary_factor": 1.0} | own["rope_parameters"]
    return own


def give_axes(text: dict[str, Any]) -> None:
    """Give the whole model the text decoder's rotary positions, where these were overridden: it reads the sections of
    a head that turn by other axes there."""
    whole = text[WHOLE]
    is_nested = isinstance(whole.get("text_config"), dict)
    part = dict(whole["text_config"] if is_nested else whole)
    for entry in ("rope_scaling", "rope_parameters"):
        part.pop(entry, None)
        if isinstance(text.get(entry), dict):
            part["rope_parameters"] = dict(text[entry])
    text[WHOLE] = whole | {"text_config": part} if is_nested else part


def drop_axes(text: dict[str, Any]) -> None:
    """Leave out of a text decoder's scaled rotary positions the sections of a head that turn by other axes: these are
    the whole model's, whatever the frequencies are."""
    for entry in ("rope_parameters", "rope_scaling"):
        rope = text.get(entry)
        if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) in ("linear", "llama3", "yarn"):
            text[entry] = {name: value for name, value in rope.items() if not name.startswith("mrope_")}


def text_tensor_name(name: str) -> str | None:
    """The text decoder's name of a whole model's tensor; None for the other parts' tensors."""
    own = re.sub(r"^(vlm\.|model\.)?(language_model|text_model)\.(model\.)?", "model.", name)
    own = own.replace("model.lm_head.", "lm_head.")
    return own if own != name or own.startswith(_OF_TEXT) else None
