"""Labels from servers of others, as far as their logprobs go.

Asked are, in this order: `logprob_token_ids` of /v1/completions (vLLM), which gives every label; `logprobs` of it
(llama.cpp, llama-cpp-python, vLLM, others), the k likeliest tokens, with a k that grows while a label is missing and
the server allows it; /generate with `top_n_tokens` (text-generation-inference). A label that is not among the tokens of
an answer is missing in the row's logprobs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.auditing.servers import AnyServer
from vllm.exceptions import CliError
from vllm.scoring.files import Item
from vllm.scoring.labels.records import Labels, finite
from vllm.scoring.labels.task import ServerLabelScorer
from vllm.scoring.labels.templates import Template
from vllm.scoring.scorers import Results, ServerScorer, failed
from vllm.utils.server_client import ServerError

_PROBE = "The capital of France is"
_OURS = "+logprobs"
TOKEN_ID = "token_id:"
# The likeliest tokens that a server is asked for at first, and how many it may allow, the most first.
_FIRST_TOP, GROWTH = 20, 32
TOPS = (1_000_000, 1000, 100, 20, 5)
_TGI_TOPS = (5, 1)
# vLLM writes it for minus infinity.
LEAST = -9999.0
OF_A_TEXT = (400, 413, 422, 500)

Prompt = str | list[int]
KnownLabels = tuple[list[str], list[list[int]]]
"""The labels' texts and tokens as the reference has read them; empty: it has not."""


@dataclass
class Tokens:
    """Tokens that an answer has, with their logprobs.

    Attributes:
        by_id, by_text: whichever the server names.
        are_likeliest: no token of the vocabulary is likelier than the least of these.
        num_prompt_tokens: None: the server does not say.
    """

    by_id: dict[int, float] = field(default_factory=dict)
    by_text: dict[str, float] = field(default_factory=dict)
    are_likeliest: bool = True
    num_prompt_tokens: int | None = None

    def add(self, text: str | None, token: int | None, logprob: float | None) -> None:
        value = -math.inf if logprob is None or logprob <= LEAST else float(logprob)
        if token is None and text is not None and text.startswith(TOKEN_ID):
            token = int(text.removeprefix(TOKEN_ID))
        if token is not None:
            self.by_id[token] = value
        elif text is not None:
            self.by_text[text] = value

    def find(self, token: int | None, text: str) -> float | None:
        """The logprob of a token; None: it is not there."""
        if token is not None and self.by_id:
            return self.by_id.get(token)
        return self.by_text.get(text)

    def rank(self, logprob: float) -> int | None:
        if not self.are_likeliest:
            return None
        return 1 + sum(each > logprob for values in (self.by_id, self.by_text) for each in values.values())

    def __len__(self) -> int:
        return len(self.by_id) + len(self.by_text)


class Dialect(ABC):
    """A way to ask a server for the tokens that may come next."""

    takes_ids = True

    def __init__(self, server: AnyServer, top: int) -> None:
        """`top`: the most tokens that it gives."""
        self._server, self.top = server, top

    @abstractmethod
    async def tokens(self, prompt: Prompt, ids: Sequence[int], top: int) -> Tokens:
        """The tokens `ids`, or the `top` likeliest, after a prompt. ServerError: the server refuses it."""


class _Completions(Dialect):
    async def tokens(self, prompt: Prompt, ids: Sequence[int], top: int) -> Tokens:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": top}
        return completion_tokens(await self._server.post("/v1/completions", body))


class _ChosenIds(Dialect):
    async def tokens(self, prompt: Prompt, ids: Sequence[int], top: int) -> Tokens:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1, "logprob_token_ids": list(ids)}
        found = completion_tokens(
            await self._server.post("/v1/completions", {**body, "return_tokens_as_token_ids": True})
        )
        found.are_likeliest = False
        return found


class _Generate(Dialect):
    takes_ids = False

    async def tokens(self, prompt: Prompt, ids: Sequence[int], top: int) -> Tokens:
        parameters = {"max_new_tokens": 1, "details": True, "decoder_input_details": False, "top_n_tokens": top}
        answer = await self._server.post("/generate", {"inputs": prompt, "parameters": parameters})
        return generate_tokens(answer)


async def next_tokens(server: AnyServer, prompt: list[int], token: int, top: int) -> Tokens:
    """The tokens after a prompt, at most `top` of them and at least until `token` is there, if that can be."""
    dialect, count = _Completions(server, top), min(_FIRST_TOP, top)
    found = await dialect.tokens(prompt, (), count)
    while token not in found.by_id and len(found) >= count < top:
        count = min(count * GROWTH, top)
        found = await dialect.tokens(prompt, (), count)
    return found


def completion_tokens(answer: Any) -> Tokens:
    """Tokens of an answer of /v1/completions: OpenAI's classic form, by text, or llama.cpp's, which has ids."""
    found = Tokens()
    try:
        logprobs = answer["choices"][0]["logprobs"]
        if "content" in logprobs:
            own = logprobs["content"][0]
            for each in (own, *own.get("top_logprobs", ())):
                found.add(each.get("token"), each.get("id"), each["logprob"])
        else:
            found.add(logprobs["tokens"][0], None, logprobs["token_logprobs"][0])
            for text, value in ((logprobs.get("top_logprobs") or [{}])[0] or {}).items():
                found.add(text, None, value)
        found.num_prompt_tokens = (answer.get("usage") or {}).get("prompt_tokens")
    except (TypeError, LookupError, AttributeError, ValueError):
        return Tokens()
    return found


def generate_tokens(answer: Any) -> Tokens:
    """Tokens of an answer of text-generation-inference's /generate."""
    found = Tokens()
    try:
        details = answer["details"]
        for each in (details["tokens"][0], *(details.get("top_tokens") or [[]])[0]):
            found.add(each.get("text"), each.get("id"), each["logprob"])
        if prefill := details.get("prefill"):
            found.num_prompt_tokens = len(prefill)
    except (TypeError, LookupError, AttributeError):
        return Tokens()
    return found


def label_scorer(
    server: AnyServer,
    template: Template | None,
    given: Sequence[str] | Sequence[int],
    name: str,
    known: KnownLabels,
) -> ServerScorer:
    """The scorer of a server's labels. CliError: the server gives no logprobs, or not those of such labels."""
    if server.wait(_is_ours(server, given)):
        return ServerLabelScorer(server, template, given, name)
    return OtherLabelScorer(server, template, given, name, known)


async def _is_ours(server: AnyServer, given: Sequence[str] | Sequence[int]) -> bool:
    version = await server.ask("/version")
    if isinstance(version, dict) and _OURS in str(version.get("version")):
        return True
    labels = {("labels" if isinstance(given[0], str) else "label_token_ids"): list(given)}
    answer = await server.ask(
        "/generative_scoring", {"model": server.model_name, "query": "", "items": ["a"], **labels}
    )
    try:
        return len(answer["data"][0]["labels"]) == len(given)
    except (TypeError, LookupError):
        return False


class OtherLabelScorer(ServerScorer):
    """Reads labels through a dialect; one of several tokens is read token by token, after the prompt's token ids."""

    taken = ("logprobs", "ranks", "label_mass")

    def __init__(
        self,
        server: AnyServer,
        template: Template | None,
        given: Sequence[str] | Sequence[int],
        name: str,
        known: KnownLabels,
    ) -> None:
        super().__init__(server)
        self._any = server
        names = [str(label) for label in given]
        as_ids = [[each] for each in given if isinstance(each, int)]
        own = as_ids or server.wait(self._label_ids(names))
        texts, known_ids = known
        if known_ids and own and known_ids != own:
            place = next(i for i, pair in enumerate(zip(known_ids, own, strict=True)) if pair[0] != pair[1])
            raise CliError(
                f"{server.client.url} has another vocabulary: {names[place]!r} is the tokens {own[place]}, of the "
                f"reference {known_ids[place]}"
            )
        if template is None and as_ids and not texts:
            raise CliError(
                f"{server.client.url}: the usual prompt names the labels, whose texts it does not tell: "
                "write --template"
            )
        self._ids: list[list[int]] = known_ids or own
        self._are_ids = bool(as_ids)
        self.labels = Labels(names, texts or names, self._ids)
        self._is_long = any(len(ids) > 1 for ids in self._ids)
        self._dialect = server.wait(self._find_dialect())
        self._render = partial((template or Template.default(self.labels.texts)).render, name)

    async def _label_ids(self, names: list[str]) -> list[list[int]]:
        """The labels' tokens; empty: the server does not tell."""
        found = [await self._tokenize(name, False) for name in names]
        return [] if any(ids is None for ids in found) else [ids or [] for ids in found]

    async def _tokenize(self, text: str, special: bool) -> list[int] | None:
        """Ids from /tokenize; vLLM's and llama.cpp's give the fields other names."""
        body = {"model": self.model_name, "prompt": text, "content": text}
        answer = await self._any.ask("/tokenize", {**body, "add_special_tokens": special, "add_special": special})
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        is_list = isinstance(tokens, list) and all(isinstance(each, int) for each in tokens)
        return tokens if is_list else None

    async def _find_dialect(self) -> Dialect:
        prompt: Prompt = _PROBE
        if self._is_long:
            prompt = await self._tokenize(_PROBE, True) or []
            if not prompt:
                raise CliError(
                    f"{self._any.client.url}: labels of several tokens need a server with /tokenize, as vLLM's and "
                    f"llama.cpp's: {self._long_label()}"
                )
        firsts = sorted({ids[0] for ids in self._ids})
        if firsts:
            # A server that does not know the field gives fewer tokens than two.
            asked = [*firsts, *([] if len(firsts) > 1 else [firsts[0] + 1 if firsts[0] == 0 else firsts[0] - 1])]
            found = await self._tried(_ChosenIds(self._any, 0), prompt, asked, 0)
            if found is not None and set(asked) <= found.by_id.keys():
                return _ChosenIds(self._any, 0)
        for top in TOPS:
            found = await self._tried(_Completions(self._any, top), prompt, (), top)
            if found is not None and len(found):
                if not found.by_id and self._are_ids:
                    raise CliError(
                        f"{self._any.client.url} names tokens by their texts: write --labels, not --label-ids"
                    )
                return _Completions(self._any, min(top, len(found)))
        for top in () if self._is_long else _TGI_TOPS:
            found = await self._tried(_Generate(self._any, top), prompt, (), top)
            if found is not None and len(found):
                return _Generate(self._any, top)
        several = f", or not after token ids, which {self._long_label()} needs" if self._is_long else ""
        raise CliError(
            f"{self._any.client.url}: no labels can be read: neither /v1/completions with logprobs nor /generate with "
            f"top_n_tokens gives any{several}; /v1/chat/completions makes another prompt, by its template; "
            "name the model's file or folder instead"
        )

    def _long_label(self) -> str:
        place = next(i for i, ids in enumerate(self._ids) if len(ids) > 1)
        return f"{self.labels.names[place]!r} has {len(self._ids[place])}"

    @staticmethod
    async def _tried(dialect: Dialect, prompt: Prompt, ids: Sequence[int], top: int) -> Tokens | None:
        try:
            return await dialect.tokens(prompt, ids, top)
        except ServerError as error:
            if error.status is None or error.status in (401, 403):
                raise
            return None

    async def result(self, item: Item) -> Results:
        text = self._render(item)
        prompt: Prompt = text
        if self._is_long:
            ids = await self._tokenize(text, True)
            if ids is None:
                return failed("the server does not tokenise it")
            prompt = ids
        read: dict[tuple[int, ...], Tokens] = {}
        values: dict[str, float | None] = {}
        ranks: dict[str, int | None] = {}
        for place, name in enumerate(self.labels.names):
            values[name], ranks[name] = await self._label(prompt, place, read)
        known = {name: value for name, value in values.items() if value is not None}
        is_whole = len(known) == len(values)
        return {
            "logprobs": {name: finite(value) for name, value in known.items()},
            "ranks": ranks,
            "label_mass": sum(math.exp(value) for value in known.values()) if is_whole else None,
            "num_prompt_tokens": read[()].num_prompt_tokens,
        }

    async def _label(
        self, prompt: Prompt, place: int, read: dict[tuple[int, ...], Tokens]
    ) -> tuple[float | None, int | None]:
        """The label's logprob, the sum of its tokens', and its first token's rank; None: it is missing. `read` has the
        tokens that were read after the prompt and some tokens of labels."""
        ids: Sequence[int | None] = self._ids[place] if self._ids else [None]
        total, rank = 0.0, None
        for index, token in enumerate(ids):
            before = tuple(each for each in ids[:index] if each is not None)
            value = await self._token(prompt, before, token, self.labels.names[place], read)
            if value is None:
                return None, None
            if not index:
                rank = read[before].rank(value)
            total += value
        return total, rank

    async def _token(
        self,
        prompt: Prompt,
        before: tuple[int, ...],
        token: int | None,
        text: str,
        read: dict[tuple[int, ...], Tokens],
    ) -> float | None:
        whole = [*prompt, *before] if isinstance(prompt, list) else prompt
        wanted = sorted(
            {ids[len(before)] for ids in self._ids if len(ids) > len(before) and tuple(ids[: len(before)]) == before}
        )
        top = min(_FIRST_TOP, self._dialect.top)
        if before not in read:
            read[before] = await self._dialect.tokens(whole, wanted, top)
        while (value := read[before].find(token, text)) is None and len(read[before]) < self._dialect.top:
            top = min(max(top, len(read[before])) * GROWTH, self._dialect.top)
            found = await self._dialect.tokens(whole, wanted, top)
            is_all = len(found) <= len(read[before])
            read[before] = found
            if is_all:
                return found.find(token, text)
        return value

    async def refused(self, item: Item, error: ServerError) -> Results:
        """See ServerScorer."""
        return failed(error.message) if error.status in OF_A_TEXT else await super().refused(item, error)
