"""Poolers of upstream's models: what their own are derived from, and those that pool as the engine does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vllm.layers import pooler as ours
from vllm.pooling_params import PoolingParams
from vllm.upstream.config.current import get_current_vllm_config
from vllm.upstream.outside.views import engines_own

PoolerOutput = Tensor | list[Tensor | None]


@dataclass(frozen=True)
class PoolingParamsUpdate:
    """The needs of a pooler beside hidden states. Requests have their tokens' ids in any case."""

    requires_token_ids: bool = False

    def __or__(self, other: PoolingParamsUpdate) -> PoolingParamsUpdate:
        return PoolingParamsUpdate(self.requires_token_ids or other.requires_token_ids)

    def apply(self, params: PoolingParams) -> None:
        """Nothing: the ids are there."""


@dataclass
class PoolingStates:
    """Upstream's states of a prompt that comes in chunks; prompts of these models come whole."""

    hidden_states_cache: list[Tensor] = field(default_factory=list)

    def clean(self) -> None:
        """Forget it."""
        self.hidden_states_cache.clear()


@dataclass
class PoolingCursor:
    """Where requests are in the rows of hidden states: int64 [B] of each request's first and last row, and their
    lengths, on the CPU."""

    index: list[int]
    first_token_indices_gpu: Tensor
    last_token_indices_gpu: Tensor
    prompt_lens_cpu: Tensor
    seq_lens_cpu: Tensor
    num_scheduled_tokens_cpu: Tensor

    def is_partial_prefill(self) -> bool:
        """False: prompts come whole."""
        return False

    def is_finished(self) -> Tensor:
        """bool [B], True."""
        return torch.ones(len(self.index), dtype=torch.bool)


@dataclass
class PoolingMetadata:
    """The requests that are pooled.

    Attributes:
        prompt_lens: int64 [B], on the CPU.
        prompt_token_ids: int64 [B, longest], zeros behind the shorter ones.
        pooling_params: of each.
    """

    prompt_lens: Tensor
    prompt_token_ids: Tensor | None
    pooling_params: list[PoolingParams]
    pooling_states: list[PoolingStates] = field(default_factory=list)
    pooling_cursor: PoolingCursor | None = None

    @property
    def tasks(self) -> list[Any]:
        """The tasks of each."""
        return [params.task for params in self.pooling_params]

    @property
    def prompt_token_ids_cpu(self) -> Tensor | None:
        """`prompt_token_ids` on the CPU."""
        return None if self.prompt_token_ids is None else self.prompt_token_ids.cpu()

    def get_prompt_token_ids(self) -> list[Tensor]:
        """int64 [L] of each."""
        assert self.prompt_token_ids is not None
        return [ids[:length] for ids, length in zip(self.prompt_token_ids, self.prompt_lens.tolist(), strict=True)]

    def get_prompt_token_ids_cpu(self) -> list[Tensor]:
        """The same on the CPU."""
        return [ids.cpu() for ids in self.get_prompt_token_ids()]

    def get_pooling_cursor(self) -> PoolingCursor:
        """Where they are."""
        assert self.pooling_cursor is not None
        return self.pooling_cursor

    def __getitem__(self, indices: slice) -> PoolingMetadata:
        ids = None if self.prompt_token_ids is None else self.prompt_token_ids[indices]
        lengths, params = self.prompt_lens[indices], self.pooling_params[indices]
        return PoolingMetadata(lengths, ids, params, self.pooling_states[indices], _cursor(lengths))


def _cursor(lengths: Tensor) -> PoolingCursor:
    ends = lengths.cumsum(0)
    return PoolingCursor(list(range(len(lengths))), ends - lengths, ends - 1, lengths, lengths, lengths)


def metadata_of(token_ids: Sequence[int], params: PoolingParams, device: torch.device) -> PoolingMetadata:
    """The metadata of one request."""
    ids, lengths = torch.tensor([list(token_ids)], device=device), torch.tensor([len(token_ids)])
    return PoolingMetadata(lengths, ids, [params], [PoolingStates()], _cursor(lengths))


class Pooler(nn.Module, ABC):
    """From the hidden states of requests, one after another, to a result of each."""

    @abstractmethod
    def get_supported_tasks(self) -> AbstractSet[Any]:
        """Tasks that it does."""

    def get_pooling_updates(self, task: Any) -> PoolingParamsUpdate:
        """The needs of a task."""
        return PoolingParamsUpdate()

    @abstractmethod
    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        """[T, H] -> a result of each request."""

    @staticmethod
    def for_embed(pooler_config: Any, **former: Any) -> Pooler:
        """See `pooler_for_embed`."""
        return pooler_for_embed(pooler_config)

    @staticmethod
    def for_encode(pooler_config: Any, **former: Any) -> Pooler:
        """See `pooler_for_token_embed`."""
        return pooler_for_token_embed(pooler_config)


class EnginePooler(Pooler):
    """Pools as the engine does for its own models: by `pooler_config`, the folder's modules, or the model's default.

    Args:
        tasks: those that it does.
        projector: of pooled states before all else.
        classifier: from pooled states to logits.
    """

    def __init__(
        self,
        tasks: AbstractSet[str],
        projector: Callable[[Tensor], Tensor] | None = None,
        classifier: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._tasks, self._projector = tasks, projector
        config: Any = engines_own(get_current_vllm_config().model_config)
        classify = None if classifier is None else (lambda rows: classifier(rows).float())
        self._pooler = ours.Pooler(config, torch.get_default_device(), classify)

    def get_supported_tasks(self) -> AbstractSet[str]:
        return self._tasks

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        results: list[Tensor | None] = []
        for own, ids, params in _requests(hidden_states, pooling_metadata):
            rows = own if self._projector is None else self._projector(own)
            results.append(self._pooler(rows, ids, params))
        return results


def _requests(hidden: Tensor, metadata: PoolingMetadata) -> Iterator[tuple[Tensor, list[int], PoolingParams]]:
    ids = [each.tolist() for each in metadata.get_prompt_token_ids_cpu()]
    return zip(hidden.split(metadata.prompt_lens.tolist()), ids, metadata.pooling_params, strict=True)


class DispatchPooler(Pooler):
    """A pooler for each task."""

    def __init__(self, poolers_by_task: Mapping[str, Pooler]) -> None:
        super().__init__()
        self.poolers_by_task = nn.ModuleDict(poolers_by_task)

    @classmethod
    def for_embedding(cls, pooler_config: Any) -> DispatchPooler:
        """For embeddings of texts and of tokens."""
        return cls({"token_embed": pooler_for_token_embed(pooler_config), "embed": pooler_for_embed(pooler_config)})

    @classmethod
    def for_seq_cls(cls, pooler_config: Any, *, pooling: Any = None, classifier: Any = None) -> DispatchPooler:
        """For classes of texts and of tokens."""
        kinds: dict[str, Any] = {"token_classify": pooler_for_token_classify, "classify": pooler_for_classify}
        return cls({task: make(pooler_config, classifier=classifier) for task, make in kinds.items()})

    def get_supported_tasks(self) -> AbstractSet[str]:
        return set(self.poolers_by_task)

    def get_pooling_updates(self, task: Any) -> PoolingParamsUpdate:
        own: Any = self.poolers_by_task[task]
        return own.get_pooling_updates(task)

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        (task,) = set(pooling_metadata.tasks)
        return self.poolers_by_task[task](hidden_states, pooling_metadata)


class IdentityPooler(Pooler):
    """The hidden states themselves."""

    def get_supported_tasks(self) -> AbstractSet[str]:
        return {"plugin", "score"}

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        return list(hidden_states.split(pooling_metadata.prompt_lens.tolist()))


def pooler_for_embed(pooler_config: Any, **former: Any) -> Pooler:
    """One embedding of each text."""
    return EnginePooler({"embed"})


def pooler_for_token_embed(pooler_config: Any, projector: Callable[[Tensor], Tensor] | None = None) -> Pooler:
    """An embedding of each token."""
    return EnginePooler({"token_embed"}, projector)


def pooler_for_classify(
    pooler_config: Any, *, pooling: Any = None, classifier: Any = None, act_fn: Any = None, **former: Any
) -> Pooler:
    """Classes of each text.

    Raises:
        ValueError: there is a function of the model's own among its parts.
    """
    _refuse_parts(pooling=pooling, act_fn=act_fn)
    return EnginePooler({"classify"}, classifier=classifier)


def pooler_for_token_classify(
    pooler_config: Any, pooling: Any = None, classifier: Any = None, act_fn: Any = None
) -> Pooler:
    """Classes of each token. ValueError as `pooler_for_classify`."""
    _refuse_parts(pooling=pooling, act_fn=act_fn)
    return EnginePooler({"token_classify"}, classifier=classifier)


def _refuse_parts(**parts: Any) -> None:
    if given := [name for name, value in parts.items() if value is not None and not isinstance(value, str)]:
        raise ValueError(f"{given[0]} of a pooler is not served: derive a Pooler of your own, which does all of it")


class OwnPooler:
    """Lets the engine pool by a model's own pooler."""

    def __init__(self, pooler: Any, config: Any) -> None:
        """ValueError: the pooler does not do what the model is asked for."""
        self._pooler = pooler
        tasks, wanted = set(pooler.get_supported_tasks()), config.pooling_tasks
        if not tasks & {*wanted, "plugin"}:
            known = ", ".join(sorted(map(str, tasks)))
            raise ValueError(
                f"the model's pooler does {known}, and not {wanted[0]}: choose by pooler_config={{'task': ...}} or "
                "convert"
            )

    def __call__(self, hidden: Tensor, token_ids: Any, params: PoolingParams) -> Tensor:
        """float32, the result of one request. ValueError: the pooler does not do the task."""
        tasks = {str(task) for task in self._pooler.get_supported_tasks()}
        if params.task not in tasks:
            raise ValueError(f"task={params.task!r} is none of the model's pooler: {', '.join(sorted(tasks))}")
        result = self._pooler(hidden, metadata_of(list(token_ids), params, hidden.device))
        (own,) = result
        return own.float()
