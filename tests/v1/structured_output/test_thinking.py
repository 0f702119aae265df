"""Reasoning before a form: what a matcher allows at each token, and when its budget is spent."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from vllm.exceptions import VLLMValidationError
from vllm.params.structured import StructuredOutputsParams, Thinking
from vllm.v1.structured_output.grammar import grammar_text
from vllm.v1.structured_output.matcher import Grammars
from vllm.v1.structured_output.thinking import num_thinking_tokens

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer of bytes, with the end, one marker as a token and the other as a text."""
    made = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(ALPHABET)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    made.add_tokens([AddedToken("<t>", special=False), AddedToken("</t>", special=False)])
    return made


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer.to_str(), tokenizer.get_vocab_size(), [tokenizer.token_to_id("<eos>")])


class Answer:
    """An answer that grows under a form."""

    def __init__(self, tokenizer, grammars, **form) -> None:
        self._tokenizer = tokenizer
        self._matcher = grammars.start(grammar_text(StructuredOutputsParams(**form)))

    def allowed(self) -> set[str]:
        """The tokens that may come next, bytes as their characters."""
        size = self._tokenizer.get_vocab_size()
        mask = np.zeros(-(-size // 32), dtype=np.int32)
        assert self._matcher.fill_mask(mask) is None
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        assert not bits[size:].any()
        return {self._tokenizer.id_to_token(each) for each in np.flatnonzero(bits).tolist()}

    def forced(self) -> str:
        """The text that follows without a choice."""
        return self._tokenizer.decode(self._matcher.forced())

    def add(self, text: str) -> Answer:
        """Take a text's tokens, each of which must be allowed."""
        for token in self._tokenizer.encode(text, add_special_tokens=False).tokens:
            assert token in self.allowed(), token
            assert self._matcher.take([self._tokenizer.token_to_id(token)]) is None
        return self


EVERYTHING = {*ALPHABET, "<eos>", "<t>", "</t>"}
DIGIT = {"regex": "[0-9]"}


def test_the_form_begins_after_the_end(tokenizer, grammars):
    answer = Answer(tokenizer, grammars, **DIGIT, thinking=Thinking("</t>"))
    assert answer.allowed() == EVERYTHING - {"<eos>"}
    assert answer.add("some { text").allowed() == EVERYTHING - {"<eos>"}
    assert answer.add("</t>").allowed() == set("0123456789")
    assert answer.add("7").allowed() == {"<eos>"}


def test_an_answer_may_do_without_reasoning(tokenizer, grammars):
    answer = Answer(tokenizer, grammars, **DIGIT, thinking=Thinking("</t>", "<t>"))
    assert answer.allowed() == {*"0123456789", "<t>"}
    assert answer.add("7").allowed() == {"<eos>"}
    answer = Answer(tokenizer, grammars, **DIGIT, thinking=Thinking("</t>", "<t>")).add("<t>x")
    assert answer.allowed() == EVERYTHING - {"<eos>"}
    assert answer.add("</t>").allowed() == set("0123456789")


@pytest.mark.parametrize("end", ["</t>", "THE END"])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_spent_budget_forces_the_end(tokenizer, grammars, end, budget):
    answer = Answer(tokenizer, grammars, **DIGIT, thinking=Thinking(end, budget=budget)).add("x" * budget)
    for token in tokenizer.encode(end, add_special_tokens=False).tokens:
        assert answer.allowed() == {token}
        answer._matcher.take([tokenizer.token_to_id(token)])
    assert answer.allowed() == set("0123456789")


def test_an_end_of_several_tokens_that_has_begun_is_completed(tokenizer, grammars):
    answer = Answer(tokenizer, grammars, **DIGIT, thinking=Thinking("END", budget=3)).add("xxE")
    assert "y" in answer.allowed()
    assert answer.add("yE").allowed() == {"N"}
    assert answer.add("ND").allowed() == set("0123456789")


def test_a_budget_without_a_form(tokenizer, grammars):
    answer = Answer(tokenizer, grammars, thinking=Thinking("</t>", budget=2))
    assert answer.allowed() == EVERYTHING
    assert answer.add("ab").allowed() == {"</t>"}
    assert answer.add("</t>").allowed() == EVERYTHING
    assert answer.add("and more").allowed() == EVERYTHING


def test_further_ends(tokenizer, grammars):
    thinking = Thinking("</t>", also_ends=["END", "Here:"])
    for end in ("</t>", "END", "Here:"):
        answer = Answer(tokenizer, grammars, **DIGIT, thinking=thinking).add(f"Her: {end}")
        assert answer.allowed() == set("0123456789")
        pieces = [b"H", end.encode()[:2], end.encode()[2:], b"7"]
        assert num_thinking_tokens(thinking, pieces) == 3
    assert num_thinking_tokens(thinking, [b"EN"]) is None


def test_what_reasoning_before_a_form_does_not_hold(tokenizer, grammars):
    thinking = Thinking("</t>", excludes=["<t>", "some text"])
    answer = Answer(tokenizer, grammars, **DIGIT, thinking=thinking)
    assert answer.allowed() == EVERYTHING - {"<eos>", "<t>"}
    assert Answer(tokenizer, grammars, thinking=thinking).allowed() == EVERYTHING
    # Spelled out it is the same text.
    assert answer.add("<").allowed() == EVERYTHING - {"<eos>", "<t>"}
    assert answer.add("t").allowed() == EVERYTHING - {"<eos>", "<t>", ">"}
    assert answer.add("xsome tex").allowed() == EVERYTHING - {"<eos>", "<t>", "t"}
    assert answer.add("</t>").allowed() == set("0123456789")


def test_a_form_may_begin_like_the_reasoning(tokenizer, grammars):
    form = {"regex": "<tool>7|[0-9]", "thinking": Thinking("</t>", "<think>")}
    assert Answer(tokenizer, grammars, **form).add("<t").allowed() == {"h", "o"}
    assert Answer(tokenizer, grammars, **form).add("<tool>").allowed() == {"7"}
    answer = Answer(tokenizer, grammars, **form).add("<th")
    assert answer.allowed() == {"i"} and answer.forced() == "ink>"
    assert answer.add("ink>x</t>").allowed() == {*"0123456789", "<"}


def test_what_a_spent_budget_forces_is_not_drawn(tokenizer, grammars):
    form = {"regex": "abc[0-9]", "thinking": Thinking("THE END", budget=2)}
    answer = Answer(tokenizer, grammars, **form)
    assert answer.forced() == "" and answer.add("xx").forced() == "THE ENDabc"
    assert answer.add("THE ENDa").forced() == "bc"
    assert Answer(tokenizer, grammars, thinking=Thinking("THE END", budget=2)).add("xxT").forced() == "HE END"


def test_what_begins_like_reasoning_is_free_without_a_form(tokenizer, grammars):
    answer = Answer(tokenizer, grammars, thinking=Thinking("</t>", "Hm:", budget=1))
    assert answer.add("H").allowed() == EVERYTHING
    assert answer.add("e said so").allowed() == EVERYTHING
    assert Answer(tokenizer, grammars, thinking=Thinking("</t>", "Hm:", budget=1)).add("Hm:x").allowed() == {"</t>"}


def test_many_tokens_at_once(tokenizer, grammars):
    matcher = grammars.start(grammar_text(StructuredOutputsParams(**DIGIT, thinking=Thinking("</t>", "<t>"))))
    ids = tokenizer.encode("<t>abc</t>7", add_special_tokens=False).ids
    assert matcher.take(ids) is None and matcher.num_taken == len(ids)
    assert "does not allow" in matcher.take([tokenizer.token_to_id("x")])


@pytest.mark.parametrize(
    "value", [{"end": ""}, {"end": 7}, {"end": "x", "budget": -1}, {"begin": "x"}, "x", {"end": "x", "y": 1}]
)
def test_bad_values(value):
    with pytest.raises(VLLMValidationError, match="thinking"):
        StructuredOutputsParams(regex="a", thinking=value)


def test_as_a_mapping():
    form = StructuredOutputsParams(json={"type": "object"}, thinking={"end": "</t>", "budget": 7})
    assert form.thinking == Thinking("</t>", budget=7)
    header, grammar = grammar_text(form).split("\n", 1)
    fields = {"end": "</t>", "begin": "", "budget": 7, "also_ends": [], "excludes": []}
    assert json.loads(header.removeprefix("%thinking ")) == fields
    assert grammar == grammar_text(StructuredOutputsParams(json={"type": "object"}))
