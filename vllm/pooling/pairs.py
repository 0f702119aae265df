"""Scores of pairs of texts by pooling models: a cross-encoder reads both texts together; of embeddings the score is the
cosine, of token embeddings the sum over the query's tokens of the best dot product with a token of the document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm.answers.prompts.marked_media import MARK, MarkedMedia, looks_like_a_mark
from vllm.config import ModelConfig
from vllm.config.checkpoint.late_interaction import Side
from vllm.config.checkpoint.sentence_transformers import default_prompt, with_prompt
from vllm.exceptions import VLLMValidationError
from vllm.pooling.late_interaction import LateTexts, compute_maxsim_score
from vllm.pooling.score_templates import NO_TEMPLATE, PairPrompts, ScoreTemplate, cut_text, default_template
from vllm.pooling_outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.tokenizers.truncation import truncate_text
from vllm.utils.checks import check_integer, check_neutral
from vllm.v1.engine.input_processor import ProcessedPrompt

if TYPE_CHECKING:
    from torch import Tensor

_NO_INSTRUCTION = "this model takes one only in a score template that asks for it"
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


def check_score_args(config: ModelConfig, template: str | ScoreTemplate | None, labels: object = None) -> None:
    """ValueError: a server or a run has a `score_template` or `score_labels` that its model does not use."""
    if config.runner_type != "pooling":
        return
    if labels is not None:
        raise ValueError(
            "score_labels are answers of a model that generates, and this one is served as a pooling model: leave them "
            "out; hf_overrides={'classifier_from_token': [NO, YES]} makes a classifier of two words"
        )
    kind = score_type(config)
    if template == NO_TEMPLATE or (isinstance(template, ScoreTemplate) and template.is_plain):
        return
    if template is not None and kind != "cross-encoder":
        does = "does not score pairs" if kind is None else f"is a {kind}, which reads the two apart"
        raise ValueError(
            f"score_template is for models that read a pair of texts together, and this one {does}: leave it out"
        )


def longest_text(config: ModelConfig) -> int:
    """The limit of a pair, or of each of its texts, in tokens: texts of pairs are not read in parts."""
    return min(config.max_embed_len, config.max_model_len)


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
            truncate_to = check_integer("truncate_prompt_tokens", self.truncate_to, 1, self.max_len)
            object.__setattr__(self, "truncate_to", truncate_to)  # the class is frozen

    @property
    def limit(self) -> int:
        return self.max_len if self.truncate_to in (None, -1) else self.truncate_to  # type: ignore[return-value]


class PooledPairs:
    """Pairs as requests, and the requests' outputs as scores. Each text is embedded once, however many pairs it is in.

    Args:
        params: of each request; its task is set here.
        template: of a cross-encoder that was trained on one; None: as score_templates.default_template says. Without
            one its tokenizer joins the texts.
        names: of the second texts, in errors.
        pictures: for which texts have marks.

    Raises:
        VLLMValidationError: the model does not score pairs, texts are too long, or nothing takes the instruction.
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
        pictures: MarkedMedia | None = None,
    ) -> None:
        kind = score_type(config)
        if kind is None:
            found = f"has {config.hf_config.num_labels} labels" if "classify" in config.pooling_tasks else "does not"
            message = f"score needs a model with one label, or one that embeds; this one {found}"
            raise VLLMValidationError(message, "data_1")
        try:
            check_score_args(config, template)
        except ValueError as error:
            raise VLLMValidationError(str(error), "score_template") from None
        self.kind: ScoreType = kind
        self._pairs, self._tokenizer, self._limits = pairs, tokenizer, limits
        self._pictures = pictures
        self._num_types = config.hf_config.raw.get("type_vocab_size")
        self._names = names or [f"data_2[{index}]" for index in range(len(pairs))]
        self._params = params.clone()
        self._params.task = _TASKS[kind]
        self._params.truncate_prompt_tokens = None
        if limits.max_document_tokens is not None:
            self._refuse_pictures("max_tokens_per_doc: documents with pictures are not cut")
            cut = limits.max_document_tokens
            self._pairs = [(first, cut_text(tokenizer, second, cut)) for first, second in pairs]
        self._prompt = default_prompt(Path(config.path))
        # Embedded texts, in the order first seen; a query is read apart where documents are read otherwise.
        self._places: dict[tuple[bool, str], int] = {}
        self._late = config.late_interaction if kind == "late-interaction" else None
        self._texts = None if self._late is None else LateTexts(config, self._late, tokenizer)
        if kind == "cross-encoder":
            if template is None:
                template = default_template(config, tokenizer)
            elif template.is_plain and not config.hf_config.raw.get("classifier_from_token"):
                template = None
            check_neutral("instruction", instruction if template is None else None, _NO_INSTRUCTION)
            self.requests = self._joined() if template is None else self._rendered(template, instruction)
        else:
            if self._params.use_activation is False and kind == "bi-encoder":
                message = "use_activation must be left out: cosines are what they are"
                raise VLLMValidationError(message, "use_activation", False)
            check_neutral("instruction", instruction, _NO_INSTRUCTION)
            self.requests = self._embedded()

    def _refuse_pictures(self, reason: str) -> None:
        name = next((own for own, pair in zip(self._names, self._pairs, strict=True) if MARK.search("".join(pair))), "")
        if name:
            raise VLLMValidationError(f"{name} has pictures: {reason}", name)

    def scores(self, outputs: Sequence[PoolingRequestOutput]) -> list[float]:
        """The score of each pair, from the outputs of `requests`."""
        tensors = [output.outputs.data.float() for output in outputs]
        if self.kind == "cross-encoder":
            return [float(tensor.squeeze()) for tensor in tensors]
        if self.kind == "bi-encoder":
            tensors = [tensor / tensor.norm() for tensor in tensors]
        values = []
        for first, second in self._pairs:
            one, other = tensors[self._place(first, True)], tensors[self._place(second, False)]
            values.append(float(one @ other) if one.ndim == 1 else self._max_sim(one, other))
        return values

    def token_ids(self, index: int, outputs: Sequence[PoolingRequestOutput]) -> list[int]:
        """Token ids from which a pair's score was read."""
        if self.kind == "cross-encoder":
            return outputs[index].prompt_token_ids
        first, second = self._pairs[index]
        one, other = outputs[self._place(first, True)], outputs[self._place(second, False)]
        return one.prompt_token_ids + other.prompt_token_ids

    def _place(self, text: str, is_query: bool) -> int:
        return self._places[is_query and self._late is not None, text]

    def _max_sim(self, query: Tensor, document: Tensor) -> float:
        score = float(compute_maxsim_score(query, document))
        return score / len(query) if self._late is not None and self._late.is_mean else score

    def _joined(self) -> list[tuple[ProcessedPrompt, PoolingParams]]:
        """As transformers joins texts, and cuts them: the longer one loses its end."""
        self._refuse_pictures("this model's tokenizer joins texts; a score template says where pictures go")
        cut = {} if self._limits.truncate_to is None else {"truncation": True, "max_length": self._limits.limit}
        firsts, seconds = zip(*self._pairs, strict=True)
        # The first text of a pair has the model's default prompt.
        queries = [self._prompt + first for first in firsts]
        encoded = self._tokenizer.hf_tokenizer(queries, list(seconds), verbose=False, **cut)
        types = encoded.get("token_type_ids") or [[]] * len(firsts)
        requests = []
        for ids, own, name in zip(encoded["input_ids"], types, self._names, strict=True):
            if len(ids) > self._limits.limit:
                raise _too_long(name, len(ids), self._limits.limit)
            params = self._params.clone()
            if any(own):
                params.extra_kwargs = {"compressed_token_type_ids": self._ones(own)}
            requests.append((ProcessedPrompt(None, ids, None), params))
        return requests

    def _ones(self, types: Sequence[int]) -> list[int]:
        """Begin and end of a pair's tokens of type 1."""
        try:
            found = list(compress_token_type_ids(types))
        except ValueError as error:
            raise VLLMValidationError(f"{error}: this model's tokenizer gives others", "data_1") from None
        if self._num_types == 1:
            raise VLLMValidationError(
                "the tokenizer gives tokens of a pair a type that the model does not have", "data_1"
            )
        return found

    def _rendered(
        self, template: ScoreTemplate, instruction: str | None
    ) -> list[tuple[ProcessedPrompt, PoolingParams]]:
        limits = self._limits
        truncate_to = None if limits.truncate_to is None else limits.limit
        prompts = PairPrompts(template, self._tokenizer, limits.max_len, truncate_to, None, instruction, self._pictures)
        return [(prompt, self._params.clone()) for prompt in prompts.encode(self._pairs, self._names)]

    def _embedded(self) -> list[tuple[ProcessedPrompt, PoolingParams]]:
        names = {second: name for (_, second), name in zip(self._pairs, self._names, strict=True)}
        for pair in self._pairs:
            for text, is_query in zip(pair, (True, False), strict=True):
                self._places.setdefault((is_query and self._late is not None, text), len(self._places))
        if self._texts is not None:
            return self._late_requests(self._texts, names)
        requests, limit = [], self._limits.limit
        texts = [text for _, text in self._places]
        begun = [with_prompt(text, self._prompt) for text in texts]
        for text, whole, ids in zip(texts, begun, self._tokenizer.encode_batch(begun), strict=True):
            name = names.get(text, "the query")
            if MARK.search(text):
                requests.append((self._with_pictures(name, whole, limit), self._params.clone()))
                continue
            if len(ids) > limit:
                if self._limits.truncate_to is None:
                    raise _too_long(name, len(ids), limit)
                ids = truncate_text(self._tokenizer, whole, ids, limit, "right")
            requests.append((ProcessedPrompt(text, ids, None), self._params.clone()))
        return requests

    def _with_pictures(self, name: str, text: str, limit: int) -> ProcessedPrompt:
        if self._pictures is None:
            raise looks_like_a_mark(name)
        prompt = self._pictures.prompt(name, text, params=self._params)
        if len(prompt.token_ids) > limit:
            raise _too_long(name, len(prompt.token_ids), limit)
        return prompt

    def _late_requests(self, texts: LateTexts, names: Mapping[str, str]) -> list[tuple[ProcessedPrompt, PoolingParams]]:
        self._refuse_pictures("queries and documents of this model are texts")
        requests: list[Any] = [None] * len(self._places)
        for is_query in (True, False):
            of_side = {text: place for (own, text), place in self._places.items() if own == is_query}
            side: Side = "query" if is_query else "document"
            named = ["the query" if is_query else names[text] for text in of_side]
            made = texts.requests(list(of_side), side, self._params, self._limits.truncate_to, named)
            for place, request in zip(of_side.values(), made, strict=True):
                requests[place] = request
        return requests


def compress_token_type_ids(token_type_ids: Sequence[int]) -> tuple[int, int]:
    """Where the tokens of type 1 begin and end.

    Raises:
        ValueError: they are not zeros, ones, and zeros again.
    """
    types = list(token_type_ids)
    start = types.index(1) if 1 in types else len(types)
    end = start + sum(types[start:])
    if types != [0] * start + [1] * (end - start) + [0] * (len(types) - end):
        raise ValueError("token types must be zeros, then ones, with optional trailing zeros")
    return start, end


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
