"""Beam searches over an engine: in every step each beam of each prompt is a request for one reading.

The prefix cache holds what the beams share. A search's next step is queued as soon as all its beams have been read.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from vllm.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence, beam_search_score
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.logprobs.lists import LogprobsLists
from vllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.utils.checks import wrong_type
from vllm.v1.engine.beam_search import BeamSearch, Hypothesis
from vllm.v1.engine.detokenizer import Detokenizer
from vllm.v1.engine.input_processor import ProcessedPrompt
from vllm.v1.engine.llm_engine import LLMEngine

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


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


class Search:
    """One prompt's search: its queries in the engine, and what it has read."""

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
        self.metrics = RequestMetrics(time.monotonic())
        self.num_cached_tokens: int | None = None
        self.error: str | None = None
        self.beams = BeamSearch(
            prompt.token_ids,
            params.num_sequences,
            params.max_tokens,
            () if params.ignore_eos else engine.input_processor.eos_token_ids,
            params.stop_token_ids or (),
            params.length_penalty,
            params.early_stopping,
        )
        num_topk = min(self.beams.num_candidates, engine.model_config.vocab_size)
        self.query_params = SamplingParams(
            max_tokens=0,
            temperature=params.temperature,
            logprobs=None if params.logprob_token_ids else num_topk,
            logprob_token_ids=params.logprob_token_ids,
            logprobs_mode="processed_logprobs",
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            extra_args=params.extra_args,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.pending: list[str] = []  # ids of the present step's queries, in their order
        self.answers: dict[str, FlatLogprobs] = {}  # to some of these
        self._query_numbers = itertools.count()
        self._history: list[list[FlatLogprobs]] = []  # the readings of past steps, in the order of their queries

    def next_queries(self) -> tuple[list[str], list[ProcessedPrompt]]:
        """The next step's queries, with an id each."""
        prompts = [ProcessedPrompt(None, ids, self.prompt.cache_salt) for ids in self.beams.queries()]
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
            self.metrics.first_token_time = time.monotonic()

    def advance(self) -> None:
        """Complete the present step, whose queries all have answers."""
        readings = [self.answers[request_id] for request_id in self.pending]
        self.beams.advance([(each.token_ids, each.logprobs) for each in readings])
        self.pending, self.answers = [], {}
        if self.returns_logprobs:
            self._history.append(readings)

    @property
    def is_over(self) -> bool:
        """Whether there is a result, or an error."""
        return self.error is not None or self.beams.finished

    def output(self, tokenizer: Tokenizer | None) -> RequestOutput:
        self.metrics.finished_time = time.monotonic()
        if self.error is not None:
            outputs = [CompletionOutput(0, "", [], finish_reason="error", error=self.error)]
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
        text = ""
        if tokenizer is not None and self.params.detokenize:
            detokenizer = Detokenizer(tokenizer, self.params, self.prompt.token_ids)
            detokenizer.update(found.token_ids, stopped_by_token=found.finish_reason == "stop")
            text = detokenizer.take_text(finished=True, delta=False)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=found.token_ids,
            cumulative_logprob=found.cum_logprob,
            logprobs=self._readings_of(found, tokenizer) if self.returns_logprobs else None,
            finish_reason=found.finish_reason,
            stop_reason=found.stop_reason,
        )

    def _readings_of(self, found: Hypothesis, tokenizer: Tokenizer | None) -> FlatLogprobs:
        """One position a token: the token itself, then the candidates by rank."""
        result = FlatLogprobs(tokenizer.decode_tokens if tokenizer is not None else None)
        for step, (token_id, query) in enumerate(zip(found.token_ids, found.path, strict=True)):
            read = self._history[step][query]
            chosen = np.flatnonzero(read.token_ids == token_id)[:1]
            columns = np.concatenate([chosen, np.arange(len(read.token_ids))])[None]
            ids, logprobs = read.token_ids[columns], read.logprobs[columns]
            lists = LogprobsLists(ids, logprobs, read.logits[columns], read.ranks[columns], read.lse, num_topk=0)
            result.append((lists, 0), len(read.token_ids))
        return result


def as_sampling_params(params: BeamSearchParams) -> SamplingParams:
    """The same search as a request's parameters; a VLLMValidationError if `params` is something else."""
    if not isinstance(params, BeamSearchParams):
        raise wrong_type("params", params, "BeamSearchParams")
    fields = {**asdict(params), "use_beam_search": True, "n": params.beam_width, "temperature": 0.0}
    # Neutral by now; asdict makes a dict of the former.
    for name in ("beam_width", "structured_outputs", "watermarking", "allowed_token_ids"):
        del fields[name]
    own = SamplingParams(**fields, detokenize=False)
    # SamplingParams refuses a temperature beside use_beam_search, where it would most often be a forgotten default.
    own.temperature = params.temperature
    # Read, not masked: what is allowed keeps its probability in the whole vocabulary.
    own.logprob_token_ids = params.allowed_token_ids
    return own


def as_beam_search_output(
    output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    """What `LLM.beam_search` returns for a search with logprobs."""
    error = next((each.error for each in output.outputs if each.error is not None), None)
    if error is not None:
        return BeamSearchOutput([], error)
    sequences = []
    for found in output.outputs:
        cum_logprob, tokens, text = found.cumulative_logprob, output.prompt_token_ids + found.token_ids, None
        assert cum_logprob is not None and found.logprobs is not None, "searches have both"
        score = beam_search_score(cum_logprob, len(found.token_ids), params.length_penalty)
        if tokenizer is not None:
            hidden = found.finish_reason == "stop" and not params.include_stop_str_in_output
            text = tokenizer.decode(tokens[:-1] if hidden else tokens, params.skip_special_tokens)
        ended = (found.finish_reason, found.stop_reason)
        sequences.append(BeamSearchSequence(tokens, found.logprobs, cum_logprob, score, text, *ended))
    return BeamSearchOutput(sequences)
