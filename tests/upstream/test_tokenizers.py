"""Tokenizers for callers are transformers' own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from byte_tokenizer import make_byte_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from vllm.tokenizers import TokenizerLike, cached_get_tokenizer, cached_tokenizer_from_config, get_tokenizer
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens, detokenize_incrementally
from vllm.tokenizers.hf import CachedHfTokenizer, get_cached_tokenizer
from vllm.tokenizers.registry import TokenizerRegistry, resolve_tokenizer_args
from vllm.transformers_utils.tokenizer import AnyTokenizer
from vllm.transformers_utils.tokenizer import get_tokenizer as older_get_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_byte_tokenizer(path)
    return path


def test_everything_can_be_changed(folder):
    tokenizer = get_tokenizer(str(folder))
    assert isinstance(tokenizer, PreTrainedTokenizerBase) and isinstance(tokenizer, TokenizerLike)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    tokenizer.padding_side = "left"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<hi>"
    assert get_tokenizer(folder).chat_template != tokenizer.chat_template
    assert older_get_tokenizer is get_tokenizer and AnyTokenizer is TokenizerLike


def test_a_cached_tokenizer_knows_its_greatest_id(folder):
    tokenizer = get_cached_tokenizer(get_tokenizer(str(folder)))
    assert tokenizer.convert_ids_to_tokens(tokenizer.max_token_id) is not None
    assert tokenizer.max_token_id == len(tokenizer) - 1


def test_ways_to_load_it(folder):
    ids = get_tokenizer(folder).encode("ab")
    assert get_tokenizer(folder, tokenizer_cls=PreTrainedTokenizerFast).encode("ab") == ids
    assert get_tokenizer(folder, truncation_side="left").truncation_side == "left"
    assert get_tokenizer(folder, tokenizer_cls=TokenizerLike, download_dir=str(folder)).encode("ab") == ids
    assert get_tokenizer(folder, tokenizer_cls=CachedHfTokenizer).encode("ab") == ids
    with pytest.raises(ValueError, match="tokenizer_mode must be one of auto, hf, slow.*, got 'mistral'"):
        get_tokenizer(folder, tokenizer_mode="mistral")
    with pytest.raises(ValueError):
        get_tokenizer(folder.parent)


def test_one_object_for_equal_arguments(folder):
    config = SimpleNamespace(
        tokenizer=str(folder),
        tokenizer_mode="auto",
        trust_remote_code=False,
        tokenizer_revision=None,
        skip_tokenizer_init=False,
    )
    first = cached_tokenizer_from_config(config)
    assert cached_tokenizer_from_config(config) is first
    assert cached_get_tokenizer(str(folder)) is cached_get_tokenizer(str(folder))
    config.skip_tokenizer_init = True
    assert cached_tokenizer_from_config(config) is None


class Own:
    """A tokenizer of a caller."""

    @classmethod
    def from_pretrained(cls, name, **kwargs):
        made = cls()
        made.name, made.options = name, kwargs
        return made


def test_a_class_of_a_caller(folder):
    TokenizerRegistry.register("own", __name__, "Own")
    made = get_tokenizer(folder, tokenizer_mode="own", revision="main")
    assert (made.name, made.options) == (str(folder), {"revision": "main", "trust_remote_code": False})
    assert TokenizerRegistry.load_tokenizer("own", "x").name == "x"
    with pytest.raises(ValueError, match="got 'others'"):
        TokenizerRegistry.load_tokenizer("others", "x")


def test_arguments_resolved_once_stay(folder):
    mode, name, args, kwargs = resolve_tokenizer_args(folder, tokenizer_mode="slow")
    assert (mode, kwargs) == ("hf", {"use_fast": False, "truncation_side": "left"})
    assert resolve_tokenizer_args(name, *args, tokenizer_mode=mode, **kwargs) == (mode, name, args, kwargs)
    assert resolve_tokenizer_args(folder, runner_type="pooling")[3]["truncation_side"] == "right"
    with pytest.raises(ValueError, match="use_fast"):
        resolve_tokenizer_args(folder, tokenizer_mode="slow", use_fast=True)


def test_texts_a_token_at_a_time(folder):
    tokenizer = get_tokenizer(folder)
    text = "A caf\u00e9, \u65e5\u672c."
    ids = tokenizer.encode(text, add_special_tokens=False)
    ends = [tokenizer.decode(ids[:split]) for split in range(1, len(ids))]
    assert any(end.endswith("\ufffd") for end in ends), "some prompts end inside a character"
    for split, end in enumerate(ends, 1):
        shown, tokens, offsets = "", None, [0, 0]
        for count in range(split + 1, len(ids) + 1):
            new, piece, *offsets = detokenize_incrementally(tokenizer, ids[:count], tokens, *offsets)
            tokens = new if tokens is None else [*tokens, *new]
            shown += piece
        assert end.rstrip("\ufffd") + shown == text
    assert convert_ids_list_to_tokens(tokenizer, ids[:3]) == ["A", " ", "c"]
