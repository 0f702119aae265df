"""config.json and generation_config.json as one object. transformers is not used: its import takes seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config.checkpoint.overrides import check_parts, names_of_whole
from vllm.config.checkpoint.text_part import MARK, drop_axes, give_axes, text_part
from vllm.sampling_params import MODEL_DEFAULTS

_DEFAULT_ROPE_THETA = 10000.0
_DTYPES = ("float32", "bfloat16", "float16")
# Config.json's names of the sizes that the engine needs, the usual one first.
_SIZE_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed", "dim", "embedding_dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_blocks"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
}
_DEFAULT_CONTEXT = 2048

CONFIG_FORMATS: dict[str, Callable[[Path, bool, str | None], dict[str, Any]]] = {}
"""By config_format: a parser that a caller registered in this process, of a folder, trust_remote_code and a revision;
it returns the entries that config.json would have."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        rope_type: default, linear, dynamic, llama3, yarn, longrope, proportional, or factors (frequency divisors of a
            GGUF file).
        theta: base of the frequencies.
        params: the other entries of `rope_parameters` (factor, original_max_position_embeddings ...).
    """

    rope_type: str = "default"
    theta: float = _DEFAULT_ROPE_THETA
    params: dict[str, Any] = field(default_factory=dict)


# Names of how many feed-forward networks a layer chooses from.
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class HFConfig:
    """The part of a model's configuration that the engine needs; `raw` holds the whole config.json, from which the
    model reads the rest.

    Attributes:
        max_context_len: longest sequence in tokens: the trained length times the factor of a linear or yarn scaling.
        dtype: the checkpoint's dtype; None if the file has none.
        eos_token_ids: every end-of-sequence id of config.json and generation_config.json.
        default_sampling_params: sampling fields that generation_config.json recommends.
        where: the file's name in errors.
        is_encoder: whether it is one, whose tokens see those after them.
        pooling_kind: what a caller's pooling model is made for; None: the architecture's name says it.
        pools_itself: whether the model makes one vector of a whole request, and nothing of its tokens.
        default_pooling: "cls", "mean" or "lasttoken", where such a model says how it pools.
    """

    architectures: tuple[str, ...]
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    max_context_len: int
    tie_word_embeddings: bool
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    default_sampling_params: dict[str, Any]
    raw: dict[str, Any] = field(repr=False)
    where: str = "config.json"
    is_encoder: bool = False
    pooling_kind: str | None = None
    default_pooling: str | None = None
    pools_itself: bool = False

    @property
    def id2label(self) -> dict[int, str]:
        """A classifier's labels by their place, named as transformers does; of words as a classifier, the words, of
        which the last one alone is a class where two are weighed against each other."""
        words = self.raw.get("classifier_from_token")
        if words:
            return dict(enumerate(words if self.raw.get("method") == "no_post_processing" else words[-1:]))
        given = {int(index): str(name) for index, name in (self.raw.get("id2label") or {}).items()}
        return given or {index: f"LABEL_{index}" for index in range(self.raw.get("num_labels") or 2)}

    @property
    def num_labels(self) -> int:
        """Number of labels; 2 where the file has none."""
        return len(self.id2label)

    @property
    def num_weights(self) -> int:
        """About how many weights the model has, by the sizes of its matrices; with all of its experts."""
        experts = next((self.raw[name] for name in _NUM_EXPERTS if isinstance(self.raw.get(name), int)), 0)
        inner = self.intermediate_size
        if experts:
            inner = experts * (self.raw.get("moe_intermediate_size") or inner)
        heads = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        embeddings = self.vocab_size * (1 if self.tie_word_embeddings else 2)
        return self.hidden_size * (self.num_hidden_layers * (heads + 3 * inner) + embeddings)


def load_hf_config(folder: Path, overrides: dict[str, Any] | None = None) -> HFConfig:
    """Read a model folder's config.json, with `overrides` of its entries, and its generation_config.json if any.

    Raises:
        ValueError: no config.json, not JSON, or a missing or unusable field.
    """
    return parse_hf_config(*read_config(folder, overrides), f"{folder.name}/config.json")


_ROPE_ENTRIES = {"rope_parameters", "rope_scaling"}
_CLASSIFIER, _WHOLE = "ForSequenceClassification", "ForConditionalGeneration"


def read_config(
    folder: Path,
    overrides: dict[str, Any] | None = None,
    config_format: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of a folder's config.json, with `overrides`, and of its generation_config.json, {} without one. Of a
    model with other inputs than text, they are those of its text decoder; see `text_part`. A `config_format` of
    CONFIG_FORMATS is asked instead of config.json.

    Raises:
        ValueError: no config.json, one of them is not JSON, or a part such as vision_config has no option of a name.
    """
    parse = CONFIG_FORMATS.get(config_format)
    raw = _read_json(folder, "config.json") if parse is None else parse(folder, trust_remote_code, revision)
    if raw is None:
        raise ValueError(f"{folder.name} has no config.json, so it is not a Hugging Face model folder")
    whole, raw, overrides = raw, text_part(raw), dict(overrides or {})
    if MARK in raw:
        raw = text_part(_with_own(whole, overrides, raw))
        overrides |= overrides.pop("text_config", None) or {}
        of_words = {**raw, **overrides}.get("classifier_from_token")
        usual = [raw[MARK].removesuffix(_WHOLE) + _CLASSIFIER] if of_words else [raw[MARK]]
        if overrides.get("architectures") == usual:
            # The whole model's, or those of a classifier of its words: the text decoder has an architecture of its own.
            del overrides["architectures"]
    _apply_overrides(raw, overrides)
    if MARK in raw:
        if overrides.keys() & _ROPE_ENTRIES:
            give_axes(raw)
        drop_axes(raw)
    _read_as_generating(raw)
    generation = _read_json(folder, "generation_config.json") or {}
    return raw, generation


def _with_own(whole: dict[str, Any], overrides: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """A whole model's entries with those of the overrides that its text decoder has not, and these lose; dicts, such as
    vision_config, keep what is not overridden."""
    asked = overrides.keys() - text.keys() - {"text_config"}
    names = {name: name for name in asked & whole.keys()} | names_of_whole(whole, asked - whole.keys())
    own = {name: overrides.pop(asked_as) for asked_as, name in names.items()}
    check_parts(whole, own)
    for name, value in own.items():
        both = isinstance(value, dict) and isinstance(whole.get(name), dict)
        own[name] = whole[name] | value if both else value
    return whole | own


def _read_as_generating(raw: dict[str, Any]) -> None:
    """Where `classifier_from_token` makes a classifier of a generating model's words, it is that model which runs: the
    probability of the last word between the two is the class's."""
    words = raw.get("classifier_from_token")
    if not words:
        return
    method = raw.get("method")
    if method not in (None, "from_2_way_softmax", "no_post_processing"):
        raise ValueError(
            f"method must be from_2_way_softmax or no_post_processing with classifier_from_token, got {method!r}"
        )
    if not isinstance(words, list) or len(set(words)) < len(words):
        raise ValueError(f"classifier_from_token must be a list of different words, got {words!r}")
    if method == "no_post_processing":
        return  # The words' logits themselves are the classes'.
    if len(words) != 2:
        raise ValueError(f"classifier_from_token must be two different words, the positive one last, got {words!r}")
    raw["architectures"] = [
        name.removesuffix(_CLASSIFIER) + "ForCausalLM" if name.endswith(_CLASSIFIER) else name
        for name in raw.get("architectures") or ()
    ]


def _check_head_dtype(value: Any, where: str) -> None:
    if value is not None and str(value).removeprefix("torch.") != "float32":
        raise ValueError(
            f"{where}: head_dtype must be float32, which logits are in with every dtype of the model; got {value!r}"
        )


def _with_layer_count(raw: dict[str, Any]) -> dict[str, Any]:
    """With the number of layers of a model whose file names the kind of each, and only that."""
    kinds = raw.get("layers_block_type") or raw.get("hybrid_override_pattern")
    if not kinds or any(raw.get(name) is not None for name in _SIZE_NAMES["num_hidden_layers"]):
        return raw
    return raw | {"num_hidden_layers": len(kinds)}


def parse_hf_config(raw: dict[str, Any], generation: dict[str, Any], where: str = "config.json") -> HFConfig:
    """Build the configuration from the contents of config.json (`where` in errors) and generation_config.json.

    Raises:
        ValueError: a missing or unusable field.
    """
    _check_head_dtype(raw.get("head_dtype"), where)
    raw = _with_layer_count({name: value for name, value in raw.items() if name != "head_dtype"})
    fields = _Fields(raw, where)
    hidden_size = fields.size("hidden_size")
    # State spaces have none, and RWKV.
    has_none = "state_size" in raw or raw.get("model_type") == "rwkv"
    num_heads = fields.size("num_attention_heads", 1 if has_none else None)
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{where}: num_attention_heads must be a multiple of num_key_value_heads={num_kv_heads}, got {num_heads}"
        )
    trained = fields.size("max_position_embeddings", _DEFAULT_CONTEXT)
    return HFConfig(
        architectures=tuple(raw.get("architectures") or ()),
        model_type=raw.get("model_type") or "",
        hidden_size=hidden_size,
        num_hidden_layers=fields.size("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        intermediate_size=fields.size("intermediate_size", 4 * hidden_size),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=trained,
        max_context_len=scaled_context(trained, raw.get("rope_scaling") or raw.get("rope_parameters")),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=_parse_dtype(raw),
        bos_token_id=next(iter(_merge_ids(generation.get("bos_token_id"), raw.get("bos_token_id"))), None),
        eos_token_ids=_merge_ids(raw.get("eos_token_id"), generation.get("eos_token_id")),
        default_sampling_params=_sampling_defaults(generation),
        raw=raw,
        where=where,
    )


def scaled_context(trained: int, rope: Any) -> int:
    """The trained length, in tokens, times the factor of a linear or yarn scaling among `rope` (rope_parameters)."""
    if not isinstance(rope, dict):
        return trained
    rope_type, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    if not isinstance(factor, (int, float)):
        return trained
    if rope_type == "linear":
        return int(trained * factor)
    if rope_type == "yarn":
        return max(trained, int((rope.get("original_max_position_embeddings") or trained) * factor))
    return trained


def load_sampling_defaults(folder: Path) -> dict[str, Any]:
    """The sampling fields that a folder's generation_config.json recommends.

    Raises:
        ValueError: there is no such file, or it is not JSON.
    """
    generation = _read_json(folder, "generation_config.json")
    if generation is None:
        raise ValueError(
            f"generation_config must be 'auto', 'vllm' or a folder with generation_config.json, got {folder}"
        )
    return _sampling_defaults(generation)


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    found = {name: generation.get(theirs) for theirs, name in MODEL_DEFAULTS.items()}
    return {name: value for name, value in found.items() if value is not None}


class _Fields:
    """Typed access to config.json; errors name the file, field and value."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self._raw = raw
        self._where = where

    def size(self, name: str, default: int | None = None) -> int:
        """The field under one of its names in _SIZE_NAMES."""
        for alias in _SIZE_NAMES[name]:
            value = self._raw.get(alias)
            # Some models have one for each layer.
            if isinstance(value, list) and value and name == "intermediate_size":
                value = value[0]
            if value is not None:
                return self._positive(alias, value)
        return self.integer(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        return self._positive(name, self._get(name, default))

    def _positive(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self._where}: {name} must be a positive integer, got {value!r}")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self._where}: {name} must be true or false, got {value!r}")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self._raw.get(name)
        if value is None:
            if default is None:
                raise ValueError(f"{self._where} has no {name}")
            return default
        return value


def _read_json(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        text = (folder / name).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder.name}/{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{folder.name}/{name} must hold an object, got {type(value).__name__}")
    return value


def _apply_overrides(raw: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Replace entries; the older names rope_scaling and rope_theta override a file's rope_parameters, too."""
    raw.update(overrides)
    rope = raw.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_parameters" in overrides:
        return
    # Where layers of two kinds have parameters of their own, the older names mean those without a window.
    by_kind = isinstance(rope.get("full_attention"), dict)
    full = dict(rope["full_attention"] if by_kind else rope)
    if "rope_scaling" in overrides:
        kept = ("rope_theta", "partial_rotary_factor")
        full = {name: full[name] for name in kept if name in full} | (raw.pop("rope_scaling") or {})
    if overrides.get("rope_theta") is not None:
        full["rope_theta"] = overrides["rope_theta"]
    raw["rope_parameters"] = rope | {"full_attention": full} if by_kind else full


def _parse_dtype(raw: dict[str, Any]) -> str | None:
    value = raw.get("dtype") or raw.get("torch_dtype")
    name = str(value).removeprefix("torch.") if value is not None else None
    return name if name in _DTYPES else None


def _merge_ids(*values: Any) -> tuple[int, ...]:
    ids: list[int] = []
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if item is not None and item not in ids:
                ids.append(item)
    return tuple(ids)
