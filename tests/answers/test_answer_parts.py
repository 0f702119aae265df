"""Which part of an answer each character belongs to, however the answer comes."""

from __future__ import annotations

import pytest

from vllm.answers.answer import AnswerFormat, AnswerParser

CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def parts(pieces: list[str], tools: str | None, reasoning: str | None) -> str:
    """A letter for each character; what is said before the end stays so."""
    parser = AnswerParser(AnswerFormat.of(None, tools, reasoning))
    known: list[str | None] = [None] * len("".join(pieces))

    def note() -> None:
        for place, before in enumerate(known):
            known[place] = parser.part_at(place)
            assert before in (None, known[place])

    for piece in pieces:
        parser.feed(piece)
        note()
    parser.finish()
    note()
    return "".join(each[0] if each else "?" for each in known)


@pytest.mark.parametrize(
    ("pieces", "letters"),
    [
        (("<think>Hm.\n</think>", "\n\nYes.", " \n" + CALL, "\n\nNo \n"), "rctc"),
        (("<think>Hm. </think>", " \n " + CALL, "\n"), "rtt"),
        (("<think></think>", "Yes"), "rc"),
        (("<think>Hm.", CALL, "\n"), "rtt"),
        (("Yes.", " " + CALL, "\n", CALL, "\n"), "ctttt"),
        (("<think>Hm. </think>", "\n\nYes. \n"), "rc"),
        ((CALL, "\n\n", "No \n"), "ttc"),
    ],
)
def test_parts_include_the_white_space_of_their_texts(pieces, letters):
    text = "".join(pieces)
    expected = "".join(letter * len(piece) for piece, letter in zip(pieces, letters, strict=True))
    assert parts([text], "hermes", "qwen3") == expected
    assert parts(list(text), "hermes", "qwen3") == expected
    for place in range(1, len(text)):
        assert parts([text[:place], text[place:]], "hermes", "qwen3") == expected
