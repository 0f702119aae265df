"""Scores of pairs of texts by pooling models: a cross-encoder reads both texts together; of embeddings the score is the
cosine, of token embeddings the sum over the query's tokens of the best dot product with a token of the document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm.config import ModelConfig
from vllm.entrypoints.score_templates import PairPrompts, ScoreTemplate, cut_text, score_template
from vllm.exceptions import VLLMValidationError
from vllm.pooling_outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.transformers_utils.sentence_transformers import default_prompt, with_prompt
from vllm.utils.checks import check_integer
from vllm.v1.engine.input_processor import ProcessedPrompt

ScoreType = Literal["cross-encoder", "bi-encoder", "late-interaction"]
_TASKS: dict[ScoreType, Any] = {"cross-encoder": "classify", "bi-encoder": "embed", "late-interaction": "token_embed"}


def score_type(config: ModelConfig) -> ScoreType | None:
    """How a pooling model scores pairs; None: it has several labels, or is none."""
    tasks = config.pooling_tasks
    if "classify" in tasks:
        return "cross-encoder" if config.hf_config.num_labels == 1 else None
    if "embed" in tasks:
        return "bi-encoder"
    return "late-interaction" if "token_embed" in tasks else None


@dataclass(frozen=True)
class PairLimits:
    """
    Attributes:
        max_len: longest prompt, in tokens.
        truncate_to: length to cut longer ones to; -1: to max_len; None: too long is an error.
        max_document_tokens: of each document, which loses its end; None: all of it.

    Raises:
        VLLMValidationError: a length beyond max_len.
    """

    max_len: int
    truncate_to: int | None = None
    max_document_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.truncate_to is not None and self.truncate_to != -1:
            check_integer("truncate_prompt_tokens", self.truncate_to, 1, self.max_len)

    @property
    def limit(self) -> int:
        return self.max_len if self.truncate_to in (None, -1) else self.truncate_to  # type: ignore[return-value]


class PooledPairs:
    """Pairs as requests, and the requests' outputs as scores. Each text is embedded once, however many pairs it is in.

    Args:
        params: of each request; its task is set here.
        template: of a cross-encoder that was trained on one; None: its tokenizer joins the texts, and words as classes
            (classifier_from_token) follow the texts as they are.
        names: of the second texts, in errors.

    Raises:
        VLLMValidationError: the model does not score pairs, or texts are too long.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        pairs: Sequence[tuple[str, str]],
        params: PoolingParams,
        limits: PairLimits,
        template: ScoreTemplate | None = None,
        instruction: str | None = None,
        names: Sequence[str] = (),
    ) -> None:
        kind = score_type(config)
        if kind is None:
            found = f"has {config.hf_config.num_labels} labels" if "classify" in config.pooling_tasks else "does not"
            message = f"score needs a model with one label, or one that embeds; this one {found}"
            raise VLLMValidationError(message, "data_1")
        self.kind: ScoreType = kind
        self._pairs, self._tokenizer, self._limits = pairs, tokenizer, limits
        self._names = names or [f"data_2[{index}]" for index in range(len(pairs))]
        self._params = params.clone()
        self._params.task = _TASKS[kind]
        self._params.truncate_prompt_tokens = None
        if limits.max_document_tokens is not None:
            cut = limits.max_document_tokens
            self._pairs = [(first, cut_text(tokenizer, second, cut)) for first, second in pairs]
        self._prompt = default_prompt(Path(config.path))
        self._places: dict[str, int] = {}  # of embedded texts, in the order first seen
        if kind == "cross-encoder":
            if template is None and config.hf_config.raw.get("classifier_from_token"):
                template = score_template(None, None, config.hf_config.raw)
            self.requests = self._joined() if template is None else self._rendered(template, instruction)
        else:
            if self._params.use_activation is False and kind == "bi-encoder":
                message = "use_activation must be left out: cosines are what they are"
                raise VLLMValidationError(message, "use_activation", False)
            self.requests = self._embedded()

    def scores(self, outputs: Sequence[PoolingRequestOutput]) -> list[float]:
        """The score of each pair, from the outputs of `requests`."""
        tensors = [output.outputs.data.float() for output in outputs]
        if self.kind == "cross-encoder":
            return [float(tensor.squeeze()) for tensor in tensors]
        if self.kind == "bi-encoder":
            tensors = [tensor / tensor.norm() for tensor in tensors]
        values = []
        for first, second in self._pairs:
            one, other = tensors[self._places[first]], tensors[self._places[second]]
            values.append(float(one @ other if one.ndim == 1 else (one @ other.T).amax(-1).sum()))
        return values

    def token_ids(self, index: int, outputs: Sequence[PoolingRequestOutput]) -> list[int]:
        """Of what a pair's score was read from."""
        if self.kind == "cross-encoder":
            return outputs[index].prompt_token_ids
        first, second = self._pairs[index]
        return outputs[self._places[first]].prompt_token_ids + outputs[self._places[second]].prompt_token_ids

    def _joined(self) -> list[tuple[ProcessedPrompt, PoolingParams]]:
        """As transformers joins texts, and cuts them: the longer one loses its end."""
        cut = {} if self._limits.truncate_to is None else {"truncation": True, "max_length": self._limits.limit}
        firsts, seconds = zip(*self._pairs, strict=True)
        encoded = self._tokenizer.hf_tokenizer(list(firsts), list(seconds), verbose=False, **cut)
        types = encoded.get("token_type_ids") or [[]] * len(firsts)
        requests = []
        for ids, own, name in zip(encoded["input_ids"], types, self._names, strict=True):
            if len(ids) > self._limits.limit:
                raise _too_long(name, len(ids), self._limits.limit)
            params = self._params.clone()
            if 1 in own:
                params.extra_kwargs = {"compressed_token_type_ids": own.index(1)}
            requests.append((ProcessedPrompt(None, ids, None), params))
        return requests

    def _rendered(
        self, template: ScoreTemplate, instruction: str | None
    ) -> list[tuple[ProcessedPrompt, PoolingParams]]:
        limits = self._limits
        truncate_to = None if limits.truncate_to is None else limits.limit
        prompts = PairPrompts(template, self._tokenizer, limits.max_len, truncate_to, None, instruction)
        encoded = prompts.encode(self._pairs, self._names)
        return [(ProcessedPrompt(None, ids, None), self._params.clone()) for ids in encoded]

    def _embedded(self) -> list[tuple[ProcessedPrompt, PoolingParams]]:
        names = {second: name for (_, second), name in zip(self._pairs, self._names, strict=True)}
        for pair in self._pairs:
            for text in pair:
                self._places.setdefault(text, len(self._places))
        requests, limit = [], self._limits.limit
        texts = [with_prompt(text, self._prompt) for text in self._places]
        for text, ids in zip(self._places, self._tokenizer.encode_batch(texts), strict=True):
            if len(ids) > limit:
                name = names.get(text, "the query")
                if self._limits.truncate_to is None:
                    raise _too_long(name, len(ids), limit)
                ids = keep_tokens(ids, limit, self._tokenizer.all_special_ids)
            requests.append((ProcessedPrompt(text, ids, None), self._params.clone()))
        return requests


def keep_tokens(ids: list[int], limit: int, special_ids: Sequence[int], from_end: bool = False) -> list[int]:
    """`limit` tokens of a text's beginning, or of its end, with the special token on the side that is cut."""
    if len(ids) <= limit:
        return ids
    if from_end:
        head = ids[:1] if limit > 1 and ids[0] in special_ids else []
        return head + ids[len(ids) - limit + len(head) :]
    tail = ids[-1:] if limit > 1 and ids[-1] in special_ids else []
    return ids[: limit - len(tail)] + tail


def order_of(scores: Sequence[float]) -> list[int]:
    """Indices by descending score; equals, and scores that are no numbers, as they came."""
    keys = [-math.inf if math.isnan(value) else value for value in scores]
    return sorted(range(len(keys)), key=keys.__getitem__, reverse=True)


def _too_long(name: str, num_tokens: int, limit: int) -> VLLMValidationError:
    message = (
        f"{name} makes a prompt of {num_tokens} tokens: the model's maximum context length is {limit} tokens; "
        "truncate_prompt_tokens or max_tokens_per_doc let the document's end go"
    )
    return VLLMValidationError(message, name, num_tokens)
