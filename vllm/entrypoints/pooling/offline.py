"""Methods of LLM for pooling models, none of which is served yet, and scores of pairs by generating ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.entrypoints.score_templates import PairPrompts, pairs_of, score_template
from vllm.exceptions import VLLMValidationError
from vllm.pooling_outputs import ScoringOutput, ScoringRequestOutput
from vllm.pooling_params import refuse_pooling
from vllm.utils.checks import check_neutral
from vllm.v1.engine.label_scoring import LabelScorer, encode_labels
from vllm.v1.engine.upstream_calls import NO_LORA

if TYPE_CHECKING:
    from vllm.inputs import DataPrompt, PromptType
    from vllm.lora.request import LoRARequest
    from vllm.outputs import LabelScores
    from vllm.pooling_params import PoolingParams, PoolingTask
    from vllm.v1.engine.llm_engine import LLMEngine


class PoolingOfflineMixin:
    """Each of these raises VLLMValidationError and says what to do instead."""

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType] | DataPrompt,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: Any = True,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        pooling_task: PoolingTask | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        """Hidden states, pooled."""
        refuse_pooling("LLM.encode")

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: Any = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        """An embedding for each prompt."""
        refuse_pooling("LLM.embed")

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Any = True,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        """Class probabilities for each prompt."""
        refuse_pooling("LLM.classify")

    def reward(
        self,
        prompts: PromptType | Sequence[PromptType],
        /,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Any = True,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        """A reward model's values."""
        refuse_pooling("LLM.reward")


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
