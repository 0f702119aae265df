"""Turns the engine core's outputs into RequestOutputs: text, readings, the samples of a request together."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestMetrics, RequestOutput, RequestSpecDecodeMetrics
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.detokenizer import ContentReader, Detokenizer
from vllm.v1.engine.input_processor import ProcessedPrompt
from vllm.v1.engine.logprobs import LogprobsProcessor, PromptLogprobsProcessor
from vllm.v1.messages import EngineCoreOutput

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.tracing import RequestTracer
    from vllm.v1.engine.plans.form_readings import FormReadings
    from vllm.v1.metrics.engine_metrics import EngineMetrics, News, SequenceRecord


@dataclass
class ProcessedOutputs:
    """The results of one step."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    requests_to_abort: list[str] = field(default_factory=list)  # core ids ended by a stop string
    begun: list[str] = field(default_factory=list)  # requests that got their first token or reading
    ended: list[str] = field(default_factory=list)  # requests that are finished
    # For the core, by the id, prompt, parameters and priority of each: they read the forms of answers.
    to_queue: list[tuple[str, ProcessedPrompt, SamplingParams, int]] = field(default_factory=list)


class _Sequence:
    """One of a request's sequences. `tokenizer`: None for no text."""

    def __init__(
        self,
        core_id: str,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        prompt_ids: list[int],
        content: ContentReader | None = None,
    ) -> None:
        self.core_id = core_id
        self.index = index
        self.token_ids: list[int] = []
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer, params, prompt_ids, content)
        self.logprobs_processor: LogprobsProcessor | None = None
        if params.num_logprobs is not None:
            decode = None if tokenizer is None else tokenizer.decode_tokens
            self.logprobs_processor = LogprobsProcessor(params, decode)
        self.record: SequenceRecord | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.form_readings: tuple[Any, Any] = (None, None)  # of choices and of fields
        self.weight_versions: list[int | str] = []  # of the weights that its tokens are of
        self.drafts: RequestSpecDecodeMetrics | None = None
        self._num_sent = 0
        self._allowed_mass: list[float] | None = [] if params.grammar_readings else None

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the generated tokens' logprobs; -inf after an error."""
        assert self.logprobs_processor is not None, "compared sequences have logprobs"
        return -math.inf if self.error is not None else self.logprobs_processor.cumulative_logprob

    def update(self, output: EngineCoreOutput) -> bool:
        """Add a step's output; True when a stop string ended the sequence, which the core is to abort then."""
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.error = output.error
        if output.num_drafted:
            self.drafts = self.drafts or RequestSpecDecodeMetrics()
            self.drafts.observe(output.num_drafted, output.num_accepted)
        count, stop = self._search(output)
        self.token_ids.extend(output.new_token_ids[:count])
        if self.logprobs_processor is not None and output.logprobs is not None:
            self.logprobs_processor.append(output.logprobs[:count] if count else output.logprobs)
        if self._allowed_mass is not None and output.allowed_mass is not None:
            self._allowed_mass += output.allowed_mass[:count]
        if stop is None:
            return False
        self.finish_reason, self.stop_reason = "stop", stop
        return output.finish_reason is None

    def _search(self, output: EngineCoreOutput) -> tuple[int, str | None]:
        """Decode the new tokens up to the one that completes a stop string; their number, and that string if any."""
        ids, is_stopped = output.new_token_ids, output.finish_reason == "stop"
        is_last = output.finish_reason is not None and output.error is None
        if self.detokenizer is None:
            return len(ids), None
        if len(ids) < 2 or not self.detokenizer.has_stop:
            return len(ids), self.detokenizer.update(ids, is_stopped, is_last)
        for count, token_id in enumerate(ids, start=1):
            ends = count == len(ids)
            stop = self.detokenizer.update([token_id], is_stopped and ends, is_last and ends)
            if stop is not None:
                return count, stop
        return len(ids), None

    def is_due(self, interval: int) -> bool:
        """Whether its new tokens are to be returned: the first, `interval` of them, or the last."""
        num_new = len(self.token_ids) - self._num_sent
        return self._num_sent == 0 or num_new >= interval or self.finish_reason is not None

    def completion(self, delta: bool) -> CompletionOutput:
        """The whole sequence, or what was added since the last call (`delta`)."""
        finished = self.finish_reason is not None
        completion = CompletionOutput(
            index=self.index,
            text=self.detokenizer.take_text(finished, delta) if self.detokenizer is not None else "",
            token_ids=self.token_ids[self._num_sent if delta else 0 :],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            spec_decode_metrics=self.drafts,
            error=self.error,
            weight_versions=list(self.weight_versions),
        )
        if self._allowed_mass is not None:
            new = self._allowed_mass[self._num_sent if delta else 0 :]
            completion.allowed_mass = [math.exp(each) for each in new]
            completion.allowed_mass_total = math.fsum(self._allowed_mass)
        completion.choice_readings, completion.field_readings = self.form_readings
        self._num_sent = len(self.token_ids)
        processor = self.logprobs_processor
        if processor is not None:
            completion.cumulative_logprob = processor.cumulative_logprob
            completion.logprobs = processor.take() if delta else processor.readings()
        return completion


@dataclass
class _FormReading:
    """Answers whose form is being read."""

    plan: FormReadings
    sequences: list[_Sequence]
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)  # of the requests that read it, by id


@dataclass
class _RequestState:
    """A user's request: one or more sequences."""

    request_id: str
    prompt: ProcessedPrompt
    params: SamplingParams
    metrics: RequestMetrics
    sequences: list[_Sequence]
    num_running: int  # of the sequences
    num_best: int | None = None  # of the sequences to return; None: all
    num_copies: int = 1  # of the only sequence that are returned
    prompt_logprobs: PromptLogprobsProcessor | None = None
    prompt_logprobs_sent: bool = False
    num_cached_tokens: int = 0
    changed: dict[_Sequence, None] = field(default_factory=dict)  # since the last output, in that order
    caller: Any = None  # the trace that the request is part of
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    reading: _FormReading | None = None  # while all answers are there, and their form is read

    @property
    def finished(self) -> bool:
        return self.num_running == 0 and self.reading is None

    def make_output(self) -> RequestOutput | None:
        """The output to return now; None when output_kind defers it."""
        if self.finished:
            self.metrics.finished_time = time.monotonic()
        elif self._must_wait():
            return None
        delta = self.params.output_kind is RequestOutputKind.DELTA
        prompt_logprobs = None
        if self.prompt_logprobs is not None and not (delta and self.prompt_logprobs_sent):
            self.prompt_logprobs_sent = True
            processor = self.prompt_logprobs
            prompt_logprobs = processor.take() if self.params._prompt_in_parts else processor.readings
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=self._completions(delta),
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            lora_request=self.prompt.lora_request,
            kv_transfer_params=self.kv_transfer_params,
        )

    def end_reading(self) -> None:
        """Give the answers what their form's readers have found."""
        assert self.reading is not None
        outputs: Any = list(self.reading.outputs.values())
        for sequence, found in zip(self.reading.sequences, self.reading.plan.results(outputs), strict=True):
            sequence.form_readings = found
        self.reading, self.changed = None, dict.fromkeys(self.sequences)

    def prompt_part(self) -> RequestOutput:
        """The prompt's readings since the last part."""
        assert self.prompt_logprobs is not None
        part = self.prompt_logprobs.take()
        return RequestOutput(
            self.request_id,
            self.prompt.text,
            self.prompt.token_ids,
            part,
            metrics=self.metrics,
            lora_request=self.prompt.lora_request,
        )

    def _must_wait(self) -> bool:
        if self.params.output_kind is RequestOutputKind.FINAL_ONLY or self.num_best is not None:
            return True
        interval = self.params.stream_interval or 1
        if interval > 1 and not any(sequence.is_due(interval) for sequence in self.changed):
            return True
        # Another sequence may be ahead of the one that reads the prompt, which the cache may have to hold back.
        is_reading = self.prompt_logprobs is not None and self.sequences[0].finish_reason is None
        return is_reading and not self.prompt_logprobs.is_complete  # type: ignore[union-attr]

    def _completions(self, delta: bool) -> list[CompletionOutput]:
        """All sequences, those that changed, or the best ones."""
        interval = self.params.stream_interval or 1
        due = [sequence for sequence in self.changed if sequence.is_due(interval)]
        for sequence in due:
            del self.changed[sequence]
        if self.num_best is None:
            outputs = [sequence.completion(delta) for sequence in (due if delta else self.sequences)]
            if self.num_copies == 1:
                return outputs
            copies = itertools.product(range(self.num_copies), outputs)
            return [replace(each, index=index, token_ids=each.token_ids.copy()) for index, each in copies]
        best = sorted(self.sequences, key=lambda sequence: -sequence.cumulative_logprob)[: self.num_best]
        outputs = [replace(sequence.completion(delta), index=index) for index, sequence in enumerate(best)]
        if self.params.num_logprobs is None:
            outputs = [replace(output, logprobs=None) for output in outputs]
        return outputs


class OutputProcessor:
    """The user-side state of all unfinished requests. Without a tokenizer texts stay empty."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        metrics: EngineMetrics | None = None,
        tracer: RequestTracer | None = None,
        config: ModelConfig | None = None,
    ) -> None:
        """`config`: of the model, without which no form can be read."""
        self.tokenizer = tokenizer
        self._config = config
        self._metrics = metrics
        self._tracer = tracer
        self._requests: dict[str, _RequestState] = {}
        self._by_core_id: dict[str, tuple[_RequestState, _Sequence]] = {}
        # The version of the weights that the outputs to be processed next are of.
        self.weight_version: int | str = 0
        # The requests that read the forms of answers, and for whom.
        self._readers: OutputProcessor | None = None
        self._read_for: dict[str, _RequestState] = {}

    @property
    def unfinished_request_ids(self) -> list[str]:
        """By which requests were added that are not finished."""
        return list(self._requests)

    def add_request(
        self,
        request_id: str,
        prompt: ProcessedPrompt,
        params: SamplingParams,
        arrival_time: float,
        priority: int = 0,
    ) -> list[tuple[str, SamplingParams]]:
        """Register a request; returns (core id, parameters) of each sequence. VLLMValidationError: an id is in use. The
        requests that read the form of its answers have the prompt's cache, adapter and pictures, and `priority`."""
        if params.num_distinct == 1:
            children = [(request_id, params.child(0) if params.num_sequences > 1 else params)]
        else:
            children = [(f"{index}_{request_id}", params.child(index)) for index in range(params.num_sequences)]
        taken = [core_id for core_id, _ in children if core_id in self._by_core_id]
        if taken or request_id in self._requests:
            raise id_in_use_error(taken[0] if taken else request_id, request_id)
        tokenizer = self.tokenizer if params.detokenize else None
        content_of = prompt.content_of if params.stop else None
        sequences = [
            _Sequence(core_id, index, child, tokenizer, prompt.token_ids, content_of() if content_of else None)
            for index, (core_id, child) in enumerate(children)
        ]
        metrics = RequestMetrics.arrived(arrival_time)
        state = _RequestState(request_id, prompt, params, metrics, sequences, len(sequences), priority=priority)
        if params.num_distinct == 1:
            state.num_copies = params.n
        elif params.num_sequences > params.n:
            state.num_best = params.n
        if params.reads_prompt:
            decode = None if tokenizer is None else tokenizer.decode_tokens
            state.prompt_logprobs = PromptLogprobsProcessor(params, len(prompt.token_ids), decode)
        if self._tracer is not None:
            state.caller = self._tracer.caller()
        self._requests[request_id] = state
        for sequence in sequences:
            self._by_core_id[sequence.core_id] = (state, sequence)
            if self._metrics is not None:
                sequence.record = self._metrics.start(params, len(prompt.token_ids), arrival_time)
        return children

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    @property
    def num_unfinished_sequences(self) -> int:
        return len(self._by_core_id) + len(self._read_for)

    def process_outputs(self, outputs: list[EngineCoreOutput], step_time: float | None = None) -> ProcessedOutputs:
        """Take one step's outputs of the core. `step_time`: its end, in seconds on the monotonic clock; None: now."""
        result = ProcessedOutputs()
        news: list[News] = []
        changed: dict[str, _RequestState] = {}
        of_readers: list[EngineCoreOutput] = []
        now = time.monotonic()
        for output in outputs:
            entry = self._by_core_id.get(output.request_id)
            if entry is None:
                of_readers.append(output)  # or of one that was aborted while the step ran
                continue
            state, sequence = entry
            if output.prompt_logprobs is not None and state.prompt_logprobs is not None:
                state.prompt_logprobs.append(output.prompt_logprobs)
                if not output.new_token_ids and output.finish_reason is None:
                    if sequence.record is not None:
                        news.append((sequence.record, output, None))
                    if state.params._prompt_in_parts:
                        result.request_outputs.append(state.prompt_part())
                    continue  # the prompt goes on
            if state.metrics.first_token_time is None and output.finish_reason != "error":
                state.metrics.begin(output.scheduled_time, now)
                state.num_cached_tokens = output.num_cached_tokens
                result.begun.append(state.request_id)
            if output.new_token_ids:
                state.metrics.num_generation_tokens += len(output.new_token_ids)
                state.metrics.last_token_ts = now
            if output.error is None and self.weight_version not in sequence.weight_versions[-1:]:
                sequence.weight_versions.append(self.weight_version)
            if sequence.update(output):
                result.requests_to_abort.append(sequence.core_id)
            if sequence.record is not None:
                news.append((sequence.record, output, sequence.finish_reason))
            if output.kv_transfer_params is not None:
                state.kv_transfer_params = output.kv_transfer_params
            if sequence.finish_reason is not None:
                state.num_running -= 1
                del self._by_core_id[sequence.core_id]
                if state.params.reads_form:
                    # It waits for its readings.
                    state.changed.pop(sequence, None)
                    if state.num_running == 0 and not self._read_form(state, result, now):
                        changed[state.request_id] = state
                    continue
            state.changed[sequence] = None
            changed[state.request_id] = state
        if self._readers is not None:
            changed |= {state.request_id: state for state in self._take_readings(of_readers)}
        if self._metrics is not None:
            self._metrics.observe_step(news, now if step_time is None else step_time, now)
        self._return_changed(changed, result)
        return result

    def _return_changed(self, changed: dict[str, _RequestState], result: ProcessedOutputs) -> None:
        for request_id, state in changed.items():
            request_output = state.make_output()
            if request_output is not None:
                result.request_outputs.append(request_output)
            if state.finished:
                del self._requests[request_id]
                result.ended.append(request_id)
                self._trace(state)
                if self._metrics is not None:
                    self._metrics.observe_request(state.params.n, max(len(each.token_ids) for each in state.sequences))

    def _read_form(self, state: _RequestState, result: ProcessedOutputs, now: float) -> bool:
        """Queue what reads the form of a request's answers, which are all there; False: nothing is to be read."""
        assert self._config is not None and self.tokenizer is not None, "forms need both"
        # Offline most requests have no form.
        from vllm.v1.engine.plans.form_readings import FormReadings

        prompt = replace(state.prompt, session_id=None, kv_hints=None)
        whole = [sequence for sequence in state.sequences if sequence.error is None]
        answers = [sequence.token_ids for sequence in whole]
        plan = FormReadings(self._config, self.tokenizer, prompt, state.params, answers)
        state.reading = _FormReading(plan, whole)
        if self._readers is None:
            self._readers = OutputProcessor(None)
        for index, (own, params) in enumerate(plan.requests()):
            name = f"{state.request_id}#{index}"
            self._readers.add_request(name, own, params, now)
            self._read_for[name] = state
            state.reading.outputs[name] = None
            result.to_queue.append((name, own, params, state.priority))
        if not state.reading.outputs:
            state.end_reading()
        return state.reading is not None

    def _take_readings(self, outputs: list[EngineCoreOutput]) -> Iterable[_RequestState]:
        """Take a step's outputs of readers; returns the requests whose answers are read now."""
        assert self._readers is not None
        for output in self._readers.process_outputs(outputs).request_outputs:
            state = self._read_for.pop(output.request_id)
            assert state.reading is not None, "it is read"
            state.reading.outputs[output.request_id] = output
            if None not in state.reading.outputs.values():
                state.end_reading()
                yield state

    def outputs_so_far(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """A last output of each of these requests, which are to be aborted; sequences that run end by "abort"."""
        outputs = []
        for state in (self._requests[each] for each in request_ids):
            for sequence in state.sequences:
                if sequence.finish_reason is None:
                    sequence.finish_reason = "abort"
                    state.changed[sequence] = None
            state.num_running = 0
            if state.params.reads_form:
                state.changed = dict.fromkeys(state.sequences)
            reading, state.reading = state.reading, None
            output = state.make_output()
            state.reading = reading
            assert output is not None, "it is finished"
            outputs.append(output)
        return outputs

    def abort_requests(self, request_ids: Iterable[str], reason: str = "abort") -> list[str]:
        """Drop requests, which count as ended by `reason`; returns the core ids of their unfinished sequences."""
        core_ids: list[str] = []
        readers: list[str] = []
        for request_id in list(request_ids):
            state = self._requests.pop(request_id, None)
            if state is None:
                continue
            for sequence in state.sequences:
                if self._by_core_id.pop(sequence.core_id, None) is not None:
                    core_ids.append(sequence.core_id)
            readers += state.reading.outputs if state.reading is not None else ()
            self._trace(state, reason)
        if self._metrics is not None:
            self._metrics.observe_dropped(len(core_ids), reason)
        if self._readers is not None:
            core_ids += self._readers.abort_requests(readers)
            for name in readers:
                self._read_for.pop(name, None)
        return core_ids

    def _trace(self, state: _RequestState, reason: str = "abort") -> None:
        """Record a request that ends. `reason`: of its sequences that have not finished."""
        if self._tracer is not None:
            self._tracer.end_request(
                state.caller,
                state.request_id,
                state.params,
                state.metrics,
                num_prompt_tokens=len(state.prompt.token_ids),
                num_completion_tokens=sum(len(sequence.token_ids) for sequence in state.sequences),
                finish_reasons=[sequence.finish_reason or reason for sequence in state.sequences],
            )

    def forget_missing(self, is_known: Callable[[str], bool]) -> None:
        """Drop every request with a running sequence whose core id is not known."""
        lost = {state.request_id for core_id, (state, _) in self._by_core_id.items() if not is_known(core_id)}
        lost |= {state.request_id for name, state in self._read_for.items() if not is_known(name)}
        self.abort_requests(lost)


def id_in_use_error(name: str, request_id: str) -> VLLMValidationError:
    """For a request whose id, or the inner name of one of its samples, belongs to an unfinished request."""
    return VLLMValidationError(f"request_id {name!r} is in use by an unfinished request", "request_id", request_id)
