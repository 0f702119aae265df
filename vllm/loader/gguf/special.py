"""Special tokens of a GGUF file's header, and those at which its model's texts end."""

from __future__ import annotations

from typing import Any

from vllm.loader.gguf.file import GGUFFile
from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)

_PREFIX, _ID = "tokenizer.ggml.", "_token_id"
# Kinds of tokens: of control, and defined by users.
_SPECIAL = (3, 4)
# Ends of turns, which headers often leave out: by these names llama.cpp knows them, too.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|eom_id|>", "<|eot|>", "<EOT>"),
    *("<|end_of_turn|>", "<|return|>", "<|call|>"),
)

_SAMPLING = "general.sampling."
_SAMPLED = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"
}  # fmt: skip
# Keys that say something only beside others.
# By general.basename, what the card of a model recommends whose file says nothing: at temperature 1 the answers of so
# small a model make no sense.
_CARDS = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}
_UNUSED = {"mirostat_tau", "mirostat_eta", "penalty_last_n", "sequence", "xtc_threshold"}


def checked_tokens(file: GGUFFile) -> dict[str, Any]:
    """The header's metadata, without the numbers of special tokens that the vocabulary does not have, which a warning
    names.

    Raises:
        ValueError: one is no number.
    """
    meta = dict(file.metadata)
    tokens = meta.get(f"{_PREFIX}tokens")
    if tokens is None:
        return meta
    for key in [key for key in meta if key.startswith(_PREFIX) and key.endswith(_ID)]:
        value = meta[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{file.path.name}: {key} must be the number of a token, got {value!r}")
        if not 0 <= value < len(tokens):
            text = f"{file.path.name}: {key}={value} is none of its {len(tokens)} tokens and is ignored"
            warn_once(logger, text)
            del meta[key]
    return meta


def check_lengths(meta: dict[str, Any]) -> None:
    """ValueError: scores or types are not as many as tokens."""
    tokens = meta[f"{_PREFIX}tokens"]
    for name in ("scores", "token_type"):
        values = meta.get(_PREFIX + name)
        if values is not None and (not isinstance(values, list) or len(values) != len(tokens)):
            found = len(values) if isinstance(values, list) else repr(values)
            raise ValueError(f"{_PREFIX}{name} must have a value for each of {len(tokens)} tokens, got {found}")


def special_ids(file: GGUFFile) -> dict[str, Any]:
    """The known ones of bos_token_id, pad_token_id and eos_token_id (a list if turns and texts end differently)."""
    meta = checked_tokens(file)
    ends = [meta.get(f"{_PREFIX}{name}{_ID}") for name in ("eos", "eot", "eom")]
    eos_ids = list(dict.fromkeys([value for value in ends if value is not None] + _ends_of_turns(meta)))
    ids = {
        "bos_token_id": meta.get(f"{_PREFIX}bos{_ID}"),
        "pad_token_id": meta.get(f"{_PREFIX}padding{_ID}"),
        "eos_token_id": (eos_ids if len(eos_ids) > 1 else eos_ids[0]) if eos_ids else None,
    }
    return {name: value for name, value in ids.items() if value is not None}


def sampling(file: GGUFFile) -> dict[str, Any]:
    """How the model's publisher samples, in the names of generation_config.json; a warning names what has none. A model
    that chats and says nothing is sampled as its card says."""
    given = {key.removeprefix(_SAMPLING): value for key, value in file.metadata.items() if key.startswith(_SAMPLING)}
    if left := sorted(f"{_SAMPLING}{name}" for name in given.keys() - _SAMPLED.keys() - _UNUSED if given[name]):
        warn_once(logger, f"{file.path.name}: {', '.join(left)} are not applied: there is no such sampling here")
    if given or "tokenizer.chat_template" not in file.metadata:
        return {field: given[name] for name, field in _SAMPLED.items() if name in given}
    return dict(_CARDS.get(str(file.metadata.get("general.basename", "")).lower(), {}))


def _ends_of_turns(meta: dict[str, Any]) -> list[int]:
    tokens, kinds = meta.get(f"{_PREFIX}tokens") or [], meta.get(f"{_PREFIX}token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        return []
    special = {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in _SPECIAL}
    ends = [name for name in _ENDS if name in special]
    # gpt-oss ends its messages so, of which the last one ends with <|return|>.
    return [special[name] for name in ends if name != "<|end|>" or "<|return|>" not in ends]
