"""Offline inference: a model, a list of prompts, a list of results."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import wraps
from numbers import Integral
from pathlib import Path
from typing import Any, Concatenate

from vllm.answers.prompts import load_chat_template, picture_options, written_conversations
from vllm.answers.prompts.marked_media import MarkedMedia
from vllm.config.unserved import is_neutral_value
from vllm.decisions.conversation import with_marks
from vllm.decisions.params import DecisionParams
from vllm.decisions.plan import DecisionPlan
from vllm.decisions.types import Decision
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.beam_search import BeamSearches, as_beam_search_output, as_sampling_params
from vllm.entrypoints.interrupts import InterruptsBetweenSteps
from vllm.entrypoints.llm_pooling import PoolingOfflineMixin
from vllm.exceptions import VLLMValidationError
from vllm.inputs import PromptType, TokensPrompt
from vllm.inputs.images import given_images
from vllm.inputs.media import with_pictures
from vllm.inputs.text_options import DEFAULT_TEXT_OPTIONS, TextOptions, text_options
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.params.beam_search import BeamSearchOutput, BeamSearchParams
from vllm.pooling.late_chunking import late_chunks
from vllm.pooling.long_texts import in_parts, joined
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tracing import continued
from vllm.utils.checks import check_integer
from vllm.v1.engine.calls import Arguments, BlockingCalls, EngineCalls, Result
from vllm.v1.engine.input_processor import ProcessedPrompt
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.plans.label_scoring import LabelScorer, encode_labels


def _of_engine(
    method: Callable[Concatenate[LLMEngine, Arguments], Result], takes_turn: bool = True
) -> Callable[Concatenate[LLM, Arguments], Result]:
    """The engine's method as one of its LLM, with signature and docstring. `takes_turn`: as of `blocking`."""

    @wraps(method)
    def call(self: LLM, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.turn if takes_turn else nullcontext():
            result: Result = getattr(self.llm_engine, method.__name__)(*args, **kwargs)
            return result

    return call


class LLM(BlockingCalls, PoolingOfflineMixin):
    """A model that generates for lists of prompts and reads chosen tokens' logprobs.

    Args:
        model: a model folder, a .gguf file or a hub name; None = the embedded small model, if installed.
        chat_template: Jinja template, or a file with one, that `chat` uses in place of the model's.
        **kwargs: the other fields of EngineArgs (tokenizer, dtype, max_model_len, max_num_seqs, ...).

    Raises:
        TypeError: an argument that EngineArgs does not have.
        ValueError: an argument that cannot be honoured; names it, its value and the limit.
        FileNotFoundError: the model is not there.
    """

    def __init__(self, model: str | None = None, *, chat_template: str | Path | None = None, **kwargs: Any) -> None:
        known = {item.name for item in fields(EngineArgs)}
        # Upstream's other versions have other arguments.
        kwargs = {name: value for name, value in kwargs.items() if name in known or not is_neutral_value(value)}
        unknown = sorted(set(kwargs) - known)
        if unknown:
            raise TypeError(f"LLM() got an unexpected argument {unknown[0]!r}; known: {', '.join(sorted(known))}")
        self._chat_template = load_chat_template(chat_template)
        kwargs.setdefault("disable_log_stats", True)
        self._start(EngineArgs(model=None if model is None else str(model), **kwargs))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """An LLM of these arguments."""
        self = cls.__new__(cls)
        self._chat_template = None
        self._start(engine_args)
        return self

    def _start(self, engine_args: EngineArgs) -> None:
        self.llm_engine = LLMEngine.from_engine_args(engine_args, use_tqdm=engine_args.use_tqdm_on_load)
        self.model_config = self.llm_engine.model_config
        self.request_counter = itertools.count()
        self._enqueued: list[str] = []
        self._enqueued_outputs: dict[str, RequestOutput] = {}  # finished while another call ran the engine
        self.turn = threading.RLock()  # calls of several threads take turns

    @property
    def engine_calls(self) -> EngineCalls:
        """The engine's."""
        return self.llm_engine.engine_calls

    set_tokenizer = _of_engine(LLMEngine.set_tokenizer)
    collective_rpc = _of_engine(LLMEngine.collective_rpc)
    apply_model = _of_engine(LLMEngine.apply_model)
    get_metrics = _of_engine(LLMEngine.get_metrics, takes_turn=False)

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the model can be asked for: "generate", or the tasks of a pooling model, the default first."""
        return self.llm_engine.get_supported_tasks()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that `generate` uses without sampling_params: the values of the model's
        generation_config.json, unless generation_config="vllm"."""
        return SamplingParams(**self.llm_engine.model_config.default_sampling_params)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Ranks of the engine. `include_dp`: an engine in the caller's process is one replica."""
        return self.llm_engine.vllm_config.parallel_config.world_size

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        prompt_token_ids: Any = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt; results come in the order of the prompts.

        Args:
            prompts: one prompt or many, each a string, a list of token ids, or a TextPrompt / TokensPrompt
                dict.
            sampling_params: one for all prompts, or one a prompt; None = get_default_sampling_params().
            use_tqdm: show a progress bar; or a callable that is used in place of tqdm.
            lora_request: an adapter for all prompts, or one a prompt (None: none); what is new is loaded.
            mm_processor_kwargs: options of the picture processor, for prompts that have none of their own.
            priority: one for all, or one a prompt, lower first, for scheduling_policy="priority".
            tokenization_kwargs: of texts, as transformers' tokenizers take them: add_special_tokens; truncation with
                max_length, or truncate_prompt_tokens, in place of the parameters'; truncation_side.
            prompt_token_ids: in place of `prompts`, one list of ids or several; the older way.
            trace_headers: W3C's, of the trace that the requests' spans are to be part of.

        Raises:
            VLLMValidationError: a prompt or parameter that cannot be honoured. Nothing was queued then, and
                the engine stays usable.
        """
        if prompt_token_ids is not None:
            if prompts is not None:
                raise VLLMValidationError("prompts and prompt_token_ids are two ways to give the same", "prompts")
            prompts = prompt_token_ids
        prompt_list = _with_options(_as_prompt_list(prompts), mm_processor_kwargs)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params_list = _one_each("sampling_params", sampling_params, len(prompt_list))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompt_list))
        adapters = _one_each("lora_request", lora_request, len(prompt_list))
        options = text_options(tokenization_kwargs)
        with continued(self.llm_engine.tracer, trace_headers):
            return self._generate(prompt_list, params_list, priorities, adapters, use_tqdm, options=options)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts for `wait_for_completion`; returns the requests' ids. Arguments and errors are those of
        `generate`."""
        prompt_list = _with_options(_as_prompt_list(prompts), mm_processor_kwargs)
        params_list = _one_each(
            "sampling_params", sampling_params or self.get_default_sampling_params(), len(prompt_list)
        )
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompt_list))
        adapters = _one_each("lora_request", lora_request, len(prompt_list))
        processed, checked = self._check(prompt_list, params_list, text_options(tokenization_kwargs))
        if any(each.use_beam_search for each in checked):
            raise VLLMValidationError("use_beam_search needs LLM.generate or LLM.beam_search", "use_beam_search", True)
        processed = self._with_adapters(processed, adapters)
        request_ids = [str(next(self.request_counter)) for _ in processed]
        with self.turn:
            self.llm_engine.add_processed(request_ids, processed, checked, priorities=priorities)
            self._enqueued += request_ids
        return request_ids

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """The results of all that was enqueued, in that order. `output_type`: RequestOutput, the only one there is.
        RuntimeError: the engine sleeps; what was enqueued stays."""
        with self.turn, InterruptsBetweenSteps() as interrupts:
            self.llm_engine.engine_core.check_awake()
            request_ids, self._enqueued = self._enqueued, []
            return self._run(request_ids, use_tqdm, interrupts, self.llm_engine.step)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of every prompt, by beam search; results come in the order of the prompts.

        Finds what transformers' generate(num_beams=beam_width, do_sample=False) finds.

        Args:
            prompts: as in `generate`.
            params: one for all prompts, or one a prompt.
            lora_request, use_tqdm, priority: as in `generate`.
            concurrency_limit: prompts that are searched at once; None = all.

        Raises:
            VLLMValidationError: a prompt or parameter that cannot be honoured; as in `generate`.
        """
        prompt_list = _as_prompt_list(prompts)
        adapters = _one_each("lora_request", lora_request, len(prompt_list))
        params_list = _one_each("params", params, len(prompt_list))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompt_list))
        checked = [as_sampling_params(each) for each in params_list]
        size = len(prompt_list) or 1
        if concurrency_limit is not None:
            size = check_integer("concurrency_limit", concurrency_limit, 1)
        outputs: list[RequestOutput] = []
        for start in range(0, len(prompt_list), size):
            part = slice(start, start + size)
            lists = prompt_list[part], checked[part], priorities[part], adapters[part]
            outputs += self._generate(*lists, use_tqdm, beam_logprobs=True)
        tokenizer = self.llm_engine.tokenizer
        return [as_beam_search_output(*each, tokenizer) for each in zip(outputs, params_list, strict=True)]

    def _generate(
        self,
        prompts: list[Any],
        params_list: list[SamplingParams],
        priorities: list[int],
        adapters: list[Any],
        use_tqdm: bool | Callable[..., Any],
        beam_logprobs: bool = False,
        options: TextOptions = DEFAULT_TEXT_OPTIONS,
    ) -> list[RequestOutput]:
        """Check and run; one of each list a prompt. `beam_logprobs`: beam searches return their readings."""
        processed, checked = self._check(prompts, params_list, options)
        processed = self._with_adapters(processed, adapters)
        if not any(params.use_beam_search for params in checked):
            return self._complete(processed, checked, priorities, use_tqdm)
        request_ids = [str(next(self.request_counter)) for _ in processed]
        beams = BeamSearches(self.llm_engine, beam_logprobs)
        with self.turn, InterruptsBetweenSteps() as interrupts, beams as searches:
            searches.add_processed(request_ids, processed, checked, priorities)
            return self._run(request_ids, use_tqdm, interrupts, searches.step)

    def _with_adapters(self, prompts: Sequence[ProcessedPrompt], adapters: Sequence[Any]) -> list[ProcessedPrompt]:
        with self.turn:
            return self.llm_engine.with_adapters(prompts, adapters)

    def _check(
        self, prompts: list[Any], params_list: list[SamplingParams], options: TextOptions
    ) -> tuple[list[ProcessedPrompt], list[SamplingParams]]:
        processor = self.llm_engine.input_processor
        params_list = [options.applied(params) for params in params_list]
        processed = processor.process_prompts(prompts, params_list, options=options)
        return processed, self._checked_params(processed, params_list)

    def _checked_params(self, processed: Sequence[ProcessedPrompt], params_list: Sequence[Any]) -> list[Any]:
        process = self.llm_engine.input_processor.process_params
        checked = [process(own, len(prompt.token_ids)) for own, prompt in zip(params_list, processed, strict=True)]
        for params in checked:
            params.output_kind = RequestOutputKind.FINAL_ONLY
        return checked

    def _complete(
        self,
        processed: Sequence[ProcessedPrompt],
        checked: Sequence[Any],
        priorities: Sequence[int] | None,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[Any]:
        request_ids = [str(next(self.request_counter)) for _ in processed]
        with self.turn, InterruptsBetweenSteps() as interrupts:
            self.llm_engine.add_processed(request_ids, processed, checked, priorities=priorities)
            return self._run(request_ids, use_tqdm, interrupts, self.llm_engine.step)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; results come in their order, with the rendered text as `prompt`.

        Args:
            messages: a list of dicts with `role` and `content`, or a list of such lists; see `render_conversations` of
                vllm/answers/prompts/writer.py for these and the template's arguments.
            chat_template_content_format: "auto", "string" or "openai", as `content_format` there.
            sampling_params, use_tqdm, lora_request, priority, mm_processor_kwargs: as in `generate`.
            tokenization_kwargs: as in `generate`; but add_special_tokens is False if left out: templates write them.

        Raises:
            VLLMValidationError: as in `generate`; also malformed messages, or no template or one that fails on them.
        """
        prompts = self._written(
            messages,
            chat_template=chat_template or self._chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            content_format=chat_template_content_format,
        )
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=_of_template(tokenization_kwargs),
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def enqueue_chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue conversations for `wait_for_completion`; returns the requests' ids. Arguments and errors are those of
        `chat`."""
        prompts = self._written(
            messages,
            chat_template=chat_template or self._chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            content_format=chat_template_content_format,
        )
        return self.enqueue(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=_of_template(tokenization_kwargs),
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def preprocess_chat(
        self,
        messages: Sequence[Any],
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[TokensPrompt]:
        """The prompts of `chat`, for `generate`: one text and its ids a conversation, and its pictures. Arguments and
        errors are those of `chat`."""
        prompts = self._written(
            messages,
            chat_template=chat_template or self._chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            content_format=chat_template_content_format,
        )
        tokenizer = self.llm_engine.tokenizer
        assert tokenizer is not None
        config = self.llm_engine.model_config
        # Templates write them, where models have templates.
        encoded = tokenizer.encode_batch([each["prompt"] for each in prompts], config.hf_config.pools_itself)
        made: list[Any] = [{"prompt_token_ids": ids, **each} for ids, each in zip(encoded, prompts, strict=True)]
        made = _with_options(made, mm_processor_kwargs)
        for each in made:
            given_images(each, config.max_media, config.why_no_images, config.enable_mm_embeds)
        return made

    def _written(self, messages: Sequence[Any], **options: Any) -> list[Any]:
        """Conversations as prompts: a text each, and its pictures."""
        processor = self.llm_engine.input_processor
        written = written_conversations(messages, processor.tokenizer, **picture_options(processor), **options)
        # Pictures of many conversations are as many as its caller's memory holds.
        loader = processor.picture_loader
        return [with_pictures({"prompt": each.text}, loader.load_now(each.pictures)) for each in written]

    def score_labels(
        self,
        prompts: PromptType | Sequence[PromptType],
        labels: Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        lora_requests: Sequence[LoRARequest | None] | None = None,
    ) -> list[Any]:
        """How likely each label continues each prompt, exactly; results come in the order of the prompts.

        Args:
            prompts: as in `generate`.
            labels: texts of any number of tokens (tokenised by themselves: mind a leading space), or token ids, or
                lists of token ids; any number of them.
            use_tqdm: as in `generate`; it counts the labels' branches.
            lora_request: as in `generate`.
            lora_requests: adapters that each score every prompt (None: the model without one): a prompt's result is
                a list then, of a LabelScores for each of them.

        Raises:
            VLLMValidationError: a bad prompt, as in `generate`; no labels, one without a token, two of the same
                tokens, ids outside the vocabulary, or a prompt that leaves no room for the longest label.
        """
        prompt_list = _as_prompt_list(prompts)
        processor = self.llm_engine.input_processor
        processed = processor.process_prompts(prompt_list, [SamplingParams(max_tokens=0)] * len(prompt_list))
        return self.score_processed(
            processed, labels, use_tqdm=use_tqdm, lora_request=lora_request, lora_requests=lora_requests
        )

    def score_processed(
        self,
        processed: list[ProcessedPrompt],
        labels: Any,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        lora_requests: Any = None,
    ) -> list[Any]:
        """The second half of `score_labels`: prompts as the input processor makes them."""
        config, tokenizer = self.llm_engine.model_config, self.llm_engine.tokenizer
        scorer = LabelScorer(encode_labels(labels, tokenizer, config.vocab_size), config.max_model_len)
        scorer.check_prompts(processed)
        processed, count = self._with_each(processed, lora_request, lora_requests)
        requests = [request for prompt in processed for request in scorer.requests(prompt)]
        outputs = iter(
            self._complete([own for own, _ in requests], [own for _, own in requests], [0] * len(requests), use_tqdm)
        )
        scores = [scorer.scores(prompt, list(itertools.islice(outputs, scorer.num_requests))) for prompt in processed]
        return scores if count is None else [scores[at : at + count] for at in range(0, len(scores), count)]

    def _with_each(
        self, prompts: list[ProcessedPrompt], adapter: Any, adapters: Any
    ) -> tuple[list[ProcessedPrompt], int | None]:
        """The prompts with `adapter` or, each, with every one of `adapters`, and how many these are, if asked."""
        if adapters is None:
            return self._with_adapters(prompts, _one_each("lora_request", adapter, len(prompts))), None
        if adapter is not None or not isinstance(adapters, Sequence) or isinstance(adapters, str) or not adapters:
            message = "lora_requests must be a list of adapters, and comes in place of lora_request"
            raise VLLMValidationError(message, "lora_requests")
        repeated = [prompt for prompt in prompts for _ in adapters]
        return self._with_adapters(repeated, list(adapters) * len(prompts)), len(adapters)

    def _pool(
        self,
        prompts: Any,
        params: Any,
        use_tqdm: Any,
        options: TextOptions = DEFAULT_TEXT_OPTIONS,
        lora_request: Any = None,
    ) -> list[Any]:
        prompt_list = _as_prompt_list(prompts)
        params = [options.applied(own) for own in _one_each("pooling_params", params, len(prompt_list))]
        processor = self.llm_engine.input_processor
        processed = processor.process_prompts(prompt_list, params, options=options, in_parts=True)
        return self._pool_processed(processed, params, use_tqdm, options, lora_request)

    def _pool_processed(
        self,
        processed: list[ProcessedPrompt],
        params: Sequence[Any],
        use_tqdm: Any,
        options: TextOptions = DEFAULT_TEXT_OPTIONS,
        lora_request: Any = None,
    ) -> list[Any]:
        checked = self._checked_params(processed, params)
        tokenizer = self.llm_engine.tokenizer
        adapters = _one_each("lora_request", lora_request, len(processed))
        processed = self._with_adapters(processed, adapters)
        chunks = [
            late_chunks(tokenizer, prompt, own, options.add_special_tokens)
            for prompt, own in zip(processed, checked, strict=True)
        ]
        short, own_params, counts = in_parts(processed, checked, self.model_config.max_model_len)
        results = joined(self._complete(short, own_params, None, use_tqdm), counts)
        for output, parts in zip(results, chunks, strict=True):
            output.late_chunking = parts if output.error is None else None
        return results

    def decide(
        self,
        inputs: Any,
        questions: Any,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **options: Any,
    ) -> list[Decision]:
        """Answer typed questions about each input by the probabilities of their options; one Decision an input.

        Args:
            inputs: a text or a list of texts; or OpenAI's messages and tool calls as one list of dicts, or a list of
                such lists.
            questions: 1 to 200 of OpenAI's question objects (type predicate, choice or score), or `Question`s; the same
                for all inputs. See docs/decisions.md.
            use_tqdm, priority, lora_request: as in `generate`.
            **options: fields of DecisionParams (read, permutations, min_label_mass, calibration ...).

        Raises:
            TypeError: an option that DecisionParams does not have.
            VLLMValidationError: an input, a question or an option that cannot be honoured; names its place. Nothing
                was queued then.
        """
        params = DecisionParams(**{"chat_template": self._chat_template, **options})
        plans = [self.decision_plan(each, questions, params) for each in _as_input_list(inputs)]
        return self.decide_plans(plans, use_tqdm=use_tqdm, priority=priority, lora_request=lora_request)

    def decision_plan(self, input: Any, questions: Any, params: DecisionParams) -> DecisionPlan:
        """The first half of `decide`, of one input; errors as there."""
        processor = self.llm_engine.input_processor
        media = MarkedMedia(processor, params.cache_salt)
        input = with_marks(input, media)
        media.load_now()
        return DecisionPlan(processor.model_config, processor.tokenizer, input, questions, params, media)

    def decide_plans(
        self,
        plans: Sequence[DecisionPlan],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[Decision]:
        """The second half of `decide`: run what was checked before."""
        priorities = _one_each("priority", 0 if priority is None else priority, len(plans))
        requests = [request for plan in plans for request in plan.requests()]
        each_priority = [own for own, plan in zip(priorities, plans, strict=True) for _ in range(plan.num_requests)]
        adapters = zip(_one_each("lora_request", lora_request, len(plans)), plans, strict=True)
        prompts = self._with_adapters(
            [own for own, _ in requests], [own for own, plan in adapters for _ in range(plan.num_requests)]
        )
        outputs = iter(self._complete(prompts, [own for _, own in requests], each_priority, use_tqdm))
        return [plan.decision(list(itertools.islice(outputs, plan.num_requests))) for plan in plans]

    def _run(
        self,
        request_ids: list[str],
        use_tqdm: bool | Callable[..., Any],
        interrupts: InterruptsBetweenSteps,
        step: Callable[[], list[RequestOutput]],
    ) -> list[RequestOutput]:
        own, enqueued = set(request_ids), set(self._enqueued)  # the engine may hold requests of others, too
        done = self._enqueued_outputs
        finished = {each: done.pop(each) for each in request_ids if each in done}
        bar = None
        try:
            bar = _progress_bar(use_tqdm, len(request_ids))
            if bar is not None and finished:
                bar.update(len(finished))
            while len(finished) < len(own):
                if not self.llm_engine.has_unfinished_requests():
                    raise RuntimeError("the engine lost requests: " + ", ".join(own - set(finished)))
                for output in step():
                    if output.request_id not in own:
                        if output.request_id in enqueued:
                            done[output.request_id] = output
                        continue
                    finished[output.request_id] = output
                    if bar is not None:
                        bar.update(1)
                interrupts.check()
        except BaseException:
            # Interrupted or broken: what is still queued must not surface in the next call.
            self.llm_engine.abort_request(request_ids)
            raise
        finally:
            if bar is not None:
                bar.close()
        return [finished[request_id] for request_id in request_ids]


def _with_options(prompts: list[Any], options: Mapping[str, Any] | None) -> list[Any]:
    """The prompts with mm_processor_kwargs, which those without pictures refuse, unless they ask for nothing."""
    if not options:
        return prompts
    dicts = (
        each if isinstance(each, Mapping) else {"prompt" if isinstance(each, str) else "prompt_token_ids": each}
        for each in prompts
    )
    return [{"mm_processor_kwargs": options, **each} for each in dicts]


def _of_template(tokenization_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The same for a template's text, which has the special tokens already."""
    options = dict(tokenization_kwargs or {})
    if options.get("add_special_tokens") is None:
        options["add_special_tokens"] = False
    return options


def _as_prompt_list(prompts: Any) -> list[Any]:
    """One prompt or many, as a list. A flat list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise VLLMValidationError(
            f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}", "prompts"
        )
    if prompts and isinstance(prompts[0], Integral):
        return [prompts]
    return list(prompts)


def _as_input_list(inputs: Any) -> list[Any]:
    """One input of a decision or many, as a list. A flat list of messages is one input."""
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        return [inputs]
    return [inputs] if inputs and isinstance(inputs[0], Mapping) else list(inputs)


def _one_each(name: str, values: Any, count: int) -> list[Any]:
    """`values`, or the one value for each."""
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise VLLMValidationError(f"{name} has {len(values)} entries for {count} prompts", name, len(values))
    return list(values)


def _progress_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    if not use_tqdm:
        return None
    if callable(use_tqdm):
        return use_tqdm(total=total, desc="Processed prompts", unit="req")
    from tqdm import tqdm

    return tqdm(total=total, desc="Processed prompts", unit="req", dynamic_ncols=True)
