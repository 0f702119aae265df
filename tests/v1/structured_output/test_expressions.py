r"""`\d`, `\w`, `\s` and their complements in all that has regular expressions, as Python's `re.ASCII` reads them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from grammar_walks import accepts, byte_grammars
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.grammar import grammar_text
from vllm.v1.structured_output.matcher import Grammars

pytest.importorskip("llguidance")

# ASCII, and what Unicode counts as digits, letters, marks and white space: of legacy computing, wide, combining.
WIDE = "é߀٣\uff15\U0001d7d7\U0001fbf1ʰǅ\u0436漢\u2167\u0301‿\u017f\u212a\x85\xa0\u2003\u2028\u3000\ufeff"
CHARACTERS = [*map(chr, range(9, 14)), *map(chr, range(32, 127)), *WIDE]

CLASSES = [
    *(r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"[\d.]", r"[^\d]", r"[^\w]", r"[\W_]", r"[^\W_]", r"[\s\S]"),
    *(r"[\w-]", r"[-\w]", r"[\]\d]", r"[]\d]", r"[^]\d]", r"[\[\d]", r"[a-f\d]", r"[\x2d\d]", r"[\\d]", r"[*-/\d]"),
    *(r"(?s)\d", r"(?i)\w", r"(?i:\w)", r"(?i)[\w.]", r"(?i)[^\W_]", "(?x) \\d # \\w", r"(?x)[\d .]", r"(\d|\s)"),
    *(r"[^\s\d]", r"\x64"),
]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return byte_grammars(tmp_path_factory.mktemp("bytes"))


def allowed(grammars: Grammars, texts: list[str], **form: Any) -> list[str]:
    """Which of the texts have the form."""
    grammar = grammar_text(StructuredOutputsParams(**form))
    return [text for text in texts if accepts(grammars.start(grammar), text)]


def matching(pattern: str) -> list[str]:
    if pattern.startswith("(?x)["):
        pattern = pattern.replace(" ", "")  # Rust leaves it out of classes, too
    return [each for each in CHARACTERS if re.fullmatch(pattern, each, re.ASCII)]


@pytest.mark.parametrize("pattern", CLASSES)
def test_classes_are_those_of_ascii(grammars: Grammars, pattern: str) -> None:
    held = matching(pattern)
    assert allowed(grammars, CHARACTERS, regex=pattern) == held
    in_lark = pattern.replace("/", "\\/")
    assert allowed(grammars, CHARACTERS, grammar=f"start: A\nA: /{in_lark}/") == held
    tag = {"format": {"type": "regex", "pattern": pattern}}
    assert allowed(grammars, CHARACTERS, structural_tag=tag) == held


@pytest.mark.parametrize("pattern", [each for each in CLASSES if "(?" not in each])
def test_classes_in_schemas(grammars: Grammars, pattern: str) -> None:
    quoted = {
        json.dumps(each, ensure_ascii=False): each for each in CHARACTERS if each not in '"\\' and each.isprintable()
    }
    found = allowed(grammars, list(quoted), json={"type": "string", "pattern": f"^{pattern}$"})
    assert [quoted[each] for each in found] == [each for each in matching(pattern) if each in quoted.values()]
    keys = {f"{{{each}:1}}": text for each, text in quoted.items()}
    schema = {"type": "object", "patternProperties": {f"^{pattern}$": {"const": 1}}, "additionalProperties": False}
    found = allowed(grammars, list(keys), json=schema)
    assert [keys[each] for each in found] == [each for each in matching(pattern) if each in quoted.values()]


@pytest.mark.parametrize(
    "pattern", [r"[\d]", r"[\w]", r"[\d.]", r"[^\w]", r"[\W_]", r"[^\W_]", r"[\s]", r"[^\d\s]", r"[*-/\d]", r"[\d-x]"]
)
def test_classes_in_gbnf(grammars: Grammars, pattern: str) -> None:
    held = matching(pattern.replace("d-x", r"dx\-"))
    assert allowed(grammars, CHARACTERS, grammar=f"root ::= {pattern}") == held


def test_unicode_on_request(grammars: Grammars) -> None:
    for pattern in (r"(?u)\d", r"(?u:\d)", r"(?u)[\d]"):
        assert allowed(grammars, ["5", "٣", "a"], regex=pattern) == ["5", "٣"]
        assert allowed(grammars, ['"5"', '"٣"', '"a"'], json={"type": "string", "pattern": f"^{pattern}$"}) == [
            '"5"',
            '"٣"',
        ]
    assert allowed(grammars, ["5", "٣"], grammar="start: /\\d/u") == ["5", "٣"]
    assert allowed(grammars, ["é_", "٣é"], regex=r"(?u:\w)\w") == ["é_"]
    assert allowed(grammars, ["é ", "٣\u3000"], regex=r"(?u)\w\s") == ["é ", "٣\u3000"]


def test_what_is_no_class_is_left_alone(grammars: Grammars) -> None:
    assert allowed(grammars, [r"\d", "5"], regex=r"\\d") == [r"\d"]
    assert allowed(grammars, ["\\5", r"\d"], regex=r"\\\d") == ["\\5"]
    assert allowed(grammars, ["٣", "é"], regex=r"\p{Nd}") == ["٣"]
    assert allowed(grammars, ["5", "٣", "é"], regex=r"[[:digit:]\p{Nd}]") == ["5", "٣"]
    assert allowed(grammars, [r"\d", "5"], choice=[r"\d"]) == [r"\d"]
    assert allowed(grammars, [r"\d", "5"], grammar='start: "\\\\d"') == [r"\d"]
    assert allowed(grammars, [r"\d", "d", "5"], grammar=r'root ::= "\\d"') == [r"\d"]
    assert allowed(grammars, ["5", "٣"], grammar="start: A // /\\w\n# \\W/\nA: /\\d/ // \\d") == ["5"]
    assert allowed(grammars, ["a/5", "a/٣"], grammar='start: "a/" B\nB: /\\d/') == ["a/5"]
    assert allowed(grammars, [r'"\\d"', '"5"'], json={"const": r"\d"}) == [r'"\\d"']


def test_expressions_wherever_lark_has_them(grammars: Grammars) -> None:
    schema = json.dumps({"type": "string", "pattern": r"^\s\d$"})
    for grammar, held, other in [
        (f"start: %json {schema}", '" 5"', '"\u30005"'),
        ('start: a\na[suffix="."]: /\\d+/', "5.", "٣."),
        ("start: %lark {\n  start: /\\d/\n}", "5", "٣"),
        ("start: A B\nA: /\\//\nB: /[\\/\\d]/", "/5", "/٣"),
        ("start: A\nA: /\\w/i", "k", "\u212a"),
        ("start: A\nA: /[\\w.]/i", "k", "\u017f"),
        ("start: A A\n%ignore /\\s/\nA: /\\d/", "5 5", "5\u30005"),
        ('start: %regex {"substring_chars": "/\\\\d/"}', "/\\d/", "/5/"),
    ]:
        assert allowed(grammars, [held, other], grammar=grammar) == [held], grammar
    tag = {
        "format": {"type": "tag", "begin": "<", "content": {"type": "grammar", "grammar": "start: /\\d/"}, "end": ">"}
    }
    assert allowed(grammars, ["<5>", "<٣>"], structural_tag=tag) == ["<5>"]


def test_white_space_patterns(grammars: Grammars) -> None:
    texts = ['{"a":1}', '{"a": 1}', '{"a":\u30001}', '{"a":51}']
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    assert allowed(grammars, texts, json=schema, whitespace_pattern=r"\s") == texts[:2]
    assert allowed(grammars, texts, json=schema, whitespace_pattern="") == texts[:1]
    assert allowed(grammars, texts, json_object=True, whitespace_pattern="") == [texts[0], texts[3]]


ITEMS = st.sampled_from([r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "a", "5", r"\.", "é", r"\\", "b-k", r"\-", "_"])
IN_BRACKETS = st.tuples(st.sampled_from(["[", "[^"]), st.lists(ITEMS, min_size=1, max_size=4).map("".join))
ATOMS = st.one_of(ITEMS.filter(lambda each: each != "b-k"), IN_BRACKETS.map(lambda pair: f"{pair[0]}{pair[1]}]"))
MADE = st.one_of(ATOMS, ATOMS.map(lambda each: f"(?:{each}|5)"), ATOMS.map(lambda each: f"{each}?"))
PATTERNS = st.lists(MADE, min_size=1, max_size=3).map("".join)


@settings(max_examples=150, deadline=None)
@given(pattern=PATTERNS, text=st.text("a5é٣ _.-\\K\u3000\n", max_size=3))
def test_expressions_match_as_pythons(grammars: Grammars, pattern: str, text: str) -> None:
    try:
        found = allowed(grammars, [text], regex=pattern)
    except ValueError as error:
        assert "NoExtension" in str(error)  # nothing matches
        found = []
    assert bool(found) == bool(re.fullmatch(pattern, text, re.ASCII))
