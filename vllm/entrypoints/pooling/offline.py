"""Methods of LLM for pooling models, and scores of pairs by generating ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.score_templates import PairPrompts, pairs_of, score_template
from vllm.exceptions import VLLMValidationError
from vllm.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from vllm.pooling_params import PoolingParams
from vllm.utils.checks import check_neutral
from vllm.v1.engine.label_scoring import LabelScorer, encode_labels
from vllm.v1.engine.upstream_calls import NO_LORA, adds_special_tokens

if TYPE_CHECKING:
    from vllm.inputs import DataPrompt, PromptType
    from vllm.lora.request import LoRARequest
    from vllm.outputs import LabelScores
    from vllm.pooling_params import PoolingTask
    from vllm.v1.engine.llm_engine import LLMEngine

_ONE_SCORE = "score needs a model with one label, or one that embeds"


class PairScoring:
    """Scores of pairs of texts by a model that generates: see score_templates.py."""

    llm_engine: LLMEngine
    score_labels: Callable[..., list[LabelScores]]

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
        """How well documents answer queries: the probability of "yes" between the two words that the template asks for.

        Args:
            data_1: a query, or one for each document.
            data_2: a document or a list of them.
            use_tqdm: as in `generate`.
            pooling_params, lora_request: None.
            tokenization_kwargs: {"truncation": True} lets the ends of documents that are too long go.
            chat_template: a name in score_templates.TEMPLATES, a file of Jinja, or Jinja itself. None: "plain", or with
                `classifier_from_token` in config.json query and document as they are.

        Raises:
            VLLMValidationError: texts that cannot be paired, a prompt that is too long, a template that fails.
            ValueError: no such template.
        """
        check_neutral("pooling_params", pooling_params, "a score is a probability; there is nothing to choose")
        check_neutral("lora_request", lora_request, NO_LORA)
        options = dict(tokenization_kwargs or {})
        truncates = bool(options.pop("truncation", False))
        max_length = options.pop("max_length", None)
        check_neutral("tokenization_kwargs", options or None, "it takes truncation and max_length")
        config, tokenizer = self.llm_engine.model_config, self.llm_engine.tokenizer
        if tokenizer is None:
            raise VLLMValidationError("LLM.score needs a tokenizer, and skip_tokenizer_init left it out", "data_1")
        template = score_template(chat_template, None, config.hf_config.raw)
        pairs = pairs_of(data_1, data_2, ("data_1", "data_2"))
        labels = encode_labels(list(template.labels), tokenizer, config.vocab_size)
        room = LabelScorer(labels, config.max_model_len).max_prompt_len
        prompts = PairPrompts(template, tokenizer, room, (max_length or room) if truncates else None)
        ids = prompts.encode(pairs, [f"data_2[{index}]" for index in range(len(pairs))])
        scores = self.score_labels(
            [{"prompt_token_ids": each} for each in ids], list(template.labels), use_tqdm=use_tqdm
        )
        return [
            ScoringRequestOutput(
                str(index), ScoringOutput(float(each.probabilities[0])), each.prompt_token_ids, 0, True
            )
            for index, each in enumerate(scores)
        ]


class PoolingOfflineMixin(PairScoring):
    """Each method raises VLLMValidationError where the model cannot do it, and names what it can."""

    def _pool(
        self, prompts: Any, params: Sequence[PoolingParams] | PoolingParams, use_tqdm: Any, add_special_tokens: bool
    ) -> list[PoolingRequestOutput]:
        raise NotImplementedError

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
    ) -> list[PoolingRequestOutput]:
        """What the model pools of each prompt: a float32 tensor, [size] or, for token_embed, [tokens, size]."""
        check_neutral("lora_request", lora_request, NO_LORA)
        params = self._with_task(pooling_params, pooling_task)
        return self._pool(prompts, params, use_tqdm, adds_special_tokens(tokenization_kwargs))

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: Any = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """An embedding for each prompt."""
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
            tokenization_kwargs=tokenization_kwargs,
        )
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
        """How well pairs of texts match: one text with each of several, or as many with as many. A model with one label
        reads both texts together, one that embeds gives the cosine of their embeddings."""
        if not self._tasks:
            return super().score(
                data_1,
                data_2,
                use_tqdm=use_tqdm,
                pooling_params=pooling_params,
                lora_request=lora_request,
                tokenization_kwargs=tokenization_kwargs,
                chat_template=chat_template,
            )
        check_neutral("lora_request", lora_request, NO_LORA)
        check_neutral("chat_template", chat_template, "pairs are joined by the model's tokenizer")
        firsts, seconds = ([texts] if isinstance(texts, str) else list(texts) for texts in (data_1, data_2))
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if not firsts or len(firsts) != len(seconds):
            message = f"score takes one text, or as many as the {len(seconds)} others, got {len(firsts)}"
            raise VLLMValidationError(message, "data_1", len(firsts))
        if "classify" in self._tasks:
            return self._score_pairs(firsts, seconds, pooling_params, use_tqdm)
        outputs = self.encode(
            firsts + seconds,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="embed",
            tokenization_kwargs=tokenization_kwargs,
        )
        return [_cosine(*pair) for pair in zip(outputs[: len(firsts)], outputs[len(firsts) :], strict=True)]

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

    def _score_pairs(
        self, firsts: list[str], seconds: list[str], given: PoolingParams | None, use_tqdm: Any
    ) -> list[ScoringRequestOutput]:
        tokenizer = self.get_tokenizer()  # type: ignore[attr-defined]
        base = self._with_task(given, "classify")
        limit = base.truncate_prompt_tokens
        if limit == -1:
            limit = self.model_config.max_model_len  # type: ignore[attr-defined]
        prompts, params = [], []
        for first, second in zip(firsts, seconds, strict=True):
            cut = {} if limit is None else {"truncation": "longest_first", "max_length": limit}
            encoded = tokenizer(first, second, **cut)
            own = base.clone()
            own.truncate_prompt_tokens = None
            types = encoded.get("token_type_ids") or []
            if 1 in types:
                own.extra_kwargs = {"compressed_token_type_ids": types.index(1)}
            prompts.append({"prompt_token_ids": encoded["input_ids"]})
            params.append(own)
        outputs = self._pool(prompts, params, use_tqdm, True)
        if outputs and outputs[0].outputs.data.numel() != 1:
            raise VLLMValidationError(f"{_ONE_SCORE}; this one has {outputs[0].outputs.data.numel()} labels", "data_1")
        return [ScoringRequestOutput.from_base(output) for output in outputs]


def _cosine(first: PoolingRequestOutput, second: PoolingRequestOutput) -> ScoringRequestOutput:
    one, other = first.outputs.data, second.outputs.data
    score = (one @ other) / (one.norm() * other.norm())
    ids = first.prompt_token_ids + second.prompt_token_ids
    return ScoringRequestOutput.from_base(
        PoolingRequestOutput(f"{first.request_id}_{second.request_id}", PoolingOutput(score), ids, 0, True)
    )
