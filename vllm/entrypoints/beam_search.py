"""Beam searches over an engine: in every step each beam of each prompt is a request for one reading.

The prefix cache holds what the beams share. A search's next step is queued as soon as all its beams have been read.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.logprobs.lists import LogprobsLists
from vllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from vllm.params.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.utils.checks import wrong_type
from vllm.v1.engine.detokenizer import Detokenizer
from vllm.v1.engine.input_processor import ProcessedPrompt
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.plans.beam_search import BeamSearch, Hypothesis
from vllm.v1.outputs import NO_TOKEN_LEFT, NO_TOKEN_MESSAGE

if TYPE_CHECKING:
    from vllm.entrypoints.async_llm import AsyncLLM


class BeamSearches:
    """The beam searches of one call; with `returns_logprobs` each sequence has the readings of its tokens. Leaving the
    context drops those that are unfinished."""

    def __init__(self, engine: LLMEngine, returns_logprobs: bool) -> None:
        self._engine = engine
        self._returns_logprobs = returns_logprobs
        self._searches: dict[str, Search] = {}  # by the id of each query in the engine

    def __enter__(self) -> BeamSearches:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop(list(self._searches))

    def add_processed(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[ProcessedPrompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
    ) -> None:
        """Begin a search for each request with use_beam_search, queue the others as they are. After a
        VLLMValidationError of LLMEngine.add_processed, leaving the context drops the searches that were begun."""
        others = []
        for request in zip(request_ids, prompts, params, priorities, strict=True):
            if request[2].use_beam_search:
                self._queue(Search(*request, self._engine, self._returns_logprobs))
            else:
                others.append(request)
        if others:
            ids, own_prompts, own_params, own_priorities = zip(*others, strict=True)
            self._engine.add_processed(ids, own_prompts, own_params, priorities=own_priorities)

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine (see LLMEngine.step); the finished searches, and the outputs of other requests."""
        outputs = []
        answered: dict[Search, None] = {}
        for output in self._engine.step():
            search = self._searches.pop(output.request_id, None)
            if search is None:
                outputs.append(output)
            else:
                search.take(output.request_id, output)
                answered[search] = None
        for search in answered:
            if search.error is None:
                if len(search.answers) < len(search.pending):
                    continue
                search.advance()
                if not search.beams.finished:
                    try:
                        self._queue(search)
                    except VLLMValidationError as error:
                        # It has outgrown the KV cache; the other searches go on.
                        search.error = str(error)
            if search.is_over:
                self._drop(search.pending)
                outputs.append(search.output(self._engine.tokenizer))
        return outputs

    def _queue(self, search: Search) -> None:
        request_ids, prompts = search.next_queries()
        count = len(request_ids)
        self._engine.add_processed(
            request_ids, prompts, [search.query_params] * count, search.metrics.arrival_time, [search.priority] * count
        )
        self._searches.update(dict.fromkeys(request_ids, search))

    def _drop(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._searches.pop(request_id, None)
        self._engine.abort_request(request_ids)


@dataclass
class BeamOutput(CompletionOutput):
    """A sequence of a beam search, with the score by which it was ranked."""

    score: float = 0.0


@dataclass(frozen=True)
class Candidates:
    """The readings of C tokens that may follow a beam."""

    token_ids: np.ndarray  # int32 [C]
    logprobs: np.ndarray  # float32 [C], and so are the next ones: as logprobs_mode says
    logits: np.ndarray
    ranks: np.ndarray  # int32 [C]
    lse: np.ndarray  # float32 [1]
    scores: np.ndarray  # float32 [C], what they add to the beam's score; above -inf

    @classmethod
    def of(cls, read: FlatLogprobs) -> Candidates:
        """From a query's answer: the readings and, where its logits were processed, the scores as a second row."""
        count = read.end_indices[0]
        scores = read.logprobs[count:] if len(read) > 1 else read.logprobs
        columns = np.flatnonzero(scores > -np.inf)
        token_ids, logprobs = read.token_ids[columns], read.logprobs[columns]
        return cls(token_ids, logprobs, read.logits[columns], read.ranks[columns], read.lse[:1], scores[columns])

    def column(self, token_id: int) -> int:
        """The candidate's column."""
        return int(np.flatnonzero(self.token_ids == token_id)[0])

    def logprob(self, token_id: int) -> float:
        """Logprob of a candidate."""
        return float(self.logprobs[self.column(token_id)])


class Search:
    """One prompt's search: its queries in the engine, and what it has read.

    Beams are ranked by what their tokens have in the model, over the whole vocabulary. What is ruled out
    (allowed_token_ids, bad_words, min_tokens, -inf of a processor) is no candidate; what logit_bias and processors add
    to a logit adds to the rank. `logprobs_mode` says which logprobs are returned.
    """

    def __init__(
        self,
        request_id: str,
        prompt: ProcessedPrompt,
        params: SamplingParams,
        priority: int,
        engine: LLMEngine | AsyncLLM,
        returns_logprobs: bool,
    ) -> None:
        """`params`: with use_beam_search, from the input processor's `process_params`."""
        assert params.max_tokens is not None, "the input processor sets it"
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.priority = priority
        self.returns_logprobs = returns_logprobs
        self.metrics = RequestMetrics.arrived(time.monotonic())
        self.num_cached_tokens: int | None = None
        self.error: str | None = None
        self.stop_reason: str | None = None  # beside an error
        self.beams = BeamSearch(
            prompt.token_ids,
            params.num_sequences,
            params.max_tokens,
            () if params.ignore_eos else engine.input_processor.eos_token_ids,
            params.stop_token_ids or (),
            params.length_penalty,
            params.early_stopping,
        )
        self.query_params = self._make_query_params(engine)
        self.pending: list[str] = []  # ids of the present step's queries, in their order
        self.answers: dict[str, FlatLogprobs] = {}  # to some of these
        self._query_numbers = itertools.count()
        self._logprobs: list[dict[tuple[int, int], float]] = []  # of past steps' beams, by query and token
        self._history: list[list[Candidates]] = []  # all that past steps read, in the order of their queries

    def _make_query_params(self, engine: LLMEngine | AsyncLLM) -> SamplingParams:
        params, config = self.params, engine.model_config
        query = params.clone()
        query.n, query.best_of, query.use_beam_search = 1, None, False
        query.max_tokens, query.logprobs = 0, min(self.beams.num_candidates, config.vocab_size)
        query.logprobs_mode = "processed_logprobs" if self._reads_processed else "raw_logprobs"
        if not query.temperature and config.logits_processors:
            # Greedy requests do not call a processor that leaves the most likely token.
            query.temperature = 1.0
        query.detokenize, query.output_kind, query._beam_length = False, RequestOutputKind.FINAL_ONLY, 0
        return query

    @property
    def _reads_processed(self) -> bool:
        return (self.params.logprobs_mode or "").startswith("processed")

    def next_queries(self) -> tuple[list[str], list[ProcessedPrompt]]:
        """The next step's queries, with an id each; `query_params` are theirs."""
        prompts = [self.prompt.with_ids(ids) for ids in self.beams.queries()]
        self.query_params = self.query_params.clone()
        self.query_params._beam_length = len(prompts[0].token_ids) - len(self.prompt.token_ids)
        self.pending = [f"{self.request_id}.beam{next(self._query_numbers)}" for _ in prompts]
        return self.pending, prompts

    def take(self, request_id: str, output: RequestOutput) -> None:
        """Take the answer to one of the present step's queries."""
        (completion,) = output.outputs
        if completion.logprobs is None or completion.finish_reason == "error":
            self.error = completion.error or f"request {request_id!r} ended without a reading"
            return
        self.answers[request_id] = completion.logprobs
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
            self.metrics.begin(None, time.monotonic())

    def advance(self) -> None:
        """Complete the present step, whose queries all have answers."""
        candidates = [Candidates.of(self.answers[request_id]) for request_id in self.pending]
        self.beams.advance([(each.token_ids, each.scores) for each in candidates])
        self.pending, self.answers = [], {}
        taken = [(beam.path[-1], beam.token_ids[-1]) for beam in self.beams.latest()]
        self._logprobs.append({pick: candidates[pick[0]].logprob(pick[1]) for pick in taken})
        if self.returns_logprobs:
            self._history.append(candidates)
        if self.beams.finished and not self.beams.results():
            self.error = f"request {self.request_id}: {NO_TOKEN_MESSAGE}"
            self.stop_reason = NO_TOKEN_LEFT

    @property
    def is_over(self) -> bool:
        """Whether there is a result, or an error."""
        return self.error is not None or self.beams.finished

    def output(self, tokenizer: Tokenizer | None) -> RequestOutput:
        self.metrics.finished_time = time.monotonic()
        if self.error is not None:
            failed = CompletionOutput(0, "", [], finish_reason="error", stop_reason=self.stop_reason, error=self.error)
            outputs = [failed]
        else:
            best = self.beams.results()[: self.params.n]
            outputs = [self._completion(index, each, tokenizer) for index, each in enumerate(best)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=outputs,
            finished=True,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _completion(self, index: int, found: Hypothesis, tokenizer: Tokenizer | None) -> CompletionOutput:
        picks = zip(found.path, found.token_ids, strict=True)
        text = ""
        if tokenizer is not None and self.params.detokenize:
            detokenizer = Detokenizer(tokenizer, self.params, self.prompt.token_ids)
            detokenizer.update(found.token_ids, stopped_by_token=found.finish_reason == "stop")
            text = detokenizer.take_text(finished=True, delta=False)
        return BeamOutput(
            index=index,
            text=text,
            token_ids=found.token_ids,
            cumulative_logprob=sum(self._logprobs[step][pick] for step, pick in enumerate(picks)),
            logprobs=self._readings(found, tokenizer) if self.returns_logprobs else None,
            finish_reason=found.finish_reason,
            stop_reason=found.stop_reason,
            score=found.score,
        )

    def _readings(self, found: Hypothesis, tokenizer: Tokenizer | None) -> FlatLogprobs:
        """One position a token: the token itself, then the candidates by score."""
        decode = tokenizer.decode_tokens if tokenizer is not None else None
        result = FlatLogprobs(decode, as_logits=(self.params.logprobs_mode or "").endswith("logits"))
        for step, (query, token_id) in enumerate(zip(found.path, found.token_ids, strict=True)):
            each = self._history[step][query]
            columns = np.array([[each.column(token_id), *range(len(each.token_ids))]])
            ids, logprobs = each.token_ids[columns], each.logprobs[columns]
            lists = LogprobsLists(ids, logprobs, each.logits[columns], each.ranks[columns], each.lse, num_topk=0)
            result.append((lists, 0), len(each.token_ids))
        return result


def as_sampling_params(params: BeamSearchParams) -> SamplingParams:
    """The same search as a request's parameters; a VLLMValidationError if `params` is something else."""
    if not isinstance(params, BeamSearchParams):
        raise wrong_type("params", params, "BeamSearchParams")
    fields = {**asdict(params), "use_beam_search": True, "n": params.beam_width, "temperature": 0.0}
    fields["structured_outputs"] = params.structured_outputs
    for name in ("beam_width", "watermarking"):
        del fields[name]
    own = SamplingParams(**fields, detokenize=False)
    # SamplingParams refuses a temperature beside use_beam_search, where it would most often be a forgotten default.
    own.temperature = params.temperature
    return own


def as_beam_search_output(
    output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    """The output of `LLM.beam_search` for a search with logprobs."""
    error = next((each.error for each in output.outputs if each.error is not None), None)
    if error is not None:
        return BeamSearchOutput([], error)
    sequences = []
    for found in output.outputs:
        assert isinstance(found, BeamOutput) and found.logprobs is not None, "searches have both"
        cum_logprob, tokens, text = found.cumulative_logprob or 0.0, output.prompt_token_ids + found.token_ids, None
        if tokenizer is not None:
            hidden = found.finish_reason == "stop" and not params.include_stop_str_in_output
            text = tokenizer.decode(tokens[:-1] if hidden else tokens, params.skip_special_tokens)
        ended = (found.finish_reason, found.stop_reason)
        sequences.append(BeamSearchSequence(tokens, found.logprobs, cum_logprob, found.score, text, *ended))
    return BeamSearchOutput(sequences)
