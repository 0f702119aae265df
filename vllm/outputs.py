"""Results of the engine's calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from vllm.logger import init_logger, warn_once
from vllm.logprobs import FlatLogprobs, PromptLogprobs, PromptTables
from vllm.pooling_outputs import ClassificationOutput as ClassificationOutput
from vllm.pooling_outputs import ClassificationRequestOutput as ClassificationRequestOutput
from vllm.pooling_outputs import EmbeddingOutput as EmbeddingOutput
from vllm.pooling_outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
from vllm.pooling_outputs import LateChunk as LateChunk
from vllm.pooling_outputs import LateChunks as LateChunks
from vllm.pooling_outputs import PoolingOutput as PoolingOutput
from vllm.pooling_outputs import PoolingRequestOutput as PoolingRequestOutput
from vllm.pooling_outputs import RequestError as RequestError
from vllm.pooling_outputs import ScoringOutput as ScoringOutput
from vllm.pooling_outputs import ScoringRequestOutput as ScoringRequestOutput

logger = init_logger(__name__)


@dataclass
class RequestSpecDecodeMetrics:
    """The tokens that were drafted for one generated sequence, and those that were right. A draft's right tokens
    are followed by one that the model itself drew.

    Attributes:
        num_spec_tokens: of the longest draft.
        histogram: drafts by the number of their tokens that were right: 0, 1, 2 ...
        num_draft_tokens: tokens of all drafts.
        per_step_accepted, per_step_drafted: the right tokens and all tokens of each draft, in order.
    """

    num_spec_tokens: int = 0
    histogram: list[int] = field(default_factory=lambda: [0])
    num_draft_tokens: int = 0
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)

    def observe(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count a draft."""
        self.num_spec_tokens = max(self.num_spec_tokens, num_draft_tokens)
        self.histogram += [0] * (self.num_spec_tokens + 1 - len(self.histogram))
        self.histogram[num_accepted] += 1
        self.num_draft_tokens += num_draft_tokens
        self.per_step_accepted.append(num_accepted)
        self.per_step_drafted.append(num_draft_tokens)

    def to_dict(self) -> dict[str, Any]:
        """With their sums; `mean_acceptance_length` counts the token after a draft, too."""
        num_drafts, num_accepted = len(self.per_step_accepted), sum(self.per_step_accepted)
        return {
            "mean_acceptance_length": 1 + num_accepted / num_drafts if num_drafts else 1.0,
            "draft_acceptance_rate": num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0,
            "acceptance_histogram": list(self.histogram),
            "num_spec_steps": num_drafts,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.num_spec_tokens,
            "per_step_accepted": list(self.per_step_accepted),
            "per_step_drafted": list(self.per_step_drafted),
        }


@dataclass
class CompletionOutput:
    """One generated sequence.

    Attributes:
        index: which of the request's n sequences.
        text: the generated text, without a stop string unless `include_stop_str_in_output`.
        cumulative_logprob: sum of the sampled tokens' logprobs; None without readings, unless sequences were ranked by
            it.
        logprobs: one `{token_id: Logprob}` a position, over numpy arrays; None if not requested.
        finish_reason: "stop", "length", "repetition", "abort" or "error"; None while running.
        stop_reason: the stop string or stop token id; None for the end-of-sequence token. "no_token_left" beside
            "error": the request's constraints ruled out every token, and what there is was generated before.
        weight_versions: of the weights that the tokens so far are of, in order, each change once: how often an engine's
            weights have changed, or what `finish_weight_update` called them.
        spec_decode_metrics: what became of drafted tokens; None where none were.
        routed_experts, lora_request, sampling_mask: never set by this engine; for callers that read them.
        error: the message if finish_reason is "error".
        allowed_mass: one number a position, the model's probability of all tokens that `structured_outputs` allowed
            there; None unless `grammar_readings` requested it.
        allowed_mass_total: sum of their logarithms: the logprob that free sampling would have kept the form so far.
        choice_readings: how likely each choice of the form is after the prompt, once it has ended; None unless
            requested.
        field_readings: by path (`$.items[0].kind`), how likely each value of a field is after the text before it, once
            it has ended; None unless requested.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: FlatLogprobs | None = None
    routed_experts: np.ndarray | None = field(default=None, repr=False)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any | None = field(default=None, repr=False)
    sampling_mask: Any | None = field(default=None, repr=False)
    spec_decode_metrics: RequestSpecDecodeMetrics | None = field(default=None, repr=False)
    weight_versions: list[Any] | None = field(default=None, repr=False)
    error: str | None = None
    allowed_mass: list[float] | None = None
    allowed_mass_total: float | None = None
    choice_readings: ValueReadings | None = None
    field_readings: dict[str, ValueReadings] | None = None

    def finished(self) -> bool:
        """Whether this sequence has ended."""
        return self.finish_reason is not None

    def _extend(self, following: CompletionOutput) -> None:
        """Add the tokens that came after these; the end, if it is there, is the later one's."""
        self.text += following.text
        self.token_ids = [*self.token_ids, *following.token_ids]
        if following.logprobs is not None:
            self.logprobs = following.logprobs if self.logprobs is None else self.logprobs + following.logprobs
        if following.allowed_mass is not None:
            self.allowed_mass = [*(self.allowed_mass or ()), *following.allowed_mass]
        for name in _LATEST:
            value = getattr(following, name)
            if value is not None:
                setattr(self, name, value)


_LATEST = (
    "cumulative_logprob",
    "routed_experts",
    "finish_reason",
    "stop_reason",
    "sampling_mask",
    "spec_decode_metrics",
    "weight_versions",
    "error",
    "allowed_mass_total",
    "choice_readings",
    "field_readings",
)


@dataclass
class ValueReadings:
    """How likely each of V values continues what stands before it; the model's own readings, whatever was drawn.

    Attributes:
        values: as JSON has them; choices are texts.
        texts: what was read: the value as JSON, after what the token across its beginning has before it.
        token_ids: of each text, as the tokenizer spells it.
        logprobs: float64 [V], natural-log probability of each text's tokens; NaN where the context did not hold them.
        shares: float64 [V], softmax of `logprobs` over the values.
        chosen: index of the value that the answer has; None if it breaks off before.
    """

    values: list[Any]
    texts: list[str] = field(repr=False)
    token_ids: list[list[int]] = field(repr=False)
    logprobs: np.ndarray
    shares: np.ndarray
    chosen: int | None


@dataclass
class RequestMetrics:
    """Tokens and times of one request, in seconds of the monotonic clock, in upstream's names; 0.0 if not reached.

    Attributes:
        num_generation_tokens: generated so far, of all its sequences.
        arrival_time, queued_ts: when it came.
        last_token_ts: when its last token so far came.
        first_token_latency: seconds from arrival to the first token.
        is_corrupted: never; NaN is an error.
        finished_time: None before it has ended.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    is_corrupted: bool = False
    finished_time: float | None = None

    @classmethod
    def arrived(cls, now: float) -> RequestMetrics:
        """The metrics of a request that comes now."""
        return cls(arrival_time=now, queued_ts=now)

    def begin(self, scheduled: float | None, now: float) -> None:
        """The request was scheduled first at `scheduled`, and its first token or reading comes now."""
        self.scheduled_ts = scheduled or 0.0
        self.first_token_ts, self.first_token_latency = now, now - self.arrival_time

    @property
    def first_scheduled_time(self) -> float | None:
        """`scheduled_ts`; None if not reached."""
        return self.scheduled_ts or None

    @property
    def first_token_time(self) -> float | None:
        """`first_token_ts`; None if not reached."""
        return self.first_token_ts or None


@dataclass(init=False)
class RequestOutput:
    """The output of one request.

    Attributes:
        prompt: the prompt's text; None if token ids were given.
        prompt_logprobs: one `{token_id: Logprob}` a prompt position, None where nothing was read (always at the first);
            None if not requested.
        outputs: one CompletionOutput a sequence, by index.
        finished: whether all sequences have ended.
        num_cached_tokens: prompt tokens found in the prefix cache.
        lora_request, encoder_prompt, encoder_prompt_token_ids, num_cache_creation_tokens, kv_transfer_params,
            ec_transfer_params: never set by this engine; for callers that read them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None
    lora_request: Any | None
    encoder_prompt: str | None = field(repr=False)
    encoder_prompt_token_ids: list[int] | None = field(repr=False)
    num_cached_tokens: int | None
    num_cache_creation_tokens: int | None = field(repr=False)
    kv_transfer_params: dict[str, Any] | None = field(repr=False)
    ec_transfer_params: dict[str, Any] | None = field(repr=False)

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        prompt_logprobs: PromptLogprobs | None = None,
        outputs: list[CompletionOutput] | None = None,
        finished: bool = False,
        metrics: RequestMetrics | None = None,
        lora_request: Any | None = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int | None = None,
        num_cache_creation_tokens: int | None = None,
        *,
        prompt_token_id_logprobs: np.ndarray | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        ec_transfer_params: dict[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        """Further arguments, such as those of a later version, are named in a warning and left out."""
        self.request_id, self.prompt, self.prompt_token_ids = request_id, prompt, prompt_token_ids
        self.prompt_logprobs, self.outputs, self.finished = prompt_logprobs, outputs or [], finished
        self.metrics, self.lora_request = metrics, lora_request
        self.encoder_prompt, self.encoder_prompt_token_ids = encoder_prompt, encoder_prompt_token_ids
        self.num_cached_tokens, self.num_cache_creation_tokens = num_cached_tokens, num_cache_creation_tokens
        if prompt_token_id_logprobs is not None:
            self.prompt_token_id_logprobs = prompt_token_id_logprobs
        self.kv_transfer_params, self.ec_transfer_params = kv_transfer_params, ec_transfer_params
        if unknown:
            warn_once(logger, "RequestOutput does not know %s: left out", ", ".join(sorted(unknown)))

    @cached_property
    def prompt_token_id_logprobs(self) -> np.ndarray | None:
        """Logprobs of `prompt_logprob_token_ids`, float32 [rows, K]: row i scores prompt token prompt_logprob_start +
        i + 1, columns are in the order requested, -inf stands at padding (-1, or beyond a shorter list). Logits in a
        `*_logits` mode. None if none were requested, or if the prompt has not been read to its end."""
        readings = self.prompt_logprobs
        if not isinstance(readings, PromptLogprobs):
            return None
        return readings.requested_logprobs(max(len(self.prompt_token_ids) - readings.num_unread, 0))

    @cached_property
    def prompt_tables(self) -> PromptTables | None:
        """The prompt's readings as arrays [rows, K] by name, with Kullback-Leibler divergences by `kl`. None if none
        were requested."""
        readings = self.prompt_logprobs
        return readings.tables() if isinstance(readings, PromptLogprobs) else None

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Take in a later output of the same request.

        Args:
            aggregate: it holds what came after this one, which is extended; False = it holds all so far, and its
                sequences take the place of these.
        """
        self.finished = self.finished or next_output.finished
        places = {each.index: place for place, each in enumerate(self.outputs)}
        for following in next_output.outputs:
            place = places.get(following.index)
            if place is None:
                self.outputs.append(following)
            elif aggregate:
                self.outputs[place]._extend(following)
            else:
                self.outputs[place] = following
        if next_output.kv_transfer_params is not None:
            self.kv_transfer_params = next_output.kv_transfer_params


@dataclass
class LabelScore:
    """The score of one label after one prompt.

    Attributes:
        label: its text; None if token ids were given.
        logprob: natural-log probability that exactly these tokens continue the prompt: the sum of `token_logprobs`.
        token_logprobs: of each token, given the prompt and the tokens before it.
        token_ranks: 1 is the most likely token.
        token_logits: the logits that the logprobs were computed from.
    """

    label: str | None
    token_ids: list[int]
    logprob: float
    token_logprobs: list[float]
    token_ranks: list[int]
    token_logits: list[float]

    @property
    def normalized_logprob(self) -> float:
        """Mean logprob per token, to compare labels of different lengths."""
        return self.logprob / len(self.token_ids)


@dataclass(eq=False)
class LabelScores:
    """The scores of L labels (T tokens in all, in the order given) after one prompt.

    Attributes:
        prompt: the prompt's text; None if token ids were given.
        label_texts: each label's text; None where token ids were given.
        logprobs: float64 [L], natural-log probability of each label's token sequence.
        probabilities: float64 [L], softmax of `logprobs` over the labels; NaN if all are impossible.
        mass: probability, in [0, 1], that the continuation begins with any label: the sum of exp(logprob) over the
            labels that do not begin with another label ("New York" implies "New").
        token_logprobs: float32 [T].
        token_ranks: int32 [T], 1 + the number of vocabulary entries with a greater logit.
        token_logits: float32 [T], the logits that the logprobs were computed from.
        error: why this prompt has no scores (NaN, ranks 0); None without an error.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    label_texts: list[str | None] = field(repr=False)
    label_token_ids: list[list[int]] = field(repr=False)
    logprobs: np.ndarray
    probabilities: np.ndarray
    mass: float
    token_logprobs: np.ndarray = field(repr=False)
    token_ranks: np.ndarray = field(repr=False)
    token_logits: np.ndarray = field(repr=False)
    error: str | None = None

    @cached_property
    def labels(self) -> list[LabelScore]:
        scores, start = [], 0
        for text, token_ids, total in zip(self.label_texts, self.label_token_ids, self.logprobs.tolist(), strict=True):
            span = slice(start, start := start + len(token_ids))
            readings = (array[span].tolist() for array in (self.token_logprobs, self.token_ranks, self.token_logits))
            scores.append(LabelScore(text, token_ids, total, *readings))
        return scores

    @property
    def best(self) -> LabelScore | None:
        """The label with the highest logprob (the first of equal ones); None after an error."""
        return None if self.error is not None else self.labels[int(np.argmax(self.logprobs))]
