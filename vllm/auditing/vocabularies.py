"""Whether two models have the same tokens."""

from __future__ import annotations

import re

from vllm.auditing.models import ModelSpec
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.tokenizers.tokenizer import Tokenizer, get_tokenizer

# Ids that only fill a vocabulary up are there in some files of a model, and not in others.
_FILLER = re.compile(r"[\[<|]*(?:pad|unused|reserved|extra|dummy)\w*?[\d_]*[\]>|]*", re.IGNORECASE)


def check_vocabularies(reference: ModelSpec, candidates: list[ModelSpec]) -> None:
    """A CliError names the first token that a candidate has otherwise, or lacks. Tokenizers alone are loaded."""
    known: dict[str | None, Tokenizer] = {}
    for spec in candidates:
        if spec.url is not None or reference.url is not None:
            continue
        for each in (reference, spec):
            if _source(each) not in known:
                known[_source(each)] = spec_tokenizer(each)
        fault = vocabulary_difference(known[_source(reference)], known[_source(spec)])
        if fault is not None:
            raise CliError(f"--candidate {spec.name} has another vocabulary than {reference.name}: {fault}")


def _source(spec: ModelSpec) -> str | None:
    source: str | None = spec.engine.get("tokenizer") or spec.path
    return source


def spec_tokenizer(spec: ModelSpec) -> Tokenizer:
    """The tokenizer that the model's engine will have. CliError: there is none."""
    try:
        config = EngineArgs(**spec.engine).create_engine_config().model_config
        return get_tokenizer(
            config.tokenizer, config.tokenizer_mode, config.trust_remote_code, config.tokenizer_revision
        )
    except (ValueError, OSError) as error:
        raise CliError(f"{spec.name}: {error}") from error


def vocabulary_difference(first: Tokenizer, second: Tokenizer) -> str | None:
    """The first token that one of them has otherwise, or lacks, in words; None: there is none."""
    if first is second:
        return None
    for index in range(max(first.vocab_size, second.vocab_size)):
        own, other = (each.id_to_token(index) for each in (first, second))
        if own == other:
            continue
        if own is None or other is None:
            extra = own if other is None else other
            if _FILLER.fullmatch(extra or ""):
                continue
            sizes = f"{first.vocab_size} and {second.vocab_size} tokens"
            return f"token {index}, {extra!r}, is in one of them alone ({sizes})"
        return f"token {index} is {other!r}, not {own!r}"
    return None
