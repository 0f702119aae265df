"""Whole texts that a server reads: the logprobs of a prompt's own tokens, and its likeliest ones where they come back.

Servers give them in several forms, and each is tried: vLLM's `prompt_logprobs` and OpenAI's `echo` of /v1/completions,
at the reference's token ids; `echo` of the text; /generate with `decoder_input_details` (text-generation-inference);
and, of a server that takes token ids and names tokens by them (llama.cpp), one token after each beginning of the text.
What a server has tokenised otherwise is an error of the row. None gives its whole vocabulary at every position.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm.auditing.other_servers import GROWTH, LEAST, OF_A_TEXT, TOKEN_ID, TOPS, next_tokens
from vllm.auditing.servers import AnyServer
from vllm.auditing.text_task import ReferenceRows, pieces_of
from vllm.exceptions import CliError
from vllm.scoring.batches import Progress
from vllm.scoring.files import Item
from vllm.scoring.scorers import Results, ServerScorer, failed
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.utils.server_client import ServerError

_PROBE = "The capital of France is"
_PART_OF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_PART = 256
_FIRST_BEHIND = 640
# An answer of another form.
_NO_LOGPROBS = (LookupError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class Token:
    """A prompt's token as a server has read it.

    Attributes:
        token_id, text: None: it is not named so.
        logprob: nats; None: it is not given, as of a first token.
        top_id, top_text, top_logprob: of the likeliest token in its place; None: they are not given.
        likeliest: logprobs of the likeliest ones by text; None: they are not given so.
    """

    token_id: int | None
    text: str | None
    logprob: float | None
    top_id: int | None = None
    top_text: str | None = None
    top_logprob: float | None = None
    likeliest: dict[str, float] | None = None


class Dialect(ABC):
    """A way to ask a server for the logprobs of a prompt.

    Attributes:
        takes_ids: the prompt is token ids, not a text.
        finds_by_text: logprobs are looked up by the tokens' texts, so that two tokens of one text are not told apart.
    """

    takes_ids = True
    finds_by_text = False

    def __init__(self, server: AnyServer) -> None:
        self._server = server

    @abstractmethod
    async def tokens(self, token_ids: list[int], text: str) -> list[Token]:
        """The prompt's tokens. ServerError: it is refused; LookupError, TypeError, ValueError: the answer has none."""


class _PromptLogprobs(Dialect):
    async def tokens(self, token_ids: list[int], text: str) -> list[Token]:
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        answer = await self._server.post("/v1/completions", body)
        found = []
        for token, entries in zip(token_ids, answer["choices"][0]["prompt_logprobs"], strict=True):
            if entries is None:
                found.append(Token(token, None, None))
                continue
            own, top = entries[str(token)], max(entries, key=lambda each: float(entries[each]["logprob"]))
            logprobs = _logprob(own["logprob"]), entries[top]["logprob"]
            found.append(Token(token, own.get("decoded_token"), logprobs[0], int(top), None, logprobs[1]))
        return found


class _Echo(Dialect):
    """The prompt is the text itself, or its tokens."""

    def __init__(self, server: AnyServer, takes_ids: bool) -> None:
        super().__init__(server)
        self.takes_ids = takes_ids

    async def tokens(self, token_ids: list[int], text: str) -> list[Token]:
        found, num_answered = await self.echoed(token_ids, text, 1)
        return found[: len(found) - num_answered]

    async def echoed(self, token_ids: list[int], text: str, top: int) -> tuple[list[Token], int]:
        """All tokens that the server names, and how many of them it has answered: none if it ends at once."""
        prompt = token_ids if self.takes_ids else text
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": top, "echo": True}
        answer = await self._server.post("/v1/completions", body)
        logprobs = answer["choices"][0]["logprobs"]
        columns = logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]
        found = [_classic(*each) for each in zip(*columns, strict=True)]
        if not found:
            raise LookupError("no tokens")
        return found, min(1, (answer.get("usage") or {}).get("completion_tokens", 1))

    async def is_in_place(self, token_ids: list[int], text: str) -> bool | None:
        """Whether the token of the answer comes last, and is the likeliest in its place; None: there is no such token,
        or the likeliest ones are not given."""
        found, num_answered = await self.echoed(token_ids, text, 1)
        logprob, top = found[-1].logprob, found[-1].top_logprob
        return None if not num_answered or logprob is None or top is None else logprob >= top


class _EchoBehind(_Echo):
    """Each place has the logprobs of the one behind it, as llama-cpp-python's do of models without a token that begins
    texts: a token is looked for among the likeliest of the place before it, more and more of them."""

    finds_by_text = True

    async def tokens(self, token_ids: list[int], text: str) -> list[Token]:
        top, found = _FIRST_BEHIND, list[Token]()
        while True:
            try:
                echoed, _ = await self.echoed(token_ids, text, top)
            except ServerError:
                if not found:
                    raise
                return found
            found = [Token(echoed[0].token_id, echoed[0].text, None)]
            for before, own in itertools.pairwise(echoed):
                logprob = _logprob((before.likeliest or {}).get(own.text or ""))
                found.append(replace(before, token_id=own.token_id, text=own.text, logprob=logprob))
            is_whole = all(each.logprob is not None or not each.likeliest for each in found)
            if is_whole or all(len(each.likeliest or ()) < top for each in echoed):
                return found
            top *= GROWTH


class _Prefill(Dialect):
    takes_ids = False

    async def tokens(self, token_ids: list[int], text: str) -> list[Token]:
        parameters = {"max_new_tokens": 1, "details": True, "decoder_input_details": True}
        answer = await self._server.post("/generate", {"inputs": text, "parameters": parameters})
        return [Token(each["id"], each["text"], _logprob(each["logprob"])) for each in answer["details"]["prefill"]]


class _Stepwise(Dialect):
    """A request a token."""

    def __init__(self, server: AnyServer, top: int) -> None:
        super().__init__(server)
        self._top = top

    async def tokens(self, token_ids: list[int], text: str) -> list[Token]:
        found = [Token(token_ids[0], None, None)]
        for place in range(1, len(token_ids)):
            read = (await next_tokens(self._server, token_ids[:place], token_ids[place], self._top)).by_id
            best = max(read, key=read.__getitem__)
            found.append(Token(token_ids[place], None, read.get(token_ids[place]), best, None, read[best]))
        return found


def _logprob(value: Any) -> float | None:
    """nats; None: it is not given, or NaN."""
    if value is None or math.isnan(value):
        return None
    return -math.inf if value <= LEAST else float(value)


def _classic(name: str, logprob: Any, top: dict[str, float] | None) -> Token:
    """A token of OpenAI's classic form."""
    best = max(top, key=top.__getitem__) if top else None
    ids = [
        int(each.removeprefix(TOKEN_ID)) if each is not None and each.startswith(TOKEN_ID) else None
        for each in (name, best)
    ]
    return Token(ids[0], name, _logprob(logprob), ids[1], best, top[best] if top and best is not None else None, top)


class Names:
    """The reference's tokens as texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, ...], str] = {}
        self._counts: Counter[str] | None = None

    def after(self, before: int | None, token: int) -> str:
        """The token's text behind another one, since some tokenizers drop a text's first space."""
        beginning = () if before is None else (before,)
        return self._decoded((*beginning, token)).removeprefix(self._decoded(beginning))

    def is_unique(self, text: str) -> bool:
        """Whether one token alone has this text, parts of characters left out."""
        if self._counts is None:
            anchor = self._tokenizer.encode("a", add_special_tokens=False)[-1]
            texts = (self.after(anchor, token) for token in range(self._tokenizer.vocab_size))
            self._counts = Counter(each.replace(_PART_OF_CHARACTER, "") for each in texts)
        return self._counts[text] == 1

    def _decoded(self, ids: tuple[int, ...]) -> str:
        if ids not in self._known:
            self._known[ids] = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return self._known[ids]


def own_tokens(found: Sequence[Token], token_ids: Sequence[int], names: Names) -> list[Token] | str:
    """The server's tokens in the places of the reference's, with a first one where it leaves out what begins a text; or
    where they differ, in words."""
    fault = _difference(found, token_ids, names)
    if fault is None:
        return list(found)
    if len(found) == len(token_ids) - 1 and _difference(found, token_ids[1:], names) is None:
        return [Token(token_ids[0], None, None), *found]
    if len(found) == len(token_ids) + 1 and _difference(found[1:], token_ids, names) is None:
        return f"the server puts a token {found[0].text or found[0].token_id!r} before texts, the reference does not"
    return fault


def _difference(found: Sequence[Token], token_ids: Sequence[int], names: Names) -> str | None:
    """The first token that is another one, in words; None: there is none."""
    for place, (own, token) in enumerate(zip(found, token_ids, strict=False)):
        name = names.after(token_ids[place - 1] if place else None, token)
        is_other = own.token_id is not None and own.token_id != token
        # A part of a character has no text, or one that says so; and some servers drop a space.
        texts = [each.strip() for each in (own.text or "", name)]
        can_compare = all(each and _PART_OF_CHARACTER not in each and not each.startswith(TOKEN_ID) for each in texts)
        if is_other or (can_compare and texts[0] != texts[1]):
            return f"the server has other tokens: {place} is {own.text or own.token_id!r}, of the reference {name!r}"
    if len(found) != len(token_ids):
        return f"the server has other tokens: {len(found)}, of the reference {len(token_ids)}"
    return None


def is_same_top(own: Token, before: int, token: int, top: int, names: Names) -> bool | None:
    """Whether the likeliest token is the reference's `top`, in the place of `token`; None: the server does not tell."""
    if own.top_id is not None:
        return own.top_id == top
    if own.top_logprob is None or own.logprob is None:
        return None
    if token == top or own.logprob == own.top_logprob:
        return token == top and own.logprob >= own.top_logprob
    text, name = own.top_text or "", names.after(before, top)
    return text == name if names.is_unique(text) and names.is_unique(name) else None


class ServedTextScorer(ServerScorer):
    """Rows have own_logprobs and same_top, lists of a number a position; null is what the server does not tell."""

    taken = ("own_logprobs", "same_top")

    def __init__(self, server: AnyServer, tokenizer: Tokenizer, chunk: int | None, reference: Path) -> None:
        """`reference`: its rows. CliError: the server gives no logprobs of prompts."""
        super().__init__(server)
        self._any, self._chunk, self._names = server, chunk, Names(tokenizer)
        self._bos = next(iter(tokenizer.encode("")), None)
        self._reference = ReferenceRows(reference)
        self._dialect = server.wait(self._find_dialect(tokenizer.encode(_PROBE)))
        if chunk is not None and not self._dialect.takes_ids:
            raise CliError(f"--chunk-tokens: {server.client.url} reads texts, not token ids")

    async def _find_dialect(self, probe: list[int]) -> Dialect:
        forms: list[Dialect] = [_PromptLogprobs(self._any), _Echo(self._any, True), _Echo(self._any, False)]
        for each in (*forms, _Prefill(self._any), *(_Stepwise(self._any, top) for top in TOPS)):
            try:
                found = await each.tokens(probe, _PROBE)
                if isinstance(each, _Echo):
                    is_in_place = await each.is_in_place(probe, _PROBE)
                    if is_in_place is None:
                        continue
                    if not is_in_place:
                        return _EchoBehind(self._any, each.takes_ids)
            except ServerError as error:
                if error.status is None or error.status in (401, 403):
                    raise
                continue
            except _NO_LOGPROBS:
                continue
            if any(token.logprob is not None for token in found[1:]):
                return each
        raise CliError(
            f"{self._any.client.url} gives no logprobs of prompts: neither by prompt_logprobs, nor by echo with "
            "logprobs, nor by decoder_input_details, nor of tokens by their ids; read --labels through it, or name its "
            "model's file or folder instead"
        )

    def score(
        self, batch: Sequence[Item], first_index: int, num_known: int, progress: Progress
    ) -> Iterator[dict[str, Any]]:
        """See Scorer."""
        works = []
        for index, item in list(enumerate(batch, first_index))[num_known:]:
            known = self._reference.at(index)
            works.append(self._compared(index, item, known, self._tops(len(known.get("own_logprobs", ())))))
        return self._server.in_order(works)

    async def result(self, item: Item) -> Results:
        raise NotImplementedError

    def _tops(self, count: int) -> list[int]:
        """The reference's likeliest tokens of the next `count` positions."""
        found: list[int] = []
        while len(found) < count:
            found += self._reference.table(min(_PART, count - len(found))).argmax(1).tolist()
        return found

    async def _compared(self, index: int, item: Item, known: dict[str, Any], tops: list[int]) -> dict[str, Any]:
        if "error" in known:
            return self._row(index, item, failed(f"the reference: {known['error']}", known["num_prompt_tokens"]))
        try:
            results = await self._results(item, known["token_ids"], tops)
        except ServerError as error:
            if error.status not in OF_A_TEXT:
                raise
            results = failed(error.message)
        except _NO_LOGPROBS:
            results = failed("the server's answer has no logprobs of the text")
        return self._row(index, item, results)

    async def _results(self, item: Item, token_ids: list[int], tops: list[int]) -> Results:
        logprobs: list[float | None] = []
        same: list[bool | None] = []
        for piece, start in pieces_of(token_ids, self._chunk, self._bos):
            found = own_tokens(await self._dialect.tokens(piece, item.text), piece, self._names)
            if isinstance(found, str):
                return failed(found, len(token_ids))
            for place in range(start + 1, len(piece)):
                own, top = found[place], tops[len(same)]
                is_known = not self._dialect.finds_by_text or self._names.is_unique(own.text or "")
                logprobs.append(own.logprob if is_known else None)
                same.append(is_same_top(own, piece[place - 1], piece[place], top, self._names) if is_known else None)
        return {"own_logprobs": logprobs, "same_top": same, "num_prompt_tokens": len(token_ids)}
