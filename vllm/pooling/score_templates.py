"""How a causal model judges whether a document answers a query: a text that asks, and the two words of its answer.

A score is the probability of the positive word between the two: exp(l1) / (exp(l1) + exp(l0)), the logistic function of
the difference of their logprobs. Words may have several tokens; see label_scoring.py. Of a single token, as some
CrossEncoder's folders declare it, it is the logistic function of the logit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vllm.answers.prompts.content_forms import ContentForm, formed, readable_form
from vllm.answers.prompts.marked_media import MARK, MarkedMedia, looks_like_a_mark
from vllm.config import ModelConfig
from vllm.config.checkpoint.sentence_transformers import (
    PairMessages,
    default_pair_prompt,
    default_prompt,
    read_pair_messages,
)
from vllm.exceptions import VLLMValidationError, shown
from vllm.logger import info_once, init_logger, warn_once
from vllm.outputs import LabelScores
from vllm.pooling.score_families import family_of
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.tokenizers.truncation import special_tokens_around
from vllm.utils.checks import check_texts

if TYPE_CHECKING:
    from vllm.v1.engine.input_processor import ProcessedPrompt

logger = init_logger(__name__)

NO_TEMPLATE = "none"
"""Names no template: query and document are the prompt."""
_JOINED = "{{ query }}{{ document }}"
_OF_A_FAMILY = (
    "%s: pairs are scored by the template %r, as %s says; --score-template (chat_template of LLM.score) names another, "
    "or none, with which query and document are the whole prompt"
)
_UNKNOWN = (
    "%s: pairs are scored by a prompt of query and document with nothing around them, as no score template is known "
    "for it; --score-template (chat_template of LLM.score) names one, or none where this is meant"
)


@dataclass(frozen=True)
class ScoreTemplate:
    """
    Attributes:
        source: Jinja, with the variables query, document and instruction; or messages of the roles query and document.
        labels: the positive answer and the negative one, as texts or token ids; or the token id of the former alone.
        instruction: where none is given; "": the template has its own.
        query_prompt: what stands before each query.
        marks: what a query holds, and a document begins with, that have the template around them already.
        adds_special_tokens: whether the tokenizer puts its own around the prompt.
        gives_logits: whether scores are the logistic function's arguments, unless a request says otherwise.
    """

    adds_special_tokens: ClassVar[bool] = True
    gives_logits: ClassVar[bool] = False

    source: str
    labels: tuple[str, str] | tuple[int, ...] = ("yes", "no")
    instruction: str = "Given a web search query, retrieve relevant passages that answer the query"
    query_prompt: str = ""
    marks: tuple[str, str] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the template adds nothing to the texts."""
        return self.source == _JOINED

    def is_prompt(self, query: str, document: str) -> bool:
        """Whether query and document, one after the other, are the whole prompt."""
        if self.marks is None:
            return self.is_plain
        return self.marks[0] in query and document.lstrip().startswith(self.marks[1])

    def words_of_medium(self, kind: str) -> str | None:
        """The text that the template itself writes for a picture or a video; None: it takes texts alone."""
        return None

    def render(self, query: str, document: str, instruction: str | None = None) -> str:
        """The prompt. VLLMValidationError: the template fails."""
        if self.marks is not None and self.is_prompt(query, document):
            return query + document
        query = self.query_prompt + query
        values = {"query": query, "document": document, "instruction": instruction or self.instruction}
        from jinja2 import TemplateError

        form = _content_form(self.source)
        messages = [{"role": role, "content": formed(values[role], form)} for role in ("query", "document")]
        try:
            return str(_compiled(self.source).render(values, messages=messages))
        except TemplateError as error:
            raise VLLMValidationError(f"the score template fails: {error}", "score_template") from error


class ChatScoreTemplate(ScoreTemplate):
    """The tokenizer's chat template, as a CrossEncoder's folder says. An instruction takes the place of the folder's
    system message, as a prompt does in sentence-transformers, and is a variable of the template."""

    adds_special_tokens = False

    def __init__(self, tokenizer: Tokenizer, form: PairMessages) -> None:
        super().__init__("", form.token_ids or ("yes", "no"), "")
        # The class is frozen.
        object.__setattr__(self, "gives_logits", form.gives_logits)
        object.__setattr__(self, "_tokenizer", tokenizer)
        object.__setattr__(self, "_form", form)

    def render(self, query: str, document: str, instruction: str | None = None) -> str:
        form: PairMessages = self._form  # type: ignore[attr-defined]
        contents: dict[str, Any] = {"query": query, "document": document}
        if form.system:
            contents = {"system": instruction or form.system, **contents}
        if form.is_structured:
            contents = {role: [{"type": "text", "text": text}] for role, text in contents.items()}
        return self._rendered(contents, instruction)

    def words_of_medium(self, kind: str) -> str | None:
        form: PairMessages = self._form  # type: ignore[attr-defined]
        if not form.is_structured:
            return None
        first, second = ({"type": "text", "text": each} for each in _STANDINS[:2])
        query = [{"type": "text", "text": "q"}]
        between = []
        for parts in ([first, {"type": kind}, second], [first, second]):
            text = self._rendered({"query": query, "document": parts}, None)
            _, _, after = text.partition(_STANDINS[0])
            between.append(after.partition(_STANDINS[1])[0])
        return between[0].removesuffix(between[1]) or None

    def _rendered(self, contents: Mapping[str, Any], instruction: str | None) -> str:
        form: PairMessages = self._form  # type: ignore[attr-defined]
        messages: list[dict[str, Any]] = [{"role": role, "content": own} for role, own in contents.items()]
        more = {"instruction": instruction} if instruction else {}
        options = {**form.arguments, **more, "chat_template": form.template}
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))  # type: ignore[attr-defined]
        except Exception as error:  # a template is a program: it may raise anything
            raise VLLMValidationError(f"the model's chat template fails: {error}", "score_template") from error


def score_of(scores: LabelScores, gives_logits: bool) -> float:
    """A pair's score by the readings of its template's labels: their log-odds or a single one's logit, or the logistic
    function of these."""
    if len(scores.logprobs) > 1:
        return float(scores.logprobs[0] - scores.logprobs[1] if gives_logits else scores.probabilities[0])
    logit = np.float64(scores.token_logits[0])
    return float(logit if gives_logits else 1 / (1 + np.exp(-logit)))


def declared_template(folder: Path, tokenizer: Tokenizer | None) -> ScoreTemplate | None:
    """The one that a CrossEncoder's folder declares; None: there is none.

    Raises:
        VLLMValidationError: its score cannot be read so.
    """
    try:
        form = read_pair_messages(folder)
    except ValueError as error:
        raise VLLMValidationError(f"{error}: name a score template", "score_template") from None
    return None if form is None or tokenizer is None else ChatScoreTemplate(tokenizer, form)


def default_template(
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    labels: Sequence[str] | None = None,
    served_names: Sequence[str] = (),
) -> ScoreTemplate | None:
    """A model's where none is named: the one that a CrossEncoder's folder declares, unless there are labels in place of
    its own; else that of its family. Without these a classifier of words reads the texts as they are, another
    generating model is asked by "plain", and other cross-encoders' tokenizers join the texts (None). The log says once
    what is unlike "plain". A folder's default prompt stands before the query.

    Raises:
        VLLMValidationError: as `declared_template`.
        ValueError: as `score_template`.
    """
    folder, is_pooling = Path(config.path), config.runner_type == "pooling"
    model, words = Path(config.model).name, config.hf_config.raw.get("classifier_from_token")
    declared = declared_template(folder, tokenizer) if labels is None else None
    if declared is not None:
        info_once(logger, "%s: pairs are scored by the chat template that its folder declares", model)
        return declared
    if (found := family_of(config, served_names)) is not None:
        family, reason = found
        warn_once(logger, _OF_A_FAMILY, model, family.template, reason)
        template = replace(TEMPLATES[family.template], marks=family.marks)
    else:
        if words or (is_pooling and config.attn_type == "decoder"):
            warn_once(logger, _UNKNOWN, model)
        if is_pooling and not words:
            return None
        template = TEMPLATES[NO_TEMPLATE if words else "plain"]
    prompt = default_prompt(folder) if is_pooling else default_pair_prompt(folder)
    return replace(_answered(template, labels, words), query_prompt=prompt)


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # Lines of blocks leave nothing, as in transformers' chat templates.
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, **options)
    return environment.from_string(source)


@lru_cache(maxsize=16)
def _content_form(source: str) -> ContentForm:
    """The contents of the template's messages."""
    if "messages" not in source:
        return "text"
    values = dict.fromkeys(("query", "document", "instruction"), "")

    def render(content: Any) -> str:
        messages = [{"role": role, "content": content} for role in ("query", "document")]
        return str(_compiled(source).render(values, messages=messages))

    return readable_form(render) or "text"


# Where a model was trained on a wording of its own, it is the one that its card publishes.
TEMPLATES = {
    "plain": ScoreTemplate(
        "Query: {{ query }}\nDocument: {{ document }}\nDoes the document answer the query? Answer yes or no:",
        (" yes", " no"),
    ),
    "qwen3-reranker": ScoreTemplate(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: {{ instruction }}\n<Query>: {{ query }}\n<Document>: {{ document }}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
    "qwen3-vl-reranker": ScoreTemplate(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: {{ instruction }}<Query>:{{ query }}\n<Document>:{{ document }}<|im_end|>\n"
        "<|im_start|>assistant\n",
        instruction="Given a search query, retrieve relevant candidates that answer the query.",
    ),
    "bge-reranker-v2-gemma": ScoreTemplate(
        "A: {{ query }}\nB: {{ document }}\nGiven a query A and a passage B, determine whether the passage contains an "
        "answer to the query by providing a prediction of either 'Yes' or 'No'.",
        ("Yes", "No"),
    ),
    "mxbai-rerank-v2": ScoreTemplate(
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nquery: {{ query }} \ndocument: {{ document }} \nYou are a search relevance expert who "
        "evaluates how well documents match search queries. For each query-document pair, carefully analyze the "
        "semantic relationship between them, then provide your binary relevance judgment (0 for not relevant, 1 for "
        "relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n",
        ("1", "0"),
    ),
    NO_TEMPLATE: ScoreTemplate(_JOINED),
}

# In place of query, document and instruction, to see where a template puts them; the characters are nobody's.
_STANDINS = ("\ue000q\ue001", "\ue000d\ue001", "\ue000i\ue001")
_STANDIN = re.compile("\ue000[qdi]\ue001")


def score_template(
    name: str | None, labels: Sequence[str] | None = None, config: dict[str, Any] | None = None
) -> ScoreTemplate:
    """
    Args:
        name: one of TEMPLATES, a file of Jinja, or Jinja itself; None: "plain".
        labels: the positive answer and the negative one, in place of the template's.
        config: config.json's contents. With `classifier_from_token`, the texts are the prompt unless `name` is given,
            and two words (the last one is the positive answer) are the answers without `labels`.

    Raises:
        ValueError: no such template, or other than two different labels.
    """
    words = (config or {}).get("classifier_from_token")
    return _answered(_named(name or (NO_TEMPLATE if words else "plain")), labels, words)


def _answered(
    template: ScoreTemplate, labels: Sequence[str] | None, words: Sequence[str] | None = None
) -> ScoreTemplate:
    """The template with other answers, if there are; see `score_template`."""
    if labels is None and len(words or ()) == 2:
        labels = list(reversed(words or ()))
    if labels is None:
        return template
    if isinstance(labels, str) or len(labels) != 2 or labels[0] == labels[1] or not all(labels):
        raise ValueError(f"the labels of a score must be two different words, the positive one first, got {labels!r}")
    first, second = labels
    return replace(template, labels=(first, second))


def _named(name: str) -> ScoreTemplate:
    if name in TEMPLATES:
        return TEMPLATES[name]
    if "{{" in name or "{%" in name:
        return ScoreTemplate(name)
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"score_template must be one of {', '.join(TEMPLATES)}, or a file of Jinja, got {name!r}")
    return ScoreTemplate(path.read_text(encoding="utf-8"))


class PairPrompts:
    """Prompts of pairs. A document loses its end where it is too long and may be cut; nothing else is.

    Args:
        max_len: longest prompt, in tokens.
        truncate_to: length to cut longer prompts to; None: too long is an error.
        max_document_tokens: of each document; None: all of it.
        instruction: what the query is for; None or "": the template's own.
        pictures: for which queries and documents have marks.

    Raises:
        VLLMValidationError: an instruction that changes nothing in the template.
    """

    def __init__(
        self,
        template: ScoreTemplate,
        tokenizer: Tokenizer,
        max_len: int,
        truncate_to: int | None = None,
        max_document_tokens: int | None = None,
        instruction: str | None = None,
        pictures: MarkedMedia | None = None,
    ) -> None:
        self._template, self._tokenizer, self._instruction = template, tokenizer, instruction or None
        self._pictures = pictures
        if instruction and len({template.render(*_STANDINS[:2], each) for each in ("a", "b")}) == 1:
            message = f"instruction needs a score template that asks for it; this one ignores {shown(instruction)}"
            raise VLLMValidationError(message, "instruction", instruction)
        self._max_len, self._truncate_to, self._max_document_tokens = max_len, truncate_to, max_document_tokens

    def encode(self, pairs: Sequence[tuple[str, str]], names: Sequence[str]) -> list[ProcessedPrompt]:
        """The prompts, without texts. VLLMValidationError: a prompt is too long, or stays so without its document, or
        has pictures and is to be cut. `names` are the documents' places in the request."""
        # With it comes torch, and templates are checked before that.
        from vllm.v1.engine.input_processor import ProcessedPrompt

        shown = [any(MARK.search(text) for text in pair) for pair in pairs]
        plain = [self._without_end(pair) for pair, has_pictures in zip(pairs, shown, strict=True) if not has_pictures]
        encoded = iter(zip(plain, self._encoded(plain) if plain else (), strict=True))
        limit = self._max_len if self._truncate_to is None else min(self._truncate_to, self._max_len)
        prompts = []
        for pair, name, has_pictures in zip(pairs, names, shown, strict=True):
            if has_pictures:
                prompts.append(self._with_pictures(pair, name, limit))
                continue
            own, ids = next(encoded)
            fits = len(ids) <= limit
            prompts.append(ProcessedPrompt(None, ids if fits else self._shortened(own, name, len(ids), limit), None))
        return prompts

    def _without_end(self, pair: tuple[str, str]) -> tuple[str, str]:
        if self._max_document_tokens is None:
            return pair
        query, document = pair
        return query, cut_text(self._tokenizer, document, self._max_document_tokens)

    def _with_pictures(self, pair: tuple[str, str], name: str, limit: int) -> ProcessedPrompt:
        if self._max_document_tokens is not None and MARK.search(pair[1]):
            message = f"max_tokens_per_doc: {name} has pictures, which are not cut: leave it out"
            raise VLLMValidationError(message, "max_tokens_per_doc")
        template, pictures = self._template, self._pictures
        if pictures is None:
            raise looks_like_a_mark(name)
        text, words = template.render(*pair, self._instruction), pictures.words(own=template.words_of_medium)
        if sorted(MARK.findall(text)) != sorted(MARK.findall("".join(pair))):
            raise VLLMValidationError(f"{name}: the score template does not write each picture once", "score_template")
        special, ids = self._tokenizer.special_texts, None
        inner = (*pair, self._instruction or "")
        if not self._is_prompt(*pair) and special is not None and any(special.search(each) for each in inner):
            ids = self._guarded(pair, text, special, words)
        prompt = pictures.prompt(name, text, ids, words, adds_special_tokens=template.adds_special_tokens)
        if len(prompt.token_ids) > limit:
            message = (
                f"{name} makes a prompt of {len(prompt.token_ids)} tokens, and the context holds {limit} beside the "
                "answer; documents with pictures are not cut"
            )
            raise VLLMValidationError(message, name, len(prompt.token_ids))
        return prompt

    def _encoded(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        special, template = self._tokenizer.special_texts, self._template
        texts = [template.render(query, document, self._instruction) for query, document in pairs]
        # Whoever writes the whole prompt writes its special tokens, too.
        guarded = [not self._is_prompt(*pair) for pair in pairs]
        inner = [text for pair, own in zip(pairs, guarded, strict=True) if own for text in pair]
        if special is None or not any(special.search(text) for text in (*inner, self._instruction or "")):
            return self._tokenizer.encode_batch(texts, template.adds_special_tokens)
        return [
            self._guarded(pair, text, special)
            if is_guarded
            else self._tokenizer.encode(text, add_special_tokens=template.adds_special_tokens)
            for pair, text, is_guarded in zip(pairs, texts, guarded, strict=True)
        ]

    def _is_prompt(self, query: str, document: str) -> bool:
        """VLLMValidationError: an instruction beside a prompt, which has its own."""
        if not self._template.is_prompt(query, document):
            return False
        if self._instruction:
            message = "instruction must be left out where query and document come with the score template around them"
            raise VLLMValidationError(message, "instruction", self._instruction)
        return True

    def _guarded(self, pair: tuple[str, str], rendered: str, special: re.Pattern[str], words: Any = None) -> list[int]:
        """The prompt's ids where only the template's special tokens are such, and `words` in the places of pictures:
        what a query or a document spells stays text, so that it cannot end its turn."""
        instruction = self._instruction or self._template.instruction
        values = dict(zip(_STANDINS, (*pair, instruction), strict=True))
        # A variable that is not there may change the rest of a template.
        frame = self._template.render(*_STANDINS[:2], _STANDINS[2] if instruction else None)
        pieces, tokens = special.split(frame), special.findall(frame)
        texts = [_STANDIN.sub(lambda match: values[match[0]], piece) for piece in pieces]
        joined = "".join(text + token for text, token in zip(texts, [*tokens, ""], strict=True))
        if joined != rendered:
            raise VLLMValidationError(
                "a query or document spells a special token, and the score template does not take texts as they are: "
                "leave it out",
                "documents",
            )
        adds_special = self._template.adds_special_tokens
        before, after = special_tokens_around(self._tokenizer) if adds_special else ([], [])
        ids = list(before)
        for text, token in zip(texts, [*tokens, ""], strict=True):
            for index, piece in enumerate(MARK.split(text)):
                if index % 2 and self._pictures is not None:
                    ids += self._tokenizer.encode(self._pictures.word(piece, words), add_special_tokens=False)
                elif piece:
                    ids += self._tokenizer.encode_plain(piece)
            ids += self._tokenizer.encode(token, add_special_tokens=False) if token else []
        return ids + after

    def _shortened(self, pair: tuple[str, str], name: str, num_tokens: int, limit: int) -> list[int]:
        if self._truncate_to is None:
            raise VLLMValidationError(
                f"{name} makes a prompt of {num_tokens} tokens, and the context holds {limit} beside the answer; "
                "truncate_prompt_tokens or max_tokens_per_doc let the document's end go",
                name,
                num_tokens,
            )
        query, document = pair
        left = len(self._tokenizer.encode(document, add_special_tokens=False))
        while left > 0:
            left -= max(num_tokens - limit, 1)
            (ids,) = self._encoded([(query, cut_text(self._tokenizer, document, max(left, 0)))])
            if len(ids) <= limit:
                return ids
            num_tokens = len(ids)
        raise VLLMValidationError(
            f"{name}: the query and the template alone are more than {limit} tokens", name, num_tokens
        )


def cut_text(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    """The text of its first tokens."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) <= num_tokens:
        return text
    # A cut within a character leaves a replacement character.
    return tokenizer.decode(ids[:num_tokens], skip_special_tokens=False).rstrip("\ufffd")


def _text_of(name: str, value: Any, pictures: MarkedMedia | None) -> Any:
    """The text of {"text": ...}, or of {"content": [text parts, pictures]}; anything else as it is."""
    if not isinstance(value, dict) or value.keys() != {"content"}:
        text = value["text"] if isinstance(value, dict) and value.keys() == {"text"} else value
        if isinstance(text, str) and MARK.search(text):
            raise looks_like_a_mark(name)
        return text
    parts = value["content"]
    if isinstance(parts, list) and parts and pictures is not None:
        return pictures.text_of(f"{name}.content", parts)
    if (
        isinstance(parts, list)
        and parts
        and all(isinstance(part, dict) and part.get("type") == "text" for part in parts)
    ):
        texts = [part.get("text") for part in parts]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else value
    return value


def pairs_of(
    first: Any, second: Any, names: tuple[str, str], pictures: MarkedMedia | None = None
) -> list[tuple[str, str]]:
    """Texts paired one by one, or one text with each of the others.

    Args:
        first, second: a text or a list of texts, which may be {"text": ...}, or {"content": [parts]}.
        names: the fields'.
        pictures: takes those among the parts, and has marks in their places; None: parts are texts.

    Raises:
        VLLMValidationError: they are no texts, there are none, or as many as cannot be paired.
    """
    lists = []
    for name, value in zip(names, (first, second), strict=True):
        given = [value] if isinstance(value, (str, dict)) else value
        if isinstance(given, (list, tuple)):
            places = [name] if given is not value else [f"{name}[{index}]" for index in range(len(given))]
            texts: Any = [_text_of(place, each, pictures) for place, each in zip(places, given, strict=True)]
        else:
            texts = given
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise VLLMValidationError(f"{name} must be a text or a list of texts, got {shown(value)}", name, value)
        if not texts:
            raise VLLMValidationError(f"{name} must not be empty", name, value)
        check_texts(name, texts)
        lists.append(list(texts))
    queries, documents = lists
    if len(queries) == 1:
        queries *= len(documents)
    if len(queries) != len(documents):
        raise VLLMValidationError(
            f"{names[0]} must be one text or as many as {names[1]}, {len(documents)}, got {len(queries)}", names[0]
        )
    return list(zip(queries, documents, strict=True))
