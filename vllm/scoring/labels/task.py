"""`vllm score`: the labels of a file's texts, from an engine in this process or from a server."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.answers.prompts.marked_media import MarkedMedia
from vllm.exceptions import CliError, VLLMValidationError
from vllm.outputs import LabelScores
from vllm.scoring.files import Item, read_text
from vllm.scoring.labels.records import Labels, label_results
from vllm.scoring.labels.report import LabelReport
from vllm.scoring.labels.templates import Template
from vllm.scoring.media import RowMedia, media_fields
from vllm.scoring.scorers import EngineScorer, Results, ServerScorer
from vllm.scoring.server import Server
from vllm.scoring.task import Task
from vllm.utils.server_client import ServerError

if TYPE_CHECKING:
    import pyarrow as pa

    from vllm.entrypoints.llm import LLM
    from vllm.v1.engine.input_processor import ProcessedPrompt

_PATH = "/generative_scoring"
_PROBE = "a"
# It stands for a row's pictures; the characters are nobody's.
_PLACE = "\ue002{}\ue003"


class LabelTask(Task):
    """Scores labels as continuations of the prompts of texts.

    Attributes:
        given: the labels, as texts or as token ids.
        template: of the prompts; None: the default one.
    """

    command, suffix, has_tables = "score", "scores", False

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._picture = self.picture_path(args)
        self.outputs = [("--picture", self._picture)]
        self.given: list[str] | list[int] = args.labels or args.label_ids
        self.template: Template | None = None
        if args.template is not None:
            self.template = Template.unescaped(args.template)
        elif args.template_file is not None:
            # A line break at the end of the file is not part of the prompt.
            self.template = Template(read_text(args.template_file).removesuffix("\n").removesuffix("\r"))
        for name in media_fields(args).values():
            if self.template is not None and self.template.count(name) > 1:
                raise CliError(f"template: {{{name}}} is there twice, and pictures are shown once")
        source = self.template and self.template.source
        self.made_from = {"labels": args.labels, "label_ids": args.label_ids, "template": source}

    def check(self, item: Item) -> None:
        if self.template is not None:
            self.template.render(self.input_name, item if self.media is None else _placed(item, self.media))

    def engine_scorer(self, llm: LLM) -> EngineLabelScorer:
        return EngineLabelScorer(llm, self.template, self.given, self.input_name, self.media)

    def server_scorer(self, server: Server) -> ServerLabelScorer:
        return ServerLabelScorer(server, self.template, self.given, self.input_name, self.media)

    def schema(self, scorer: EngineLabelScorer) -> pa.Schema:
        return scorer.labels.schema()

    def report(self, scorer: EngineLabelScorer | ServerLabelScorer) -> LabelReport:
        return LabelReport(scorer.labels, self.input_name, self._picture)


class EngineLabelScorer(EngineScorer):
    """`template` None: the default one; `given`: the labels, as texts or as token ids; `input_name` is for messages."""

    def __init__(
        self,
        llm: LLM,
        template: Template | None,
        given: Sequence[str] | Sequence[int],
        input_name: str,
        media: RowMedia | None = None,
    ) -> None:
        super().__init__(llm, media)
        if self._tokenizer is None:
            raise CliError("--skip-tokenizer-init: texts cannot be scored without a tokenizer")
        self.labels = Labels.resolve(given, self._tokenizer, self._config.vocab_size)
        self._template, self._name = template or Template.default(self.labels.texts), input_name
        self._render = partial(self._template.render, input_name)
        longest, max_model_len = self.labels.longest, self._config.max_model_len
        if longest > max_model_len:
            raise CliError(
                f"the longest label has {longest} tokens and leaves no room for a prompt "
                f"(max_model_len={max_model_len})"
            )

    def results(self, batch: Sequence[Item], use_tqdm: bool | Callable[..., Any]) -> Iterable[Results]:
        """A prompt of no or too many tokens has an error."""
        assert self._tokenizer is not None
        if self.media is not None:
            return self._with_media(batch, self.media, use_tqdm)
        prompts = self._tokenizer.encode_batch([self._render(item) for item in batch])
        faults = [_length_fault(len(ids), self._config.max_model_len, self.labels) for ids in prompts]
        usable = [ids for ids, fault in zip(prompts, faults, strict=True) if not fault]
        scores = iter(self._llm.score_labels(usable, self.labels.token_ids, use_tqdm=use_tqdm))
        pairs = zip(prompts, faults, strict=True)
        return [label_results(len(ids), fault or next(scores), self.labels) for ids, fault in pairs]

    def _with_media(self, batch: Sequence[Item], media: RowMedia, use_tqdm: bool | Callable[..., Any]) -> list[Results]:
        found: list[ProcessedPrompt | str] = []
        for item in batch:
            try:
                found.append(self._shown(item, media))
            except VLLMValidationError as error:
                found.append(str(error.args[0]))
        usable = [each for each in found if not isinstance(each, str)]
        scores = iter(self._llm.score_processed(usable, self.labels.token_ids, use_tqdm=use_tqdm) if usable else ())
        results = []
        for each in found:
            num_tokens = None if isinstance(each, str) else len(each.token_ids)
            results.append(label_results(num_tokens, each if isinstance(each, str) else next(scores), self.labels))
        return results

    def _shown(self, item: Item, media: RowMedia) -> ProcessedPrompt:
        """VLLMValidationError: a picture cannot be read, or the prompt is too long."""
        pictures = MarkedMedia(self._llm.llm_engine.input_processor)
        text = pictures.text_of("the prompt", _content(self._template, self._name, item, media))
        pictures.load_now()
        prompt = pictures.prompt("the prompt", text)
        if fault := _length_fault(len(prompt.token_ids), self._config.max_model_len, self.labels):
            raise VLLMValidationError(fault, "text")
        return prompt


class ServerLabelScorer(ServerScorer):
    """See EngineLabelScorer. The labels are as the server tokenises them."""

    def __init__(
        self,
        server: Server,
        template: Template | None,
        given: Sequence[str] | Sequence[int],
        input_name: str,
        media: RowMedia | None = None,
    ) -> None:
        super().__init__(server, media)
        self._fields = {("labels" if isinstance(given[0], str) else "label_token_ids"): list(given)}
        # One answer shows whether the labels can be scored, and how they are tokenised.
        entries = _item(server.wait(self._post(_PROBE)), len(given))["labels"]
        texts, token_ids = ([entry[name] for entry in entries] for name in ("label", "token_ids"))
        self.labels = Labels([str(label) for label in given], texts, token_ids)
        self._template, self._name = template or Template.default(self.labels.texts), input_name
        self._render = partial(self._template.render, input_name)

    async def result(self, item: Item) -> Results:
        prompt: Any = self._render(item)
        if self.media is not None:
            prompt = {"content": _content(self._template, self._name, item, self.media)}
        scored = _item(await self._post(prompt), len(self.labels.names))
        return label_results(scored["num_prompt_tokens"], _scores(scored, self.labels), self.labels)

    async def refused(self, item: Item, error: ServerError) -> Results:
        """The row of an error of this text alone: too long, empty, or one whose logits are not finite."""
        is_items = error.status == 400 and str(error.param).partition("[")[0] == "items"
        if error.status not in (413, 500) and not is_items:
            raise error
        num_tokens = await self._count(self._render(item)) if self.media is None else None
        fault = _length_fault(num_tokens, self._server.max_model_len, self.labels) if num_tokens is not None else ""
        return label_results(num_tokens, fault or error.message, self.labels)

    async def _post(self, prompt: Any) -> dict[str, Any]:
        return await self._server.post(_PATH, {"query": "", "items": [prompt], **self._fields})

    def failed(self, reason: str) -> Results:
        return label_results(None, reason, self.labels)

    async def _count(self, prompt: str) -> int | None:
        try:
            count: int = (await self._server.post("/tokenize", {"prompt": prompt}))["count"]
        except ServerError:
            return None
        return count


def _content(template: Template, name: str, item: Item, media: RowMedia) -> list[dict[str, Any]]:
    """The parts of a row's prompt: its pictures and videos are where the template has their field, or else before the
    prompt.

    Raises:
        VLLMValidationError: a file cannot be read any more, or a text has what stands for pictures here.
    """
    text = template.render(name, _placed(item, media))
    places = {_PLACE.format(kind): kind for kind, field in media.fields.items() if field in template.fields()}
    parts = [part for kind in media.fields if kind not in places.values() for part in media.parts(item, kind)]
    pieces = re.split(f"({'|'.join(places)})", text) if places else [text]
    if any(pieces.count(place) > 1 for place in places):
        raise VLLMValidationError(
            "the prompt: U+E002 and U+E003 around a word stand for a picture: leave them out", "text"
        )
    for piece in pieces:
        if piece in places:
            parts += media.parts(item, places[piece])
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _placed(item: Item, media: RowMedia) -> Item:
    places = {field: _PLACE.format(kind) for kind, field in media.fields.items()}
    return replace(item, fields={**item.fields, **places})


def _length_fault(num_tokens: int, max_model_len: int, labels: Labels) -> str:
    """Why a prompt of so many tokens cannot be scored; empty if it can."""
    # A label's last token is read, never run through the model.
    most = max_model_len - labels.longest + 1
    if 0 < num_tokens <= most:
        return ""
    return (
        f"the prompt has {num_tokens} tokens; it must have from 1 to {most} "
        f"(max_model_len={max_model_len}, the longest label has {labels.longest})"
    )


def _item(answer: dict[str, Any], num_labels: int) -> dict[str, Any]:
    try:
        item: dict[str, Any] = answer["data"][0]
        if len(item["labels"]) == num_labels:
            return item
    except (TypeError, LookupError):
        pass
    raise CliError(f"{_PATH}: the answer does not have the labels' scores; --url must be a server of this package")


def _scores(item: dict[str, Any], labels: Labels) -> LabelScores:
    """An item of an answer as the engine's result; JSON has null for minus infinity."""
    entries = item["labels"]
    logprobs = np.asarray([_number(entry["logprob"]) for entry in entries])
    probabilities = np.asarray([entry["probability"] for entry in entries], dtype=np.float64)  # null is NaN
    if len(entries) == 1 and np.isfinite(logprobs[0]):
        # The server returns a single label's probability in the vocabulary.
        probabilities = np.ones(1)
    token_logprobs = [entry.get("token_logprobs") or [entry["logprob"]] for entry in entries]
    # Logits of further tokens are not in the answer.
    further = [[math.nan] * (len(ids) - 1) for ids in labels.token_ids]
    token_logits = [[entry["logit"], *rest] for entry, rest in zip(entries, further, strict=True)]
    return LabelScores(
        prompt=None,
        prompt_token_ids=[],
        label_texts=[entry["label"] for entry in entries],
        label_token_ids=labels.token_ids,
        logprobs=logprobs,
        probabilities=probabilities,
        mass=math.nan if item["label_mass"] is None else item["label_mass"],
        token_logprobs=np.asarray([_number(value) for each in token_logprobs for value in each]),
        token_ranks=np.concatenate([entry.get("token_ranks") or [entry["rank"]] for entry in entries]),
        token_logits=np.asarray([_number(value) for each in token_logits for value in each]),
    )


def _number(value: float | None) -> float:
    return -math.inf if value is None else value
