"""Models of an audit, as texts name them: MODEL[:dtype[:quantization]][,name=value...] or a server's URL."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from vllm.config.quantization import ALIASES, QUANTIZATIONS
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError

REFERENCE = "reference"
"""A candidate of this name is the reference once more, in other company."""
EMBEDDED = "embedded"
"""The embedded small model's name."""

_DTYPES = {name: name for name in ("auto", "half", "float16", "bfloat16", "float", "float32")}
_DTYPES |= {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}
_FORMATS = {name for name in (*QUANTIZATIONS, *ALIASES) if name is not None}
# Steps of few requests and few tokens, in pieces, that find nothing in a cache.
_OTHER_COMPANY = {"max_num_seqs": 3, "max_num_batched_tokens": 48, "enable_prefix_caching": False}
_ADAPTER = "adapter"
_URLS = ("http://", "https://")
_FORM = "MODEL[:dtype[:quantization]][,name=value...]"


@dataclass(frozen=True)
class ModelSpec:
    """
    Attributes:
        name: as it was given.
        engine: fields of EngineArgs by name; of a server, `model` alone.
        adapter: folder of a LoRA adapter; None: there is none.
        url: of a server; None: the model is loaded here.
        is_reference: it is the reference in other company.
    """

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    url: str | None = None
    is_reference: bool = False

    @classmethod
    def parse(cls, text: str, reference: ModelSpec | None, common: dict[str, Any] | None = None) -> ModelSpec:
        """From its text. `reference` None: it is the reference; otherwise what the text leaves open is the reference's,
        if it names no model. `common`: fields of EngineArgs of all models. CliError: it names no model."""
        flag = "--reference" if reference is None else "--candidate"
        base, *options = text.split(",")
        given = [option.partition("=") for option in options]
        if "=" in base and not os.path.exists(base) and not base.startswith(_URLS):
            given, base = [base.partition("="), *given], ""
        if base.startswith(_URLS):
            return cls._of_url(flag, text, base, given)
        is_reference = base == REFERENCE and not given
        model, found = _base(flag, base, reference)
        engine = {**(common or {}), **model, **found}
        adapter = None if reference is None or model is not reference.engine else reference.adapter
        for name, has_value, value in given:
            if not has_value:
                raise CliError(f"{flag} {text}: {name!r} is no name=value; write {_FORM}")
            if name == _ADAPTER:
                adapter = value
            else:
                engine |= _engine_field(f"{flag} {text}", name, value)
        if is_reference and reference is not None and reference.url is not None:
            raise CliError(f"{flag} {text}: the company of a server's requests is not known here")
        if adapter is not None and not Path(adapter).is_dir():
            raise CliError(f"{flag} {text}: there is no adapter's folder {adapter}")
        if is_reference:
            engine |= _OTHER_COMPANY
        return cls(text, engine, adapter, None, is_reference)

    @classmethod
    def _of_url(cls, flag: str, text: str, url: str, given: list[tuple[str, str, str]]) -> ModelSpec:
        engine: dict[str, Any] = {}
        for name, _, value in given:
            if name != "model":
                raise CliError(f"{flag} {text}: a server takes model=NAME alone, not {name!r}")
            engine["model"] = value
        return cls(text, engine, None, url)

    @property
    def path(self) -> str | None:
        """The path that the weights are read from; None: the embedded model."""
        return self.engine.get("model")

    def stamp(self) -> list[Any]:
        """A stamp that tells whether the files of model and adapter are still the same: names, sizes in bytes and
        times."""
        found: list[Any] = []
        for path in (self.path, self.adapter):
            if path is not None and os.path.exists(path):
                root = Path(path).resolve()
                files = sorted(each for each in root.iterdir() if each.is_file()) if root.is_dir() else [root]
                found.append([[each.name, each.stat().st_size, each.stat().st_mtime_ns] for each in files])
        return found


def _base(flag: str, base: str, reference: ModelSpec | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's own fields, those of the reference where none is named, and dtype and quantization."""
    pieces = base.split(":")
    alone = {"dtype": pieces[0]} if pieces[0] in _DTYPES else {"quantization": pieces[0]}
    names_no_model = base in ("", REFERENCE) or (pieces[0] in {*_DTYPES, *_FORMATS} and not os.path.exists(pieces[0]))
    if names_no_model:
        if reference is None:
            raise CliError(f"--reference {base}: it names no model; write {_FORM}")
        if reference.url is not None:
            raise CliError(f"{flag} {base}: it names no model, and the reference is a server")
        if base in ("", REFERENCE):
            return reference.engine, {}
        found = alone | ({"quantization": pieces[1]} if len(pieces) > 1 else {})
        return reference.engine, _readable(flag, base, found)
    if os.path.exists(base):
        return {"model": base}, {}
    found = {}
    if len(pieces) > 2 and pieces[-2] in {*_DTYPES, ""} and pieces[-1] in _FORMATS:
        found = {"dtype": pieces[-2] or "auto", "quantization": pieces[-1]}
        pieces = pieces[:-2]
    elif len(pieces) > 1 and pieces[-1] in _DTYPES:
        found = {"dtype": pieces[-1]}
        pieces = pieces[:-1]
    model = ":".join(pieces)
    head = model
    while not os.path.exists(head) and ":" in head:
        head = head.rpartition(":")[0]
    if head != model and os.path.exists(head):
        known = f"dtypes: {', '.join(_DTYPES)}; quantizations: {', '.join(sorted(_FORMATS))}"
        raise CliError(f"{flag} {base}: {model[len(head) + 1 :]!r} is no dtype[:quantization]; {known}")
    return {"model": None if model == EMBEDDED and not os.path.exists(model) else model}, _readable(flag, base, found)


def _readable(flag: str, base: str, found: dict[str, Any]) -> dict[str, Any]:
    if "dtype" in found:
        found["dtype"] = _DTYPES[found["dtype"]]
    quantization = found.get("quantization")
    if quantization is not None and quantization not in _FORMATS:
        raise CliError(f"{flag} {base}: no quantization {quantization!r}; there is {', '.join(sorted(_FORMATS))}")
    return found


class _FieldParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:  # type: ignore[override]
        raise CliError(message)


def _engine_field(place: str, name: str, value: str) -> dict[str, Any]:
    """A field of EngineArgs from its flag's text."""
    name = name.replace("-", "_")
    known = {each.name for each in fields(EngineArgs)}
    if name not in known:
        raise CliError(f"{place}: {name!r} is no engine argument, nor {_ADAPTER}")
    if name == "dtype":
        return {"dtype": _DTYPES.get(value, value)}
    parser = _FieldParser(add_help=False)
    EngineArgs.add_cli_args(parser)
    try:
        parsed = parser.parse_args([f"--{name.replace('_', '-')}", value])
    except CliError:
        try:
            flag = f"--{name.replace('_', '-')}" if value.lower() in ("true", "1") else f"--no-{name.replace('_', '-')}"
            parsed = parser.parse_args([flag])
        except CliError as error:
            raise CliError(f"{place}: {error}") from None
    return {name: getattr(parsed, name)}
