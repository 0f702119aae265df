"""Methods of LLM for pooling models, and scores of pairs by generating ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.answers.prompts.marked_media import MarkedMedia
from vllm.config.checkpoint.late_interaction import SIDES, Side
from vllm.config.checkpoint.sentence_transformers import default_prompt, named_prompts, with_prompt
from vllm.exceptions import VLLMValidationError
from vllm.inputs.text_options import text_options
from vllm.pooling.late_interaction import LateTexts
from vllm.pooling.pairs import PairLimits, PooledPairs, longest_text
from vllm.pooling.score_templates import (
    PairPrompts,
    ScoreTemplate,
    default_template,
    pairs_of,
    score_of,
    score_template,
)
from vllm.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from vllm.pooling_params import PoolingParams
from vllm.utils.checks import check_integer, check_neutral
from vllm.v1.engine.plans.label_scoring import LabelScorer, encode_labels

if TYPE_CHECKING:
    from vllm.inputs import DataPrompt, PromptType
    from vllm.lora.request import LoRARequest
    from vllm.outputs import LabelScores
    from vllm.pooling_params import PoolingTask
    from vllm.v1.engine.llm_engine import LLMEngine


class PairScoring:
    """Scores of pairs of texts: see score_templates.py for models that generate, pairs.py for pooling models."""

    llm_engine: LLMEngine
    score_processed: Callable[..., list[LabelScores]]
    _pool: Callable[..., list[PoolingRequestOutput]]
    _pool_processed: Callable[..., list[PoolingRequestOutput]]

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        use_tqdm: Any = True,
        pooling_params: PoolingParams | None = None,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well pairs of texts match: of a generating model the probability of "yes" between the two words that the
        template asks for, of a cross-encoder its score, of embeddings their cosine, of token embeddings MaxSim.

        Args:
            data_1: a query, or one for each document: a text, or {"content": [parts]}, whose parts are texts and
                pictures as in `chat`.
            data_2: a document or a list of them, as queries.
            use_tqdm: as in `generate`.
            pooling_params: of a pooling model; otherwise None. extra_kwargs={"max_tokens_per_doc": N} cuts documents.
            lora_request: an adapter for all pairs, or one a pair.
            tokenization_kwargs: {"truncation": True} or {"truncate_prompt_tokens": -1} lets the ends of texts that are
                too long go; max_length or that number says how long they may be.
            chat_template: a name in score_templates.TEMPLATES ("none": query and document are the whole prompt), a file
                of Jinja, or Jinja itself. None: see score_templates.default_template.

        Raises:
            VLLMValidationError: texts that cannot be paired, a prompt that is too long, a template that fails, a model
                that scores no pairs.
            ValueError: no such template.
        """
        options = text_options(tokenization_kwargs, of_pairs=True)
        check_neutral("add_special_tokens=False", not options.add_special_tokens, "pairs are joined by special tokens")
        raw = self.llm_engine.model_config.hf_config.raw
        pictures = MarkedMedia(self.llm_engine.input_processor)
        pairs = pairs_of(data_1, data_2, ("data_1", "data_2"), pictures)
        pictures.load_now()
        return self.score_pairs(
            pairs,
            pictures=pictures,
            template=None if chat_template is None else score_template(chat_template, None, raw),
            truncate_to=options.truncate_to,
            pooling_params=options.applied(pooling_params),
            use_tqdm=use_tqdm,
            lora_request=lora_request,
        )

    def score_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        template: ScoreTemplate | None = None,
        instruction: str | None = None,
        truncate_to: int | None = None,
        max_document_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        use_tqdm: Any = True,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        pictures: MarkedMedia | None = None,
    ) -> list[ScoringRequestOutput]:
        """As `score`.

        Args:
            template: how a model is asked; None: as `score` without chat_template.
            instruction: what the query is for, in templates that ask for it.
            truncate_to: longest prompt, in tokens; -1: the longest that the model reads; None: longer ones are errors.
            max_document_tokens: of each document, which loses its end; None: all of it.
            pictures: loaded, for which texts have marks.
        """
        config, tokenizer = self.llm_engine.model_config, self.llm_engine.tokenizer
        if tokenizer is None:
            raise VLLMValidationError("scores need a tokenizer, and skip_tokenizer_init left it out", "data_1")
        names = [f"data_2[{index}]" for index in range(len(pairs))]
        if config.runner_type == "pooling":
            params = PoolingParams() if pooling_params is None else pooling_params
            if truncate_to is None:
                truncate_to = params.truncate_prompt_tokens
            if params.extra_kwargs:
                params, max_document_tokens = _without_limit(params, max_document_tokens)
            limits = PairLimits(longest_text(config), truncate_to, max_document_tokens)
            pooled = PooledPairs(config, tokenizer, pairs, params, limits, template, instruction, names, pictures)
            prompts, own_params = zip(*pooled.requests, strict=True)
            outputs = self._pool_processed(list(prompts), own_params, use_tqdm, lora_request=lora_request)
            return [
                ScoringRequestOutput(str(index), ScoringOutput(score), pooled.token_ids(index, outputs), 0, True)
                for index, score in enumerate(pooled.scores(outputs))
            ]
        check_neutral("pooling_params", pooling_params, "a score is a probability; there is nothing to choose")
        template = template or default_template(config, tokenizer)
        assert template is not None
        labels = encode_labels(list(template.labels), tokenizer, config.vocab_size)
        room = LabelScorer(labels, config.max_model_len).max_prompt_len
        if truncate_to is not None:
            truncate_to = room if truncate_to == -1 else check_integer("truncate_prompt_tokens", truncate_to, 1)
        encoder = PairPrompts(template, tokenizer, room, truncate_to, max_document_tokens, instruction, pictures)
        scores = self.score_processed(
            encoder.encode(pairs, names), list(template.labels), use_tqdm=use_tqdm, lora_request=lora_request
        )
        return [
            ScoringRequestOutput(
                str(index), ScoringOutput(score_of(each, template.gives_logits)), each.prompt_token_ids, 0, True
            )
            for index, each in enumerate(scores)
        ]


class PoolingOfflineMixin(PairScoring):
    """Each method raises VLLMValidationError where the model cannot do it, and names what it can."""

    @property
    def _tasks(self) -> tuple[str, ...]:
        return self.model_config.pooling_tasks  # type: ignore[attr-defined]

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType] | DataPrompt,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: Any = True,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        pooling_task: PoolingTask | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """The result that the model pools of each prompt: a float32 tensor, [size] or, for token_embed, [tokens, size].

        Args:
            tokenization_kwargs: as in `generate`; texts that are cut lose their ends.
            prompt_name: of one of the model's prompts (config_sentence_transformers.json), which is put before each
                text that is embedded; None: that of default_prompt_name, before texts that do not begin with it. Of a
                model of late interaction "query" or "document": texts are read as such; None: as they are.
        """
        options = text_options(tokenization_kwargs)
        params = self._with_task(pooling_params, pooling_task)
        if options.has_truncation:
            params = [options.applied(each) for each in params] if isinstance(params, list) else options.applied(params)
        if (texts := self._late_texts(params, prompt_name)) is not None:
            check_neutral("add_special_tokens=False", not options.add_special_tokens, f"{prompt_name} texts have them")
            check_neutral(
                "truncation_side='left'", options.truncation_side == "left", f"{prompt_name} texts lose their ends"
            )
            prompts, params = _as_side(texts, prompts, params, prompt_name)  # type: ignore[arg-type]
            return self._pool(prompts, params, use_tqdm, lora_request=lora_request)
        return self._pool(self._with_prompts(prompts, params, prompt_name), params, use_tqdm, options, lora_request)

    def _late_texts(self, params: Any, name: str | None) -> LateTexts | None:
        """None: texts are not read as queries or documents of late interaction."""
        config, first = self.model_config, params[0] if isinstance(params, list) and params else params  # type: ignore[attr-defined]
        task = getattr(first, "task", None) or (self._tasks or ("",))[0]
        if config.late_interaction is None or name not in SIDES or task != "token_embed":
            return None
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise VLLMValidationError(
                "prompt_name needs a tokenizer, and skip_tokenizer_init left it out", "prompt_name"
            )
        return LateTexts(config, config.late_interaction, tokenizer)

    def _with_prompts(self, prompts: Any, params: Any, name: str | None) -> Any:
        first = params[0] if isinstance(params, list) and params else params
        task = getattr(first, "task", None) or (self._tasks or ("",))[0]
        folder = Path(self.model_config.path)  # type: ignore[attr-defined]
        if name is not None:
            known = named_prompts(folder)
            if "embed" not in task or name not in known:
                message = (
                    f"prompt_name must be one of the model's prompts: {', '.join(sorted(known)) or 'there are none'}"
                )
                raise VLLMValidationError(message, "prompt_name", name)
            return _each_text(prompts, lambda text: text and known[name] + text)
        prompt = default_prompt(folder)
        is_plain = not prompt or "embed" not in task or getattr(first, "late_chunking_params", None) is not None
        return prompts if is_plain else _each_text(prompts, partial(with_prompt, prompt=prompt))

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: Any = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput] | list[PoolingRequestOutput]:
        """An embedding for each prompt; of a model that embeds only tokens, the outputs of `encode`. `prompt_name`: as
        there."""
        task: PoolingTask = "token_embed" if self._tasks == ("token_embed",) else "embed"
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task=task,
            tokenization_kwargs=tokenization_kwargs,
            prompt_name=prompt_name,
        )
        if task == "token_embed":
            return outputs
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Any = True,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Class probabilities for each prompt."""
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="classify",
            tokenization_kwargs=tokenization_kwargs,
        )
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def reward(
        self,
        prompts: PromptType | Sequence[PromptType],
        /,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Any = True,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """A reward model's values of each token, or of each that ends a step: float32 [tokens, labels]."""
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="token_classify",
            tokenization_kwargs=tokenization_kwargs,
        )

    def _with_task(self, given: Any, task: str | None) -> Any:
        if not self._tasks:
            message = (
                "the model generates and is not served as a pooling model: LLM.score_labels and logprob_token_ids read "
                "the probabilities of chosen answers"
            )
            raise VLLMValidationError(message, "pooling_task", task)

        def named(params: PoolingParams) -> PoolingParams:
            if task is not None and isinstance(params, PoolingParams):
                if params.task not in (None, task):
                    raise VLLMValidationError(f"task must be {task} here, got {params.task}", "task", params.task)
                params = params.clone()
                params.task = task  # type: ignore[assignment]
            return params

        if isinstance(given, Sequence):
            return [named(params) for params in given]
        return named(PoolingParams() if given is None else given)


def _as_side(texts: LateTexts, prompts: Any, params: Any, side: Side) -> tuple[list[Any], list[PoolingParams]]:
    """Prompts of token ids, and the parameters of each."""
    each = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
    found = [one.get("prompt") if isinstance(one, Mapping) and "prompt_token_ids" not in one else one for one in each]
    if not all(isinstance(text, str) and text for text in found):
        raise VLLMValidationError(f"prompt_name {side!r} is for texts that are not empty", "prompts")
    of_each = list(params) if isinstance(params, list) else [params] * len(found)
    if len(of_each) != len(found):
        raise VLLMValidationError(f"{len(of_each)} pooling_params for {len(found)} prompts", "pooling_params")
    if any(own.late_chunking_params is not None for own in of_each):
        raise VLLMValidationError("late chunking has ranges of the text as it is: leave prompt_name out", "prompt_name")
    requests: list[Any] = [None] * len(found)
    # Texts of one object's parameters, usually all of them, are tokenised together.
    for own in {id(own): own for own in of_each}.values():
        places = [index for index, other in enumerate(of_each) if other is own]
        names = [f"prompts[{index}]" for index in places]
        own_texts: list[Any] = [found[index] for index in places]
        made = texts.requests(own_texts, side, own, own.truncate_prompt_tokens, names)
        for index, request in zip(places, made, strict=True):
            requests[index] = request
    rest = [{k: v for k, v in one.items() if k != "prompt"} if isinstance(one, Mapping) else {} for one in each]
    ids = [{**more, "prompt_token_ids": prompt.token_ids} for more, (prompt, _) in zip(rest, requests, strict=True)]
    return ids, [own for _, own in requests]


def _each_text(prompts: Any, change: Callable[[str], str]) -> Any:
    """Prompts whose texts are changed, and whose token ids are not."""
    if isinstance(prompts, str):
        return change(prompts)
    if isinstance(prompts, Mapping):
        is_text = prompts.get("prompt_token_ids") is None and isinstance(prompts.get("prompt"), str)
        return {**prompts, "prompt": change(prompts["prompt"])} if is_text else prompts
    is_list = isinstance(prompts, Sequence)
    return (
        [_each_text(each, change) if isinstance(each, str | Mapping) else each for each in prompts]
        if is_list
        else prompts
    )


def _without_limit(params: PoolingParams, limit: int | None) -> tuple[PoolingParams, int | None]:
    """The parameters without their extra_kwargs, and the longest document that these name."""
    own = params.clone()
    extra = dict(own.extra_kwargs or {})
    given = extra.pop("max_tokens_per_doc", None)
    check_neutral("extra_kwargs", extra or None, "of a pair it takes max_tokens_per_doc")
    own.extra_kwargs = None
    if given is not None:
        limit = check_integer("max_tokens_per_doc", given, 0) or None
    return own, limit
