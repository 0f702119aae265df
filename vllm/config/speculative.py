"""Speculation: how tokens are drafted that the model then checks, several a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NoReturn

from vllm.config.unserved import UnservedConfig, as_config, choice, number
from vllm.exceptions import VLLMValidationError, shown

_ARGUMENT = "speculative_config"

METHODS = ("ngram", "suffix", "draft_model", "mtp", "eagle", "eagle3")
SERVED_METHODS = frozenset(METHODS)
"""The methods that have a drafter."""

_HEADS = "prediction heads trained for one model are not read; use 'ngram', 'suffix' or a draft model"
_INSTEAD: dict[str, str] = {
    "medusa": _HEADS,
    "mlp_speculator": _HEADS,
    "dflash": _HEADS,
    "dspark": _HEADS,
    "extract_hidden_states": "LLM.encode(pooling_task='token_embed') gives the last layer's; no others are handed out",
    "custom_class": "drafters are the engine's own",
    "ngram_gpu": "'ngram' drafts on the host, within microseconds",
}
_SERVED = {
    "num_speculative_tokens", "model", "method", "draft_tensor_parallel_size", "quantization", "revision",
    "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size", "num_speculative_tokens_per_batch_size",
    "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
}  # fmt: skip
# Options of another engine's batches, and those that upstream's arguments put into its own configuration.
_CHANGES_NOTHING = {
    "enforce_eager", "disable_padded_drafter_batch", "disable_eagle_block_drop", "disable_lookahead_block_hashes",
    "use_local_argmax_reduction", "index_share_for_mtp_iteration", "target_model_config", "target_parallel_config",
    "fly_entropy_threshold", "fly_entropy_top_k", "enable_adaptive_verification",
}  # fmt: skip
_NUM_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_INTEGERS = (
    "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests", "disable_by_batch_size",
)  # fmt: skip


@dataclass(frozen=True)
class SpeculativeConfig(UnservedConfig):
    """Upstream's fields, with upstream's defaults; those that are not described here are refused where they ask for
    something.

    Attributes:
        method: "ngram", "suffix", "draft_model", "mtp", "eagle" or "eagle3"; left out, "draft_model" where there is a
            `model`.
        num_speculative_tokens: tokens drafted a step and request, at most; of "suffix", its tree's depth when left out,
            of "mtp" the number of prediction layers that config.json names.
        prompt_lookup_max: of "ngram": tokens of the longest end of a text that is looked up; 5, or as the other.
        prompt_lookup_min: of "ngram": tokens of the shortest; 5, or as the other.
        suffix_decoding_max_tree_depth: tokens of the longest end of a text that is looked up, and of a draft.
        suffix_decoding_max_cached_requests: earlier outputs that are looked up, too; 0: only the request's own text.
        suffix_decoding_max_spec_factor: drafted tokens for each token that was found again, at most.
        suffix_decoding_min_token_prob: a draft ends where its tokens so far were followed by them more rarely.
        model: the folder of the draft's model or of the head, or a method's name.
        quantization, revision: the draft's.
        draft_tensor_parallel_size: the target's tensor_parallel_size, or None.
        disable_by_batch_size: nothing is drafted with as many running requests, or more.
        num_speculative_tokens_per_batch_size: (first, last, tokens): tokens of a draft by running requests, whether
            they pay or not; num_speculative_tokens with other numbers of requests.
    """

    instead: ClassVar[str] = "it is not done; leave it out"
    asks_always: ClassVar[bool] = True
    harmless: ClassVar[frozenset[str]] = frozenset(_SERVED | _CHANGES_NOTHING)

    enforce_eager: bool | None = None
    num_speculative_tokens: int | None = number(None, 1)
    model: str | None = None
    method: str | None = None
    draft_tensor_parallel_size: int | None = number(None, 1)
    tensor_parallel_size: int | None = None
    quantization: str | None = None
    moe_backend: str | None = None
    attention_backend: Any = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = number(None, 1)
    revision: str | None = None
    code_revision: str | None = None
    index_share_for_mtp_iteration: bool | None = None
    disable_padded_drafter_batch: bool = False
    disable_eagle_block_drop: bool = False
    disable_lookahead_block_hashes: bool = False
    draft_lm_head_quantization: Literal["fp8", "nvfp4"] | None = choice(None, "fp8", "nvfp4")
    use_local_argmax_reduction: bool = False
    use_heterogeneous_vocab: bool = False
    prompt_lookup_max: int | None = number(None, 1)
    prompt_lookup_min: int | None = number(None, 1)
    parallel_drafting: bool = False
    target_model_config: Any = None
    target_parallel_config: Any = None
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    draft_model_config: Any = None
    draft_parallel_config: Any = None
    suffix_decoding_max_tree_depth: int = number(24, 1)
    suffix_decoding_max_cached_requests: int = number(10_000, 0)
    suffix_decoding_max_spec_factor: float = number(1.0, 0)
    suffix_decoding_min_token_prob: float = number(0.1, 0)
    draft_load_config: Any = None
    rejection_sample_method: Literal["standard", "synthetic", "block", "fly"] = choice(
        "standard", "standard", "synthetic", "block", "fly"
    )
    synthetic_acceptance_rates: list[float] | None = None
    synthetic_acceptance_length: float | None = None
    enable_adaptive_verification: bool = False
    draft_sample_method: Literal["greedy", "probabilistic"] = choice("greedy", "greedy", "probabilistic")
    dspark_draft_topk: int | None = number(None, 1)
    xpress_topc: int | None = number(None, 0)
    fly_window_size: int | None = number(None, 1)
    fly_entropy_threshold: float = number(0.3, 0)
    fly_entropy_top_k: int = number(3, 1)
    disable_by_batch_size: int | None = number(None, 1)

    def tokens_at(self, num_running: int) -> int:
        """Tokens of a draft, at most, with so many running requests; 0: none."""
        if self.disable_by_batch_size is not None and num_running >= self.disable_by_batch_size:
            return 0
        most = self.num_speculative_tokens or 0
        for first, last, num_tokens in self.num_speculative_tokens_per_batch_size or ():
            if first <= num_running <= last:
                return min(num_tokens, most)
        return most


EAGLE_OPTIONS = (
    "draft_vocab_size", "eagle_config", "norm_before_residual", "target_hidden_size", "target_layer_count",
    "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states",
)  # fmt: skip
"""Keys of an EAGLE head's config.json, beside a Llama's."""


def num_named_layers(raw: Mapping[str, Any]) -> int:
    """Prediction layers that config.json, whose content is `raw`, names; 1 where it names none: a checkpoint may have
    one all the same."""
    return next((raw[name] for name in _NUM_LAYERS if isinstance(raw.get(name), int) and raw[name] > 0), 1)


def as_speculative_config(value: Any, tensor_parallel_size: int = 1, **given: Any) -> SpeculativeConfig | None:
    """The argument as a configuration whose method and numbers are resolved; None: nothing is drafted.

    Args:
        value: None, a SpeculativeConfig, a dict of its fields (with "-" or "_"), or one as JSON.
        tensor_parallel_size: the target's.
        given: fields that have arguments of their own; None: not given.

    Raises:
        VLLMValidationError: a field that is not known, or a value that is not done; the message names what to do.
    """
    given = {name: own for name, own in given.items() if own is not None}
    if isinstance(value, Mapping):
        value = {str(name).replace("-", "_"): own for name, own in value.items()}
    config = as_config(_ARGUMENT, SpeculativeConfig, value)
    if config is None and not given:
        return None
    config = config or SpeculativeConfig()
    for name, own in given.items():
        if getattr(config, name) not in (None, own):
            _refuse(f"{name}={getattr(config, name)!r} is given as {own!r}, too: give one of them", name, own)
    config = _resolved(replace(config, **given))
    for name, own in config.asked().items():
        _refuse(f"{name}={shown(own)} is not supported: {SpeculativeConfig.instead}", name, own)
    if (size := config.draft_tensor_parallel_size) not in (None, tensor_parallel_size):
        name = "draft_tensor_parallel_size"
        _refuse(f"{name}={size} must be the target's tensor_parallel_size={tensor_parallel_size}", name, size)
    return config


def _resolved(config: SpeculativeConfig) -> SpeculativeConfig:
    """With a method that is done, its numbers filled in."""
    method = _method(config)
    if method == "ngram":
        config = _with_lookups(config)
    tokens = config.num_speculative_tokens
    if method == "suffix":
        tokens = tokens or config.suffix_decoding_max_tree_depth
        if (least := config.suffix_decoding_min_token_prob) > 1:
            _refuse(
                f"suffix_decoding_min_token_prob={least} must be at most 1", "suffix_decoding_min_token_prob", least
            )
    if tokens is None and method != "mtp":
        _refuse(f"num_speculative_tokens is needed with method={method!r}", "num_speculative_tokens", None)
    for name in _INTEGERS:
        if not isinstance(own := getattr(config, name), int | None):
            _refuse(f"{name} must be an integer, got {shown(own)}", name, own)
    if method in ("draft_model", "eagle", "eagle3") and not config.model:
        _refuse(f"model, the draft's folder, is needed with method={method!r}", "model", config.model)
    _check_sizes(config.num_speculative_tokens_per_batch_size)
    return replace(config, method=method, num_speculative_tokens=tokens)


def _method(config: SpeculativeConfig) -> str:
    method, model = config.method, config.model
    if method is None and isinstance(model, str):
        named = model.strip("[]")
        method = named if named in (*METHODS, *_INSTEAD) else "draft_model"
    if method is None:
        _refuse(f"method must be one of {', '.join(METHODS)}, or a draft's model given", "method", method)
    if isinstance(method, str) and method.endswith("_mtp"):
        method = "mtp"
    if method in _INSTEAD:
        _refuse(f"method={config.method or method!r} is not supported: {_INSTEAD[method]}", "method", method)
    if method not in METHODS:
        _refuse(f"method must be one of {', '.join(METHODS)}, got {shown(method)}", "method", method)
    if method not in SERVED_METHODS:
        _refuse(f"method={method!r} is not supported: leave speculation out; outputs are the same", "method", method)
    return method


def _with_lookups(config: SpeculativeConfig) -> SpeculativeConfig:
    least, most = config.prompt_lookup_min, config.prompt_lookup_max
    least, most = least or most or 5, most or least or 5
    if least > most:
        _refuse(f"prompt_lookup_min={least} must be at most prompt_lookup_max={most}", "prompt_lookup_min", least)
    return replace(config, prompt_lookup_min=least, prompt_lookup_max=most)


def _check_sizes(sizes: Any) -> None:
    name = "num_speculative_tokens_per_batch_size"
    if sizes is None:
        return
    if not isinstance(sizes, (list, tuple)) or not all(_is_size(size) for size in sizes):
        _refuse(f"{name} must be a list of (first, last, tokens) with 1 <= first <= last and tokens >= 0", name, sizes)


def _is_size(size: Any) -> bool:
    if not isinstance(size, (list, tuple)) or len(size) != 3 or not all(isinstance(each, int) for each in size):
        return False
    first, last, num_tokens = size
    return 1 <= first <= last and num_tokens >= 0


def _refuse(why: str, name: str, value: Any) -> NoReturn:
    raise VLLMValidationError(f"{_ARGUMENT}: {why}", parameter=name, value=value)
