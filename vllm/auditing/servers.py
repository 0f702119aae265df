"""Servers that an audit asks: of this package, or any other with OpenAI's interface."""

from __future__ import annotations

import argparse
import hashlib
import json
from typing import Any

from vllm.exceptions import CliError
from vllm.scoring.server import Server
from vllm.utils.server_client import ServerError, served_model

_PROBE = "The three states of water are"
_PROBE_TOKENS = 12
# Another precision of a model moves the third digit of a logprob.
_DIGITS = 4
_SAID = ("choices", "data", "results", "generated_text", "details")
_ABSENT = (404, 405)


class AnyServer(Server):
    """A server, whoever wrote it. `max_model_len` is 0 where it does not say."""

    async def describe(self, name: str | None) -> dict[str, Any]:
        """Its description of the model; text-generation-inference may have /info alone."""
        try:
            return await served_model(self.client, name)
        except ServerError as error:
            if error.status not in _ABSENT:
                raise
        info = await self.ask("/info")
        if not isinstance(info, dict) or "model_id" not in info:
            raise CliError(f"{self.client.url}: neither /v1/models nor /info names a model")
        return {"id": info["model_id"], "max_model_len": info.get("max_total_tokens")}

    def deciding(self) -> dict[str, Any]:
        """Only the model's name: the fingerprint is part of the path of the readings."""
        return {"model": self.model_name}

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a GET, or to a POST of `body`; None: the server refuses it."""
        try:
            return await (self.client.get(path) if body is None else self.client.post(path, body))
        except ServerError as error:
            if error.status is None or error.may_pass:
                raise
            return None

    async def fingerprint(self) -> str:
        """A hash of what the server says of itself and of its model, and of its answer to one request."""
        known = {name: self.card.get(name) for name in ("id", "root", "parent", "max_model_len", "meta")}
        made_from = [known, await self.ask("/version"), await self._said()]
        return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]

    async def _said(self) -> Any:
        model = {"model": self.model_name}
        greedy = {**model, "prompt": _PROBE, "max_tokens": _PROBE_TOKENS, "temperature": 0}
        parameters = {"max_new_tokens": _PROBE_TOKENS, "details": True}
        for path, body in (
            ("/v1/completions", {**greedy, "logprobs": 1}),
            ("/v1/completions", greedy),
            ("/generate", {"inputs": _PROBE, "parameters": parameters}),
            ("/v1/embeddings", {**model, "input": _PROBE}),
            ("/rerank", {**model, "query": _PROBE, "documents": [_PROBE, "ice"]}),
        ):
            answer = await self.ask(path, body)
            if isinstance(answer, dict):
                return _rounded({name: answer.get(name) for name in _SAID})
        return None


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, _DIGITS) if isinstance(value, float) else value


def fingerprint(url: str, model: str | None, api_key: str | None, timeout: float | None) -> str:
    """A text that tells whether a server still has the model that it had. CliError: there is no server, or no such
    model."""
    args = argparse.Namespace(url=url, model=model, api_key=api_key, timeout=timeout, concurrency=None)
    with AnyServer(args) as server:
        return server.wait(server.fingerprint())
