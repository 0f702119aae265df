"""Texts cut as transformers cuts them: what the tokenizer puts around a text counts and stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from byte_tokenizer import BOS, EOS, make_template_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, ByT5Tokenizer

from vllm.exceptions import VLLMValidationError
from vllm.tokenizers.tokenizer import SlowTokenizer, Tokenizer, get_tokenizer
from vllm.tokenizers.truncation import special_tokens_around, truncate_ids, truncate_text

# Templates around a text, and how many tokens they add.
TEMPLATES = {"$A": 0, "<s> $A": 1, "$A </s>": 1, "<s> $A </s>": 2, "<s> <s> $A </s>": 3}
PIECES = ("a", "b", " the", "stop", "<s>", "</s>", "\n", "é", "😀")


@pytest.fixture(scope="module", params=TEMPLATES)
def pair(request, tmp_path_factory) -> tuple[Tokenizer, Any, int]:
    """A tokenizer, transformers' own, and how many special tokens a text has."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_template_tokenizer(folder, request.param)
    return tokenizer, AutoTokenizer.from_pretrained(folder), TEMPLATES[request.param]


def transformers_ids(theirs: Any, text: str, limit: int, side: str, special: bool) -> list[int]:
    theirs.truncation_side = side
    return theirs(text, truncation=True, max_length=limit, add_special_tokens=special)["input_ids"]


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.sampled_from(PIECES), min_size=1, max_size=9).map("".join),
    room=st.integers(0, 12),
    side=st.sampled_from(("left", "right")),
    special=st.booleans(),
)
def test_equals_transformers(pair, text, room, side, special):
    """Also where the text itself spells special tokens: these are text."""
    tokenizer, theirs, num_special = pair
    limit = room + num_special if special else room + 1
    if limit == 0:
        return
    ids = tokenizer.encode(text, special)
    assert truncate_text(tokenizer, text, ids, limit, side, special) == transformers_ids(
        theirs, text, limit, side, special
    )


def test_less_than_the_special_tokens_is_an_error(pair):
    tokenizer, _, num_special = pair
    for limit in range(1, num_special):
        with pytest.raises(VLLMValidationError, match=f"no room for the {num_special} special tokens") as caught:
            truncate_text(tokenizer, "a b c d", tokenizer.encode("a b c d"), limit, "left")
        assert caught.value.parameter == "truncate_prompt_tokens" and caught.value.value == limit


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_tokenizer_in_python(side):
    theirs = ByT5Tokenizer()
    tokenizer = SlowTokenizer(theirs, None)
    for limit in range(1, 10):
        ids = truncate_text(tokenizer, "abcdefg", tokenizer.encode("abcdefg"), limit, side)
        assert ids == transformers_ids(theirs, "abcdefg", limit, side, True) and ids[-1] == theirs.eos_token_id


def test_what_stands_around_texts(pair):
    tokenizer, theirs, num_special = pair
    before, after = special_tokens_around(tokenizer)
    assert [*before, *after] == theirs("")["input_ids"] and len(before) + len(after) == num_special
    assert set(before) <= {BOS} and set(after) <= {EOS}


def test_a_vocabulary_without_the_probe(tmp_path: Path):
    vocab = {"<s>": 0, "</s>": 1, "x": 2, "y": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    backend.model = models.BPE({**vocab, "z": 4}, [])
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = get_tokenizer(tmp_path)
    assert tokenizer.encode("a") == [0, 1]
    assert special_tokens_around(tokenizer) == ([0], [1])


@pytest.mark.parametrize(
    ("side", "special", "expected"),
    [
        ("left", (), [7, 8, 9]),
        ("right", (), [5, 6, 7]),
        ("left", (5, 9), [5, 8, 9]),
        ("right", (5, 9), [5, 6, 9]),
        ("right", (5,), [5, 6, 7]),
    ],
)
def test_lists_of_ids(side, special, expected):
    ids = [5, 6, 7, 8, 9]
    assert truncate_ids(ids, 3, side, special) == expected
    assert truncate_ids(ids, 5, side, special) == truncate_ids(ids, 6, side, special) == ids
    assert truncate_ids(ids, 1, side, special) == [9 if side == "left" else 5]
