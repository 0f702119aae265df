"""Settings of pooling models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from vllm.config.checkpoint.late_interaction import LateInteraction, read_late_interaction
from vllm.config.checkpoint.sentence_transformers import (
    TOKEN_HEADS,
    PoolingLayer,
    SentencePooling,
    SparsePooling,
    check_settings,
    is_sparse,
    read_pooling,
)
from vllm.config.checkpoint.text_part import MARK, PROJECTION, RETRIEVERS
from vllm.config.unserved import UnservedConfig, as_config, choice, number
from vllm.exceptions import VLLMValidationError

SequencePoolingType = Literal["CLS", "LAST", "MEAN"]
TokenPoolingType = Literal["ALL", "STEP"]


@dataclass
class PoolerConfig(UnservedConfig):
    """How hidden states are pooled.

    Attributes:
        task: the only task that is served.
        pooling_type, seq_pooling_type: of sequences: the first token, the mean, the last token.
        tok_pooling_type: which tokens are classified: all, or those of `step_tag_id`.
        use_activation: whether embeddings are normalised and classes have probabilities where requests do not say.
        dimensions: length of embeddings where requests do not say.
        enable_chunked_processing: texts longer than max_model_len are embedded in parts of that length; the mean of the
            parts' embeddings, weighted by their tokens, is the text's.
        max_embed_len: longest text that is embedded, in tokens; None: as the model reads, with
            enable_chunked_processing any.
        logit_mean, logit_sigma: logits of classes are (x - mean) / sigma before their activation.
        step_tag_id: the token at the end of a step.
        returned_token_ids: the columns that are kept of classes by token.
        normalize, softmax, activation: older names of use_activation.
        logit_bias: an older name of logit_mean.

    Raises:
        VLLMValidationError: two names of one field, or a sigma of 0.
    """

    instead: ClassVar[str] = "a model that generates pools nothing: add runner='pooling'"
    harmless: ClassVar[frozenset[str]] = frozenset({"enable_flash_late_interaction"})

    task: str | None = None
    pooling_type: SequencePoolingType | TokenPoolingType | None = choice(None, "CLS", "LAST", "MEAN", "ALL", "STEP")
    seq_pooling_type: SequencePoolingType | None = choice(None, "CLS", "LAST", "MEAN")
    tok_pooling_type: TokenPoolingType | None = choice(None, "ALL", "STEP")
    use_activation: bool | None = None
    enable_flash_late_interaction: bool = True
    dimensions: int | None = number(None, 1)
    enable_chunked_processing: bool = False
    max_embed_len: int | None = number(None, 1)
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    logit_bias: float | None = None

    def __post_init__(self) -> None:
        if self.pooling_type == "auto":
            self.pooling_type = None
        super().__post_init__()
        for older, name in _OLDER_FIELDS.items():
            if (value := getattr(self, older)) is None:
                continue
            if getattr(self, name) is not None:
                raise VLLMValidationError(f"pooler_config: {older} and {name} are two names of one field", older, value)
            setattr(self, name, value)
            setattr(self, older, None)
        if self.pooling_type is not None:
            other = "tok_pooling_type" if self.pooling_type in ("ALL", "STEP") else "seq_pooling_type"
            if (value := getattr(self, other)) not in (None, self.pooling_type):
                message = f"pooler_config: pooling_type={self.pooling_type} and {other}={value} exclude each other"
                raise VLLMValidationError(message, other, value)
        if self.logit_sigma == 0:
            raise VLLMValidationError("pooler_config: logit_sigma must not be 0", "logit_sigma", 0)

    def applied_to(self, pooling: SentencePooling) -> SentencePooling:
        """A model's pooling, with the type that this asks for."""
        kind = self.seq_pooling_type or self.pooling_type
        if pooling.sparse is not None:
            self._check_sparse(kind)
        return pooling if kind not in _MODES else replace(pooling, modes=(_MODES[kind],))

    def _check_sparse(self, kind: str | None) -> None:
        """VLLMValidationError: what is of vectors of hidden states alone."""
        for name, value in (("pooling_type", kind), ("enable_chunked_processing", self.enable_chunked_processing)):
            if value:
                message = f"pooler_config: {name}={value} is not supported for sparse embeddings, which pool words"
                raise VLLMValidationError(message, name, value)


# Fields whose neutral value is not None.
_NEUTRAL = {"enable_chunked_processing": False, "logit_mean": 0.0, "logit_sigma": 1.0}
_OLDER_FIELDS = {
    "normalize": "use_activation",
    "softmax": "use_activation",
    "activation": "use_activation",
    "logit_bias": "logit_mean",
}
_DECODER_MODES = {"avg": "mean", "mean": "mean", "cls": "cls", "last": "lasttoken"}
_MODES = {"CLS": "cls", "MEAN": "mean", "LAST": "lasttoken"}
_CLASSES = frozenset({"classify", "token_classify"})
_FIELDS_OF_TASKS = {
    "dimensions": frozenset({"embed", "token_embed"}),
    "enable_chunked_processing": frozenset({"embed"}),
    "max_embed_len": frozenset({"embed"}),
    "logit_mean": _CLASSES,
    "logit_sigma": _CLASSES,
    "step_tag_id": frozenset({"token_classify"}),
    "returned_token_ids": frozenset({"token_classify"}),
}
# Older callers say these in place of runner and convert.
_OLDER_TASKS = {
    "auto": ("auto", "auto"),
    "generate": ("generate", "auto"),
    "embed": ("pooling", "embed"),
    "embedding": ("pooling", "embed"),
    "classify": ("pooling", "classify"),
    "score": ("pooling", "auto"),
    "reward": ("pooling", "auto"),
}
NO_LOGITS_PROCESSORS = "logits_processors are for models that generate, and this one is served as a pooling model"

# By what a model is made for; sequences of generating models are classified token by token, too.
_TASKS = {
    "embed": ("embed", "token_embed"),
    "token_embed": ("token_embed",),
    "classify": ("classify", "token_classify"),
    "token_classify": ("token_classify",),
    "reward": ("token_classify",),
}


def tasks_of(convert: str, is_encoder: bool, pooler: PoolerConfig, own: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The tasks of a pooling model, the default first; `own`: those of an architecture that is made for other tasks.

    Raises:
        ValueError: `pooler.task` is not among it.
    """
    tasks = own or (("classify",) if is_encoder and convert == "classify" else _TASKS[convert])
    if pooler.task is None:
        return tasks
    if pooler.task not in tasks:
        raise ValueError(f"pooler_config: task must be one of {', '.join(tasks)} for this model, got {pooler.task!r}")
    return (pooler.task,)


class Source(Protocol):
    """A model's folder and configuration, before it is loaded."""

    @property
    def path(self) -> Path: ...
    @property
    def hf_config(self) -> Any: ...
    @property
    def pooling_kind(self) -> str | None: ...
    @property
    def is_encoder(self) -> bool: ...


def runner_fields(args: Any, source: Source) -> dict[str, Any]:
    """The fields of ModelConfig that say how a model runs and pools, by engine arguments.

    Raises:
        ValueError: what is asked for does not suit the model, or is not done.
    """
    runner, convert = asked_runner(args)
    pooler = as_config("pooler_config", PoolerConfig, args.pooler_config, keeps_neutral=True) or PoolerConfig()
    raw, folder = source.hf_config.raw, read_pooling(source.path)
    is_bidirectional = source.is_encoder or attends_both_ways(raw)
    kind = source.pooling_kind or ("embed" if folder is not None or is_bidirectional else None)
    is_retriever = raw.get(MARK) in RETRIEVERS
    if is_retriever or (kind == "embed" and folder is not None and folder.of_tokens):
        kind = "token_embed"
    if runner == "generate" or (runner == "auto" and kind is None and convert == "auto"):
        if is_bidirectional or kind not in (None, "embed", "token_embed"):
            raise ValueError("runner='generate' needs a model that generates, and this one does not: use 'pooling'")
        if not pooler.is_neutral() or convert != "auto":
            asked = "pooler_config" if convert == "auto" else f"convert={convert!r}"
            raise ValueError(f"{asked} is for pooling models, and this one generates: add runner='pooling'")
        return {"runner": "generate", "pooler_config": pooler}
    if convert != "auto":
        kind = kind if convert == "classify" and kind in ("classify", "token_classify", "reward") else convert
    elif raw.get("classifier_from_token"):
        kind = "classify"
    kind = kind or "embed"
    if source.is_encoder and "embed" not in kind and source.pooling_kind in (None, "embed"):
        raise ValueError(f"convert={convert!r} needs an encoder with a classifier, and this one has none")
    _check_served(args, pooler)
    check_settings(source.path)
    sparse, has_heads = _sparse_pooling(source, folder), TOKEN_HEADS in source.hf_config.architectures[:1]
    own = ("embed",) if sparse else ("embed", "token_embed", "token_classify") if has_heads else ()
    if source.hf_config.pools_itself:
        own = ("embed",)
        for name in ("pooling_type", "seq_pooling_type", "tok_pooling_type", "enable_chunked_processing"):
            if value := getattr(pooler, name):
                raise ValueError(f"pooler_config: {name}={value} is not supported for a model that pools itself")
    if has_heads and pooler.returned_token_ids:
        raise ValueError("pooler_config: returned_token_ids chooses among classes, and this model's tokens have none")
    tasks = tasks_of(kind, source.is_encoder, pooler, own)
    for name, needed in _FIELDS_OF_TASKS.items():
        if getattr(pooler, name) not in (None, _NEUTRAL.get(name)) and not needed & set(tasks):
            raise ValueError(f"pooler_config: {name} is for {' and '.join(sorted(needed))}; this model has {tasks}")
    mode = _encoder_mode(raw, kind) if source.is_encoder else _decoder_mode(raw, kind)
    default = SentencePooling((source.hf_config.default_pooling or mode,))
    if is_retriever:
        sizes = source.hf_config.hidden_size, raw["embedding_dim"]
        layer = PoolingLayer("Dense", source.path, *sizes, prefix=PROJECTION)
        default = SentencePooling(("lasttoken",), (layer,), of_tokens=True)
    pooling = sparse or (folder if "embed" in kind else None) or default
    pooling = replace(pooling, has_token_heads=has_heads)
    pooling.check(source.hf_config.hidden_size, source.path.name)
    return {
        "runner": "pooling",
        "convert": kind,
        "attn_type": "encoder_only" if is_bidirectional else "decoder",
        "pooler_config": pooler,
        "pooling": pooler.applied_to(pooling),
        "pooling_tasks": tasks,
        "late_interaction": _late_interaction(source, is_bidirectional) if "token_embed" in tasks else None,
    }


def _sparse_pooling(source: Source, folder: SentencePooling | None) -> SentencePooling | None:
    """The pooling of a model whose architecture pools words: as the folder says, or as most do; None: it is another
    one."""
    if not is_sparse(source.hf_config.architectures):
        return None
    found = folder if folder is not None and folder.sparse is not None else SentencePooling(normalize=False)
    return replace(found, sparse=replace(found.sparse or SparsePooling(), size=source.hf_config.vocab_size))


def _late_interaction(source: Source, is_bidirectional: bool) -> LateInteraction | None:
    """ValueError: it needs tokens that are not attended to, of a model that has none."""
    found = read_late_interaction(source.path, source.hf_config.raw)
    if found is not None and found.hides_tokens and not is_bidirectional:
        message = "attend_to_expansion_tokens=false is not supported for models whose tokens see only those before them"
        raise ValueError(f"{source.path.name}: {message}; set it, or do_query_expansion=false")
    return found


def _encoder_mode(raw: Mapping[str, Any], kind: str) -> str:
    """ModernBERT's classifiers and Jina's embeddings name theirs; transformers' classifiers pool themselves."""
    named = raw.get("emb_pooler" if "embed" in kind else "classifier_pooling")
    return "mean" if named == "mean" else "cls"


def _decoder_mode(raw: Mapping[str, Any], kind: str) -> str:
    """The last token's, unless a model such as LlamaBidirectionalModel names its own.

    Raises:
        ValueError: it is not known, or a classifier's logits are scaled.
    """
    named = raw.get("pooling")
    if named is None:
        return "lasttoken"
    if named not in _DECODER_MODES:
        raise ValueError(f"config.json: pooling={named!r} is not supported: it must be {', '.join(_DECODER_MODES)}")
    if "classify" in kind and raw.get("temperature") not in (None, 1, 1.0):
        raise ValueError(f"config.json: temperature={raw['temperature']} of a classifier's logits is not supported")
    return _DECODER_MODES[named]


def attends_both_ways(raw: Mapping[str, Any]) -> bool:
    """Whether config.json makes a decoder's attention bidirectional."""
    if any("Bidirectional" in name for name in raw.get("architectures") or ()):
        return True
    return raw.get("is_causal") is False or raw.get("use_bidirectional_attention") in (True, "all")


def asked_runner(args: Any) -> tuple[str, str]:
    """runner and convert of engine arguments, of which "none" and "auto" mean the same. ValueError: another value."""
    runner, convert, task = args.runner, args.convert, args.task or "auto"
    if runner not in ("auto", "generate", "pooling"):
        raise ValueError(f"runner must be 'auto', 'generate' or 'pooling', got {runner!r}")
    if convert not in ("auto", "none", "embed", "classify"):
        raise ValueError(f"convert must be 'auto', 'none', 'embed' or 'classify', got {convert!r}")
    if task not in _OLDER_TASKS:
        raise ValueError(f"task must be one of {', '.join(_OLDER_TASKS)}, got {task!r}")
    by_task = _OLDER_TASKS[task]
    convert = "auto" if convert == "none" else convert
    return (by_task[0] if runner == "auto" else runner), (by_task[1] if convert == "auto" else convert)


def _check_served(args: Any, pooler: PoolerConfig) -> None:
    if args.logits_processors:
        raise ValueError(NO_LOGITS_PROCESSORS)
    if "STEP" in (pooler.tok_pooling_type, pooler.pooling_type) and pooler.step_tag_id is None:
        raise ValueError("pooler_config: STEP needs step_tag_id, the token at the end of a step")
