"""Text to token ids and back, over the tokenizers library; transformers is imported only when needed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from vllm.config.checkpoint.hub import download
from vllm.exceptions import shown
from vllm.tokenizers.bpe_files import read_tokenizer
from vllm.tokenizers.own_classes import is_known as is_own_class
from vllm.tokenizers.own_classes import load as load_own_class
from vllm.tokenizers.text_streams import ByteStream, RedecodingStream, TokenStream

_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"


@dataclass(frozen=True)
class _Source:
    """The arguments with which transformers can load the same tokenizer."""

    path: str
    use_fast: bool = True
    trust_remote_code: bool = False
    revision: str | None = None

    def load_hf(self) -> Any:
        from transformers import AutoTokenizer

        options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code, "revision": self.revision}
        path = Path(self.path)
        if not self.use_fast:
            options["use_fast"] = False
        if path.suffix == ".gguf" and path.is_file():
            path, options["gguf_file"] = path.parent, path.name
        try:
            if (config := self._small_config()) is not None:
                options["config"] = config
            tokenizer = AutoTokenizer.from_pretrained(str(path), **options)
            tokenizer.chat_template = _checked_template(_processors_template(path) or tokenizer.chat_template)
            return tokenizer
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ValueError(f"no tokenizer could be loaded from {path.name}: {error}") from error

    def _small_config(self) -> Any:
        """The part of config.json that selects the tokenizer's class, if tokenizer_config.json names a class of
        transformers; else None. The model's config class would import torch's compiler, which takes a second."""
        from transformers import PreTrainedConfig

        model, tokenizer = (_read_object(Path(self.path), f"{name}config.json") for name in ("", "tokenizer_"))
        is_named = model.get("model_type") and tokenizer.get("tokenizer_class")
        if not is_named or "auto_map" in {**model, **tokenizer}:
            return None
        known: dict[str, Any] = {"name_or_path": self.path}
        known |= {name: model[name] for name in ("model_type", "model_name", "tokenizer_class") if name in model}
        return PreTrainedConfig(**known)


class Tokenizer:
    """A tokenizer with the settings of its folder; results equal those of transformers' AutoTokenizer."""

    is_fast = True

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str], source: _Source) -> None:
        """Switches the backend's truncation and padding off. `special_tokens`: texts of bos_token, eos_token ..."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._special_tokens = special_tokens
        self._source = source

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; the text of a special token becomes its id."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of each text, computed in parallel."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]] | None]:
        """Ids of a text, and the characters of each, begin and end; None: the tokenizer does not tell."""
        encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        return encoding.ids, encoding.offsets

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which the texts of special tokens are texts like any other; no special tokens are added."""
        return self._plain_backend.encode(text, add_special_tokens=False).ids

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def special_texts(self) -> re.Pattern[str] | None:
        """Matches the texts that `encode` reads as special tokens; None: there are none."""
        texts = [self.id_to_token(token_id) or "" for token_id in self.all_special_ids]
        longest_first = sorted(filter(None, texts), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of a sequence of ids; incomplete characters become U+FFFD. `spaces_between_special_tokens` False removes
        the space that some decoders (WordPiece's, those in Python) put between two consecutive special tokens."""
        unspaced = self._unspaced_ids(skip_special_tokens, spaces_between_special_tokens)
        if not unspaced:
            return self._decode(ids, skip_special_tokens)
        runs: list[list[int]] = []
        before: int | None = None
        for token_id in ids:
            if before is None or (before in unspaced and token_id in unspaced):
                runs.append([])
            runs[-1].append(token_id)
            before = token_id
        return "".join(self._decode(run, False) for run in runs)

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """Text of each sequence of ids."""
        return self.backend.decode_batch(sequences, skip_special_tokens=skip_special_tokens)

    def decode_tokens(self, ids: Iterable[int] | np.ndarray) -> list[str]:
        """Text of each id by itself, with its leading space; special tokens as text, incomplete characters as U+FFFD,
        ids without a token as an empty string."""
        texts: list[str] = []
        known = self._token_texts
        for token_id in ids.tolist() if isinstance(ids, np.ndarray) else ids:
            text = known.get(token_id)
            if text is None:
                text = known[token_id] = self.token_bytes(token_id).decode("utf-8", errors="replace")
            texts.append(text)
        return texts

    def decode_stream(
        self,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> TokenStream:
        """Incremental decoding of a continuation: a leading space is kept, and a character that `prompt_ids` leave
        unfinished begins it. The other arguments are those of `decode`."""
        skipped = frozenset(self.all_special_ids) if skip_special_tokens else frozenset()
        if self._spelling == "other":
            unspaced = self._unspaced_ids(skip_special_tokens, spaces_between_special_tokens)
            decode = partial(self.decode, skip_special_tokens=False)
            return RedecodingStream(decode, skipped, unspaced, prompt_ids)
        return ByteStream(self.token_bytes, skipped, prompt_ids)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id (a byte-level space is U+0120); None without a token."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary spelling, or None."""
        return self.backend.token_to_id(token)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]:
        """`id_to_token` of each id."""
        return [self.id_to_token(int(token_id)) for token_id in ids]

    def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int | None]:
        """`token_to_id` of each token."""
        return [self.token_to_id(token) for token in tokens]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id adds to a text, possibly part of a character; empty for an id without a token."""
        known = self._known_bytes.get(token_id)
        if known is None:
            known = self._known_bytes[int(token_id)] = self._spell(int(token_id))
        return known

    def _spell(self, token_id: int) -> bytes:
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if self._spelling == "other":
            return self.decode([token_id], skip_special_tokens=False).encode()
        if self._spelling == "byte-level":
            byte_of = _byte_of_char()
            known = [byte_of.get(char) for char in token]
            return token.encode() if None in known else bytes(known)  # type: ignore[arg-type]
        match = _BYTE_TOKEN.fullmatch(token)
        if match is not None:
            return bytes([int(match[1], 16)])
        return token.replace(_SENTENCEPIECE_SPACE, " ").encode()

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_ids.get("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_ids.get("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_ids.get("pad_token")

    @cached_property
    def unk_token_id(self) -> int | None:
        """The token for what the vocabulary cannot spell; many tokenizers have none."""
        text = self._special_tokens.get("unk_token") or getattr(self.backend.model, "unk_token", None)
        return None if text is None else self.token_to_id(text)

    @cached_property
    def all_special_ids(self) -> list[int]:
        """Ids that `skip_special_tokens` leaves out, ascending."""
        added = self.backend.get_added_tokens_decoder()
        return sorted(token_id for token_id, token in added.items() if token.special)

    @property
    def chat_template(self) -> str | None:
        """The chat template, if any (imports transformers)."""
        return self.hf_tokenizer.chat_template

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> Any:
        """transformers' method of this name (imports transformers); ValueError without a chat template."""
        return self.hf_tokenizer.apply_chat_template(list(messages), **kwargs)

    @cached_property
    def hf_tokenizer(self) -> Any:
        """The tokenizer as transformers has it."""
        return self._source.load_hf()

    def __len__(self) -> int:
        return self.vocab_size

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def _unspaced_ids(self, skip_special_tokens: bool, spaces_between_special_tokens: bool) -> frozenset[int]:
        """The ids between which a decoder may put a space that has to be removed."""
        if skip_special_tokens or spaces_between_special_tokens or self._spelling != "other":
            return frozenset()
        return frozenset(self.all_special_ids)

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        ids = {name: self.token_to_id(text) for name, text in self._special_tokens.items()}
        return {name: token_id for name, token_id in ids.items() if token_id is not None}

    @cached_property
    def _token_texts(self) -> dict[int, str]:
        return {}

    @cached_property
    def _known_bytes(self) -> dict[int, bytes]:
        return {}

    @cached_property
    def _spelling(self) -> str:
        """How the vocabulary spells bytes: "byte-level", "sentencepiece", or "other"."""
        decoder = self.backend.decoder
        kinds = str(decoder.__getstate__()) if decoder is not None else ""
        if '"ByteLevel"' in kinds:
            return "byte-level"
        return "sentencepiece" if '"ByteFallback"' in kinds or '"Metaspace"' in kinds else "other"


class SlowTokenizer(Tokenizer):
    """A tokenizer that only transformers has, in Python."""

    is_fast = False

    def __init__(self, hf_tokenizer: Any, source: _Source) -> None:
        self.hf_tokenizer = hf_tokenizer
        self._special_tokens = _hf_special_tokens(hf_tokenizer)
        self._source = source

    @cached_property
    def unk_token_id(self) -> int | None:
        return self._special_ids.get("unk_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], None]:
        return self.encode(text, add_special_tokens), None

    def encode_plain(self, text: str) -> list[int]:
        return self.hf_tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def id_to_token(self, token_id: int) -> str | None:
        return self.hf_tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < len(self) else None

    def token_to_id(self, token: str) -> int | None:
        return self._vocab.get(token)

    @cached_property
    def vocab_size(self) -> int:
        return len(self.hf_tokenizer)

    @cached_property
    def all_special_ids(self) -> list[int]:
        return sorted(self.hf_tokenizer.all_special_ids)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.hf_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def _vocab(self) -> dict[str, int]:
        return self.hf_tokenizer.get_vocab()

    @cached_property
    def _spelling(self) -> str:
        return "other"  # only its own decode tells a token's text


def _processors_template(folder: Path) -> Any:
    """The chat template beside the processor of a model that reads pictures, whose word goes before the tokenizer's."""
    has_processor = any((folder / f"{name}processor_config.json").is_file() for name in ("", "pre"))
    if not has_processor and (folder / "chat_template.jinja").is_file():
        return None
    files = (_read_object(folder, name) for name in ("processor_config.json", "chat_template.json"))
    return next(filter(None, (file.get("chat_template") for file in files)), None)


def _checked_template(template: Any) -> Any:
    """
    Raises:
        ValueError: it is neither a text nor texts by their names.
    """
    texts = template.values() if isinstance(template, dict) else () if template is None else (template,)
    if not all(isinstance(each, str) for each in texts):
        raise ValueError(f"chat_template must be a text, or texts by their names, got {shown(template)}")
    return template


class OwnClassTokenizer(Tokenizer):
    """A tokenizer whose class comes with its checkpoint as code, which is not run."""

    def __init__(self, folder: Path, settings: dict[str, Any], source: _Source) -> None:
        is_first_glm = "chatglm2" in str(_read_object(folder, "config.json").get("_name_or_path", ""))
        backend, named = load_own_class(folder, settings, is_first_glm)
        super().__init__(backend, named, source)
        self._template = _checked_template(settings.get("chat_template"))

    @cached_property
    def hf_tokenizer(self) -> Any:
        """The tokenizer as transformers has it."""
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(tokenizer_object=self.backend, **self._special_tokens)
        tokenizer.chat_template = self._template
        tokenizer.name_or_path = self._source.path
        return tokenizer


def get_tokenizer(
    path: str | Path, tokenizer_mode: str = "auto", trust_remote_code: bool = False, revision: str | None = None
) -> Tokenizer:
    """Load a tokenizer.

    Args:
        path: a folder, a .gguf file or a hub name.
        tokenizer_mode: "auto", or "slow" for the Python implementation where transformers has one.
        revision: branch, tag or commit of a hub name.

    Raises:
        FileNotFoundError: a hub name that cannot be downloaded.
        ValueError: no usable tokenizer, or another tokenizer_mode.
    """
    if tokenizer_mode not in ("auto", "slow"):
        raise ValueError(f"tokenizer_mode must be one of auto, slow, got {tokenizer_mode!r}")
    folder = Path(path).expanduser()
    if not folder.exists():
        folder = download(str(path), revision, weights=False)
    source = _Source(str(folder), tokenizer_mode == "auto", trust_remote_code, revision)
    file = folder / "tokenizer.json"
    if tokenizer_mode == "auto" and not file.is_file():
        settings = _read_object(folder, "tokenizer_config.json")
        if is_own_class(folder, settings):
            return OwnClassTokenizer(folder, settings, source)
    if tokenizer_mode == "slow" or not file.is_file():
        return _wrapped(source.load_hf(), source)
    backend = read_tokenizer(folder)
    settings = {**_read_object(folder, "special_tokens_map.json"), **_read_object(folder, "tokenizer_config.json")}
    _add_missing_tokens(backend, settings)
    backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
    named = {name: text for name in _SPECIAL_KEYS if (text := _content(settings.get(name))) is not None}
    return Tokenizer(backend, named, source)


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """A tokenizer of transformers' as one of ours. Its truncation and padding are switched off."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    return _wrapped(tokenizer, _Source(str(tokenizer.name_or_path)))


def _wrapped(hf_tokenizer: Any, source: _Source) -> Tokenizer:
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        return SlowTokenizer(hf_tokenizer, source)
    tokenizer = Tokenizer(backend, _hf_special_tokens(hf_tokenizer), source)
    tokenizer.hf_tokenizer = hf_tokenizer
    return tokenizer


def _hf_special_tokens(hf_tokenizer: Any) -> dict[str, str]:
    texts = {name: getattr(hf_tokenizer, name, None) for name in _SPECIAL_KEYS}
    return {name: str(text) for name, text in texts.items() if text is not None}


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    """The file's JSON object; empty without the file."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder.name}/{name} is not a JSON object: {error}") from None


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _add_missing_tokens(backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Add the tokens that the settings name and tokenizer.json lacks. As in transformers, only tokenizer.json decides
    which tokens surround a text (add_bos_token has no effect)."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    decoder = settings.get("added_tokens_decoder") or {}
    wanted: list[Any] = [decoder[key] for key in sorted(decoder, key=int)]
    wanted += [settings.get(name) for name in _SPECIAL_KEYS]
    for name in _SPECIAL_LISTS:
        value = settings.get(name) or []
        wanted += value.values() if isinstance(value, dict) else value
    for token in wanted:
        text = _content(token)
        if text is None or text in present:
            continue
        present.add(text)
        given = token if isinstance(token, dict) else {}
        special = given.get("special", True)
        flags = {name: given.get(name, False) for name in ("single_word", "lstrip", "rstrip")}
        normalized = given.get("normalized", not special)
        added = tokenizers.AddedToken(text, normalized=normalized, special=special, **flags)
        (backend.add_special_tokens if special else backend.add_tokens)([added])


@cache
def _byte_of_char() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary: printable Latin-1 is itself, the other bytes are the
    characters from U+0100 on, in order."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
