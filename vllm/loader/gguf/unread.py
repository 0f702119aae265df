"""Entries of a GGUF file's header that nothing reads: the file is refused by their names, for what they mean would be
left out. The tables here have those that change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.exceptions import shown
from vllm.loader.gguf.config_parts import Config
from vllm.loader.gguf.header import GGUFHeader
from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)

_Test = Callable[[GGUFHeader, Any], bool]

# Routers that llama.cpp's converter writes as 2, sigmoids, and whose models have no other; the rest are softmax.
_SIGMOIDS = frozenset(
    "afmoe bailingmoe2 dots1 exaone-moe glm4moe lfm2moe mimo2 minimax-m2 nemotron_h nemotron_h_moe".split()
)
# Positions in three sections, of images alone: a text's are the same in all.
_SECTIONED = frozenset(("paddleocr", "qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"))
_LAYOUTS = ("Meta AI original pth", "jploski")


def _is(*values: Any) -> _Test:
    """The value, or each one of a list, is one of `values`."""
    return lambda h, given: all(value in values for value in (given if isinstance(given, list) else [given]))


def _any(h: GGUFHeader, given: Any) -> bool:
    return True


def _unscaled(h: GGUFHeader, given: Any) -> bool:
    return h.get("rope.scaling.type") == "none"


def _no_scaling(h: GGUFHeader, given: Any) -> bool:
    return given in (0, 1) or _unscaled(h, given)


def _whole_head(h: GGUFHeader, given: Any) -> bool:
    return not h.was_read("rope.freq_base") or given == h.head_dim


def _as_head(h: GGUFHeader, given: Any) -> bool:
    return given == h.head_dim


def _sectioned(h: GGUFHeader, given: Any) -> bool:
    return h.architecture in _SECTIONED or _is(0)(h, given)


def _whole_text(h: GGUFHeader, given: Any) -> bool:
    return given == 0 or (isinstance(given, int) and given >= h.context)


def _not_given(key: str) -> _Test:
    return lambda h, given: not h.get(key)


def _same(key: str, default: Any = None) -> _Test:
    return lambda h, given: given == h.get(key, default)


def _has_none(h: GGUFHeader) -> bool:
    return not any(h.having("ffn_gate_inp.weight"))


def _no_experts(h: GGUFHeader, given: Any) -> bool:
    return given == 0 or _has_none(h)


def _one(h: GGUFHeader, given: Any) -> bool:
    return given == 1 or _no_experts(h, given)


def _gating(h: GGUFHeader, given: Any) -> bool:
    return given == (2 if h.architecture in _SIGMOIDS else 1) or _no_experts(h, given)


# Why an entry changes no number, and the test of its value.
_ENTRIES: dict[str, tuple[str, _Test]] = {
    **dict.fromkeys(
        (
            "attention.head_count attention.head_count_kv attention.key_length attention.value_length "
            "attention.value_length_swa dense_2_feat_in dense_2_feat_out dense_3_feat_in dense_3_feat_out "
            "embedding_length_out expert_feed_forward_length expert_shared_feed_forward_length feed_forward_length "
            "token_type_count vocab_size"
        ).split(),
        ("tensors have the size", _any),
    ),
    **dict.fromkeys(
        "attention.recurrent_layers expert_shared_count full_attention_interval".split(),
        ("the tensors tell it", _any),
    ),
    **dict.fromkeys(
        "attention.layer_norm_epsilon attention.layer_norm_rms_epsilon".split(),
        ("a model's norms are of one kind, whose epsilon is read", _any),
    ),
    "context_length": ("states have no longest text", _any),
    "attention.causal": ("encoders see all", _is(False)),
    "pooling_type": ("the files of the pooling have it", _any),
    "classifier.output_labels": ("names", _any),
    "n_deepstack_layers": ("features of images", _any),
    "tensor_data_layout": ("the layout that is read", _is(*_LAYOUTS)),
    "rope.freq_base": ("where positions rotate, it is read", _any),
    "rope.dimension_count": ("a whole head", _whole_head),
    "rope.dimension_count_swa": ("a whole head", _as_head),
    "rope.freq_base_swa": ("the same in all layers", _same("rope.freq_base", 10000.0)),
    "rope.dimension_sections": ("positions of images", _sectioned),
    "rope.scaling.finetuned": ("how the model was trained", _any),
    "rope.scaling.original_context_length": ("scalings that need it read it", _any),
    "rope.scaling.type": ("no scaling", _is("none", "linear")),
    **dict.fromkeys("rope.scale_linear rope.scaling.factor".split(), ("no scaling", _no_scaling)),
    "rope.scaling.alpha": ("no scaling", _is(0)),
    "rope.scaling.attn_factor": ("no scaling", _is(1)),
    **dict.fromkeys(
        (
            "rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow "
            "rope.scaling.yarn_ext_factor rope.scaling.yarn_log_multiplier"
        ).split(),
        ("rope.scaling.type=none", _unscaled),
    ),
    "attention.key_length_swa": ("the same in all layers", _as_head),
    "attention.sliding_window": ("no window", _whole_text),
    "attention.sliding_window_pattern": ("no window", _not_given("attention.sliding_window")),
    "attention.temperature_length": ("no temperature_scale", _not_given("attention.temperature_scale")),
    "expert_gating_func": ("as all models of the architecture choose", _gating),
    **dict.fromkeys("expert_count expert_used_count".split(), ("no experts", _no_experts)),
    "expert_weights_norm": ("no experts", lambda h, given: _has_none(h)),
    **dict.fromkeys("expert_group_count expert_group_used_count expert_weights_scale".split(), ("1", _one)),
    **dict.fromkeys(
        (
            "attention.clamp_kqv attention.kv_lora_rank attention.max_alibi_bias attention.q_lora_rank "
            "attention.relative_buckets_count attention.scale attention.shared_kv_layers attention.temperature_scale "
            "attn_logit_softcapping embedding_length_per_layer_input final_logit_softcapping leading_dense_block_count "
            "moe_every_n_layers moe_latent_size router_logit_softcapping ssm.dt_b_c_rms swiglu_clamp_exp "
            "swiglu_clamp_shexp"
        ).split(),
        ("0", _is(0)),
    ),
    **dict.fromkeys(
        (
            "attention.output_scale attention.value_scale embedding_scale expert_group_scale interleave_moe_layer_step "
            "logit_scale num_loops residual_scale"
        ).split(),
        ("1", _is(0, 1)),
    ),
}


def check_unread(h: GGUFHeader, config: Config) -> None:
    """ValueError: the header has entries that nothing has read, and that may change numbers."""
    wrong = []
    for key, value in h.unread().items():
        reason, changes_nothing = _ENTRIES.get(key, ("", None))
        if key == "expert_weights_norm" and value is config.get("norm_topk_prob"):
            continue
        if changes_nothing is None or not changes_nothing(h, value):
            only = f" (only where it says: {reason})" if reason else ""
            wrong.append(f"{h.architecture}.{key}={shown(value)}{only}")
    if wrong:
        raise h.error(f"entries of the header that are not supported: {', '.join(wrong)}")


_BYTES, _SENTENCES, _PIECES = ("gpt2",), ("llama", "gemma4", "t5"), ("bert",)
_ALL = (*_BYTES, *_SENTENCES, *_PIECES)
_PREFIX = "tokenizer.ggml."
# The kinds of tokenizers that read an entry; what is False or empty changes nothing of the others.
_TOKENIZER: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token"), _ALL
    ),
    "add_space_prefix": _SENTENCES,
    "remove_extra_whitespaces": ("t5",),
    "precompiled_charsmap": ("t5",),
    "normalizer.lowercase": _PIECES,
    "normalizer.strip_accents": _PIECES,
}
# Keys that split no text: numbers of tokens by their meaning, how texts of a pair are joined (a row says it), sizes.
_NO_SPLIT = frozenset(
    f"{name}_token_id"
    for name in (
        "bos eos eot eom unknown seperator padding cls mask fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep prefix "
        "suffix middle"
    ).split()
) | {"add_sep_token", "token_type_count"}


def check_tokenizer(meta: dict[str, Any]) -> None:
    """ValueError: the header says of its tokenizer what nothing reads, and what may split texts in another way."""
    kind, tokens = meta[f"{_PREFIX}model"], set(meta[f"{_PREFIX}tokens"])
    for key, value in meta.items():
        name = key.removeprefix(_PREFIX)
        if not key.startswith(_PREFIX) or name in _NO_SPLIT or (name in _TOKENIZER and not value):
            continue
        if name == "suppress_tokens":
            if value:
                warn_once(logger, f"{key} is not applied: logit_bias or allowed_token_ids of a request keep tokens out")
        elif name == "added_tokens":
            if missing := [token for token in value if token not in tokens]:
                raise ValueError(f"{key} has tokens that {_PREFIX}tokens lacks: {shown(missing)}")
        elif kind not in _TOKENIZER.get(name, ()):
            raise ValueError(f"{key}={shown(value)} is not supported for {_PREFIX}model {kind!r}")
