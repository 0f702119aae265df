"""Parameters of a request to a pooling model."""

from __future__ import annotations

import copy
from typing import Any, Literal

from vllm.exceptions import VLLMValidationError, shown
from vllm.sampling_params import RequestOutputKind
from vllm.utils.checks import MAX_INTEGER, check_boolean, check_id_sequence, check_integer, whole, wrong_type
from vllm.utils.struct import Struct

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify", "plugin", "embed&token_classify"]

_REMOVED_TASKS = {"score": "`classify`", "encode": "`token_embed` or `token_classify`"}

# Fields that some tasks have and others do not.
_STEP_FIELDS = ("step_tag_id", "returned_token_ids")
_TASK_FIELDS: dict[str | None, tuple[str, ...]] = {
    "embed": ("dimensions", "use_activation"),
    "classify": ("use_activation",),
    "token_embed": ("dimensions", "use_activation", *_STEP_FIELDS),
    "token_classify": ("use_activation", *_STEP_FIELDS),
}
# Fields whose values could be changed in a copy.
_MUTABLE = ("extra_kwargs", "returned_token_ids", "late_chunking_params", "late_interaction_params")
_LATE_MODES = ("cache_query", "score_doc")


class LateInteractionParams(Struct, omit_defaults=True, array_like=True):
    """How token embeddings of queries and documents are compared.

    Attributes:
        mode: cache_query keeps a query's token embeddings, score_doc compares a document's with them.
        query_key: names the query.
        query_uses: how many documents a query is kept for.
    """

    mode: str
    query_key: str
    query_uses: int | None = None

    def check(self) -> None:
        """
        Raises:
            VLLMValidationError: no such mode, or a query that is kept for no document.
        """
        if self.mode not in _LATE_MODES:
            message = f"mode must be {' or '.join(_LATE_MODES)}, got {shown(self.mode)}"
            raise VLLMValidationError(message, "mode", self.mode)
        if self.mode == "cache_query":
            self.query_uses = _check_positive("query_uses", self.query_uses)


class LateChunkingParams(Struct, omit_defaults=True, array_like=True):
    """Embeddings of parts of `chunk_size` tokens, each read in the light of the whole text."""

    chunk_size: int

    def __post_init__(self) -> None:
        self.chunk_size = _check_positive("chunk_size", self.chunk_size)


class PoolingParams(Struct, omit_defaults=True, array_like=True):
    """Parameters of one request to a pooling model.

    Attributes:
        use_activation: apply the head's activation; None: the model's default.
        dimensions: length of the embedding; None: the model's.
        step_tag_id: the token whose positions are read, for reward models.
        returned_token_ids: the columns that are kept of such a reading.
        task: which pooling is asked for; None: the method called says it.
        requires_token_ids: whether the head needs the prompt's ids.
        skip_reading_prefix_cache: compute the whole prompt.
        extra_kwargs: compressed_token_type_ids: the position from which tokens have type 1, or a list of it and of
            that of the first token after them. attended_tokens: how many of the first tokens others see. Of
            token_embed: skipped_token_ids, kept_token_ids: whose vectors are left out, or alone are not.
        truncate_prompt_tokens: keep so many tokens of the beginning; -1: as many as the model takes; None: no more is
            an error. The tokenizer's special tokens are among them, and stay at both ends.
        late_chunking_params: of token_embed: the mean of each so many tokens' vectors, in place of them.
        late_interaction_params: None; LLM.score compares token embeddings.
        normalize: the older name of use_activation for embeddings.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: PoolingTask | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: LateInteractionParams | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    late_chunking_params: LateChunkingParams | None = None
    truncate_prompt_tokens: int | None = None
    normalize: bool | None = None

    def __post_init__(self) -> None:
        if self.task in _REMOVED_TASKS:
            message = f"`{self.task}` task was removed; use {_REMOVED_TASKS[self.task]} instead."
            raise VLLMValidationError(message, "task", self.task)

    def verify(self, model_config: Any) -> None:
        """Check the fields against a model, and fill in those that its `pooler_config` has defaults for.

        Raises:
            VLLMValidationError: a field that the task does not have, or a value that the model cannot honour.
        """
        pooler = model_config.pooler_config
        if self.late_chunking_params is not None:
            if self.task != "token_embed":
                raise VLLMValidationError("late chunking requires token_embed", "task", self.task)
            # A chunk is a mean of all its tokens, which a cached prefix would leave out.
            self.skip_reading_prefix_cache = True
        if self.late_interaction_params is not None:
            self.late_interaction_params.check()
        known = _TASK_FIELDS.get(self.task, _TASK_FIELDS["token_embed"])
        if "STEP" not in (pooler.tok_pooling_type, pooler.pooling_type):
            known = tuple(name for name in known if name not in _STEP_FIELDS)
        for name in ("dimensions", "use_activation", *_STEP_FIELDS):
            if name in known and getattr(self, name) is None:
                setattr(self, name, getattr(pooler, name))
            elif name not in known and getattr(self, name) is not None:
                raise VLLMValidationError(f"{name} is not for the task {self.task} of this model", name)
        if self.late_chunking_params is not None and any(getattr(self, name) is not None for name in _STEP_FIELDS):
            message = "late chunking needs all token rows: leave step_tag_id and returned_token_ids out"
            raise VLLMValidationError(message, "late_chunking_params")
        if self.use_activation is None:
            self.use_activation = True
        check_dimensions(self.dimensions, model_config)

    def verified(self, model_config: Any) -> PoolingParams:
        """A copy with its task, for a model.

        Raises:
            VLLMValidationError: a task that the model does not have, or a field that is not served.
        """
        own, tasks = self.clone(), model_config.pooling_tasks
        own.task = own.task or tasks[0]
        if own.task not in tasks:
            message = f"Unsupported task: {own.task!r}; the model has {', '.join(tasks)}"
            raise VLLMValidationError(message, "task", own.task)
        if own.normalize is not None:
            own.use_activation, own.normalize = own.normalize, None
        if own.dimensions is not None and "classify" in own.task:
            raise VLLMValidationError("dimensions is for embeddings", "dimensions", own.dimensions)
        own.dimensions, own.truncate_prompt_tokens = whole(own.dimensions), whole(own.truncate_prompt_tokens)
        check_dimensions(own.dimensions, model_config)
        if own.use_activation is not None:
            check_boolean("use_activation", own.use_activation)
        own._check_extra()
        if "attended_tokens" in (own.extra_kwargs or {}) and model_config.attn_type == "decoder":
            message = "attended_tokens is not supported for models whose tokens see only those before them"
            raise VLLMValidationError(message, "attended_tokens")
        if own.late_interaction_params is not None:
            message = "late_interaction_params is not supported: leave it out; LLM.score and /score compute MaxSim"
            raise VLLMValidationError(message, "late_interaction_params")
        if own.late_chunking_params is not None and own.task != "token_embed":
            message = (
                f"late chunking requires token_embed, not {own.task}: LLM.encode(pooling_task='token_embed'), or "
                "pooler_config={'task': 'token_embed'}"
            )
            raise VLLMValidationError(message, "late_chunking_params")
        for name in ("step_tag_id", "returned_token_ids"):
            value = getattr(own, name)
            if value is not None and own.task != "token_classify":
                raise VLLMValidationError(f"{name} is for the task token_classify, not {own.task}", name, value)
        if own.returned_token_ids and model_config.pooling.has_token_heads:
            message = "returned_token_ids chooses among classes, and a token of this model has one weight: leave it out"
            raise VLLMValidationError(message, "returned_token_ids", own.returned_token_ids)
        for column in check_id_sequence("returned_token_ids", own.returned_token_ids or ()):
            check_integer("returned_token_ids", column, 0, model_config.hf_config.num_labels - 1)
        return own

    def _check_extra(self) -> None:
        given = self.extra_kwargs or {}
        extra = dict(given)
        if (ones := extra.pop(name := "compressed_token_type_ids", None)) is not None:
            is_range = isinstance(ones, list | tuple) and len(ones) == 2
            places = [check_integer(name, place, 0) for place in (ones if is_range else (ones,))]
            given[name] = places if is_range else places[0]
        if (number := extra.pop(name := "attended_tokens", None)) is not None:
            given[name] = check_integer(name, number, 1)
        for name in ("skipped_token_ids", "kept_token_ids"):
            ids = extra.pop(name, None)
            if ids is None:
                continue
            if self.task != "token_embed" or self.late_chunking_params is not None:
                raise VLLMValidationError(f"{name} is for the task token_embed without late chunking", name, self.task)
            check_id_sequence(name, ids)
        if extra:
            name = next(iter(extra))
            known = "compressed_token_type_ids, attended_tokens, skipped_token_ids, kept_token_ids"
            message = f"extra_kwargs takes {known}, and max_tokens_per_doc for LLM.score; got {name!r}"
            raise VLLMValidationError(message, "extra_kwargs", name)

    def clone(self) -> PoolingParams:
        """A copy of its own."""
        own = copy.copy(self)
        for name in _MUTABLE:
            value = getattr(own, name)
            if value is not None:
                setattr(own, name, copy.deepcopy(value))
        return own


def check_dimensions(dimensions: Any, model_config: Any) -> None:
    """
    Raises:
        VLLMValidationError: the model's embeddings cannot be cut to so many numbers.
    """
    if dimensions is None:
        return
    if isinstance(dimensions, bool) or not isinstance(dimensions, int):
        raise wrong_type("dimensions", dimensions, "an integer")
    size = model_config.embedding_size
    if dimensions == size:
        return
    if not model_config.is_matryoshka:
        problem = (
            "the model's config.json does not say that the first numbers of an embedding are one, too (Matryoshka): "
            "leave dimensions out, or, if the model was trained so, start it with "
            'hf_overrides={"is_matryoshka": true} or {"matryoshka_dimensions": [...]}'
        )
    elif (sizes := model_config.matryoshka_dimensions) and dimensions not in sizes:
        problem = f"the model was trained for the dimensions {', '.join(map(str, sizes))}"
    elif not 1 <= dimensions <= size:
        problem = f"the model's embeddings have dimensions in range 1 to {size}"
    else:
        return
    raise VLLMValidationError(f"dimensions={shown(dimensions)}: {problem}", "dimensions", dimensions)


def _check_positive(name: str, value: Any) -> int:
    value = whole(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_INTEGER:
        raise VLLMValidationError(f"{name} must be a positive integer up to 2**63 - 1, got {shown(value)}", name, value)
    return value


def classified_length(ids: Any, padding_id: int | None) -> int:
    """How many ids there are up to the last one that is not `padding_id`; at least one."""
    end = len(ids)
    while end > 1 and ids[end - 1] == padding_id:
        end -= 1
    return end
