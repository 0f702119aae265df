"""bad_words as token ids."""

from __future__ import annotations

import pytest
from byte_tokenizer import VOCAB_SIZE, byte_id, byte_ids, make_byte_tokenizer

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import spell_bad_words


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def word(tokenizer):
    """Id of a vocabulary word; a leading space is written as the vocabulary does."""
    return lambda text: tokenizer.token_to_id(text)


def spell(words, tokenizer, vocab_size=VOCAB_SIZE):
    return spell_bad_words(words, tokenizer, vocab_size)


def test_a_word_with_a_token_of_its_own_after_a_space(tokenizer, word):
    assert spell(["the"], tokenizer) == [[word("the")], [word("Ġthe")]]
    assert spell(["stop"], tokenizer) == [[word("stop")], [word("Ġstop")]]


def test_a_space_that_is_a_token_of_its_own_adds_nothing(tokenizer, word):
    # " op" is a token more than "op".
    assert spell(["op"], tokenizer) == [[word("op")]]


def test_a_tokenizer_that_drops_the_space():
    class Trimming:
        def encode(self, text, add_special_tokens):
            return [ord(char) for char in text.strip()]

    assert spell(["ab"], Trimming()) == [[97, 98]]


def test_several_tokens(tokenizer, word):
    assert spell(["thex"], tokenizer) == [[word("the"), byte_id(ord("x"))], [word("Ġthe"), byte_id(ord("x"))]]
    assert spell(["xyz"], tokenizer) == [byte_ids("xyz")]


@pytest.mark.parametrize("text", [" the", "   the"])
def test_spaces_in_front_mean_nothing(tokenizer, text):
    assert spell([text], tokenizer) == spell(["the"], tokenizer)


def test_spaces_alone_are_taken_as_they_are(tokenizer):
    assert byte_ids(" ") in spell([" "], tokenizer)


def test_no_special_tokens_and_no_cutting_of_other_whitespace(tokenizer):
    assert spell(["\nx"], tokenizer) == [byte_ids("\nx")]


def test_words_come_in_order(tokenizer, word):
    assert spell(["op", "x", "op"], tokenizer) == [[word("op")], [byte_id(ord("x"))], [word("op")]]


def test_ids_beyond_the_model_cannot_be_generated_anyway(tokenizer, word):
    assert spell(["the", "x"], tokenizer, vocab_size=word("the")) == [[byte_id(ord("x"))]]


def test_without_a_tokenizer():
    with pytest.raises(VLLMValidationError, match="need a tokenizer") as caught:
        spell(["x"], None)
    assert caught.value.parameter == "bad_words"


def test_a_word_without_tokens():
    class Silent:
        def encode(self, text, add_special_tokens):
            return []

    with pytest.raises(VLLMValidationError, match="holds 'x', which has no token"):
        spell(["x"], Silent())
