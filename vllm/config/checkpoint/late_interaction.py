"""How models of late interaction (arXiv:2004.12832) read queries and documents, by the files of their folder: pylate's,
sentence-transformers' MultiVectorEncoder's and Stanford's. Nothing here needs torch."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vllm.config.checkpoint.sentence_files import Module, own_settings, read_modules, read_object, transformer_settings

Side = Literal["query", "document"]
SIDES: tuple[Side, ...] = ("query", "document")
# pylate writes these, and takes them where a value is missing.
_PYLATE: dict[str, Any] = {
    "query_prefix": "[Q] ",
    "document_prefix": "[D] ",
    "query_length": 32,
    "document_length": 180,
    "attend_to_expansion_tokens": False,
    "do_query_expansion": True,
    "skiplist_words": list(string.punctuation),
}
# Stanford's names of the same in artifact.metadata.
_STANFORD = {
    "query_prefix": ("query_token_id", "[unused0]"),
    "document_prefix": ("doc_token_id", "[unused1]"),
    "query_length": ("query_maxlen", 32),
    "document_length": ("doc_maxlen", 180),
    "attend_to_expansion_tokens": ("attend_to_mask_tokens", False),
}
_EXPANSION = frozenset({"strategy", "attend", "token", "length"})
_MEASURES = {None: False, "cosine": False, "maxsim": False, "meanmaxsim": True}


@dataclass(frozen=True)
class TextForm:
    """How one kind of text becomes tokens, and which of these are compared.

    Attributes:
        prompt: put before the text.
        strips: whether white space around both goes first.
        prefix: a token that is put after the first one; "": none.
        max_length: longest text, in tokens; longer ones lose their end. None: as the model reads.
        expand_to: shorter texts are filled up to so many tokens; 0: they are not.
        filler: the token that does it; None: the mask token, or the end of a text where there is none.
        attends: whether other tokens attend to those.
        skipped: tokens that are read and not compared.
        skips_unknown: whether such a word without a token of its own stands for the unknown token.
        kept: ids of the only tokens that are compared; empty: all.
    """

    prompt: str = ""
    strips: bool = False
    prefix: str = ""
    max_length: int | None = None
    expand_to: int = 0
    filler: str | None = None
    attends: bool = False
    skipped: tuple[str, ...] = ()
    skips_unknown: bool = False
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class LateInteraction:
    """
    Attributes:
        is_mean: whether a score is divided by the number of the query's tokens.
    """

    query: TextForm
    document: TextForm
    is_mean: bool = False

    @property
    def longest(self) -> int:
        """Longest text whose length is declared, in tokens; 0: none is."""
        forms = self.query, self.document
        return max(max(form.max_length or 0, form.expand_to) for form in forms)

    @property
    def hides_tokens(self) -> bool:
        """Whether queries have tokens that the others do not attend to."""
        return bool(self.query.expand_to) and not self.query.attends


def read_late_interaction(folder: Path, raw: Mapping[str, Any]) -> LateInteraction | None:
    """Read a folder's settings; `raw`: config.json's contents. None: it says nothing, and all texts are read as they
    are.

    Raises:
        ValueError: a setting that is not supported.
    """
    own, modules = own_settings(folder), read_modules(folder) or []
    kinds = [each.kind for each in modules]
    is_stanford = not modules and any("ColBERT" in name for name in raw.get("architectures") or ())
    found = None
    if "MultiVectorMask" in kinds:
        found = _of_modules(folder, own, modules[kinds.index("MultiVectorMask")])
    elif is_stanford and (metadata := read_object(folder / "artifact.metadata")) is not None:
        named = {name: _or(metadata.get(theirs), value) for name, (theirs, value) in _STANFORD.items()}
        words = _PYLATE["skiplist_words"] if _or(metadata.get("mask_punctuation"), True) else []
        found = _of_pylate({"skiplist_words": words, **named}, "")
    elif modules and "Pooling" not in kinds and (own.get("model_type") == "ColBERT" or own.keys() & _PYLATE.keys()):
        prompt = str((own.get("prompts") or {}).get(own.get("default_prompt_name")) or "")
        found = _of_pylate(own, prompt)
    if found is None:
        return None
    measure = own.get("similarity_fn_name")
    if str(measure).lower() not in map(str.lower, map(str, _MEASURES)):
        raise ValueError(f"{folder.name}: similarity_fn_name={measure!r} is not supported: it must be maxsim")
    _check_padding(folder, found)
    return replace(found, is_mean=str(measure).lower() == "meanmaxsim")


def _of_pylate(given: Mapping[str, Any], prompt: str) -> LateInteraction:
    values = {name: _or(given.get(name), value) for name, value in _PYLATE.items()}
    lengths = [_length(values, f"{side}_length") for side in SIDES]
    query = TextForm(
        prompt,
        True,
        values["query_prefix"],
        lengths[0],
        lengths[0] if values["do_query_expansion"] else 0,
        attends=bool(values["attend_to_expansion_tokens"]),
    )
    words = tuple(values["skiplist_words"])
    document = TextForm(prompt, True, values["document_prefix"], lengths[1], skipped=words, skips_unknown=True)
    return LateInteraction(query, document)


def _of_modules(folder: Path, own: Mapping[str, Any], module: Module) -> LateInteraction:
    """sentence-transformers': what surrounds a text is its prompt, and the tokenizer makes one token of it."""
    if older := own.keys() & _PYLATE.keys():
        raise ValueError(f"{folder.name}: {min(older)} is not supported beside the module MultiVectorMask")
    settings, where = transformer_settings(folder)
    mask = module.config or {}
    # Not that of default_prompt_name, which is for texts that are neither.
    prompts = {side: str((own.get("prompts") or {}).get(side) or "") for side in SIDES}
    words, tasks = tuple(mask.get("skiplist_words") or ()), mask.get("skiplist_tasks") or ["document"]
    skipped = {side: words if side in tasks else () for side in SIDES}
    query = TextForm(prompts["query"], max_length=settings.get("query_length"), skipped=skipped["query"])
    kept = tuple(mask.get("keep_only_token_ids") or ())
    length = settings.get("document_length")
    document = TextForm(prompts["document"], max_length=length, skipped=skipped["document"], kept=kept)
    expansion = settings.get("query_expansion")
    if expansion is None:
        return LateInteraction(query, document)
    if unknown := set(expansion) - _EXPANSION:
        raise ValueError(f"{where}: query_expansion with {min(unknown)} is not supported")
    strategy, length = expansion.get("strategy"), _length(expansion, "length")
    if strategy not in ("fixed", "min"):
        raise ValueError(f"{where}: query_expansion: strategy must be fixed or min, got {strategy!r}")
    longest = length if strategy == "fixed" else query.max_length and max(query.max_length, length)
    attends = bool(expansion.get("attend"))
    query = replace(query, max_length=longest, expand_to=length, filler=expansion.get("token"), attends=attends)
    return LateInteraction(query, document)


def _check_padding(folder: Path, found: LateInteraction) -> None:
    tokenizer = read_object(folder / "tokenizer_config.json") or {}
    for name in ("padding_side", "truncation_side"):
        if tokenizer.get(name) == "left":
            raise ValueError(
                f"{folder.name}/tokenizer_config.json: {name}='left' is not supported for late interaction"
            )


def _length(values: Mapping[str, Any], name: str) -> int:
    length = values.get(name)
    if isinstance(length, bool) or not isinstance(length, int) or length < 3:
        raise ValueError(f"late interaction: {name} must be an integer of at least 3, got {length!r}")
    return length


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
