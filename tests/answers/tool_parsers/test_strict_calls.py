"""Grammars of calls whose arguments are no JSON: they hold what chat templates write, and nothing that the schema does
not."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tokenizers
from call_texts import FORMATS
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from vllm.answers.grammars.arguments import UnwritableSchema
from vllm.answers.grammars.calls import CallableFunction, CallGrammar, ChannelGrammar
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.tool_parsers import ToolParserManager
from vllm.v1.structured_output.matcher import Grammars

pytest.importorskip("llguidance")

NAMES = (
    "qwen3_coder", "glm45", "minimax_m2", "deepseek_v32", "lfm2", "olmo3", "pythonic", "llama4_pythonic", "gemma4",
    "kimi_k2", "deepseek_v4", "deepseek_v41", "seed_oss", "dots", "step3", "minicpm5", "hy_v3", "hy_v4", "k2_horizon",
    "kimi_k3", "plamo3", "apertus", "cohere_command3", "gigachat3",
)  # fmt: skip
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PLACE = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}, "tags": {"type": "array", "items": {"enum": ["u", "v w"]}}},
    "required": ["x"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "$defs": {"kind": {"enum": ["a b", "c"]}},
    "properties": {
        "city": {"type": "string"},
        "kind": {"$ref": "#/$defs/kind"},
        "days": {"type": "integer", "minimum": 2, "maximum": 3},
        "exact": {"type": "boolean"},
        "place": PLACE,
    },
    "required": ["kind", "days"],
    "additionalProperties": False,
}
WEATHER, OTHER = CallableFunction("weather", SCHEMA), CallableFunction("now", {}, is_bound=False)
HELD = [
    {"kind": "a b", "days": 2},
    {"city": "São {x} <b> (y)\nz", "kind": "c", "days": 3, "exact": True, "place": {"x": 2, "tags": ["v w", "u"]}},
    {"city": "", "kind": "c", "days": 3, "exact": False, "place": {"x": 1}},
]
OTHERS = [
    {"days": 2},
    {"kind": "c", "days": 4},
    {"kind": "d", "days": 2},
    {"kind": "c", "days": 2, "exact": "no"},
    {"kind": "c", "days": 2, "place": {"tags": []}},
    {"kind": "c", "days": 2, "more": 1},
    {},
]


class Forms:
    """Over a tokenizer of bytes, in which `markers` are one token each; `ends` of them may end an answer, too."""

    def __init__(self, markers: list[str], ends: tuple[str, ...] = ()) -> None:
        self.ends = ends
        made = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(ALPHABET)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(["<eos>"])
        made.add_tokens([AddedToken(each, special=bool(ends), normalized=False) for each in markers])
        self._tokenizer = made
        end_ids = [made.token_to_id(each) for each in ("<eos>", *ends)]
        self._grammars = Grammars(made.to_str(), made.get_vocab_size(), end_ids)

    def of(self, name: str) -> CallGrammar:
        parser = ToolParserManager.get_tool_parser(name)
        forms = ChannelGrammar if parser.has_channels else CallGrammar
        tokenizer = Tokenizer.__new__(Tokenizer)
        tokenizer.backend = self._tokenizer
        return forms(tokenizer, parser.call_text, (*parser.begins, *parser.begins_unread), parser.frames)

    def holds(self, grammar: str, text: str) -> bool:
        matcher, size = self._grammars.start(grammar), self._tokenizer.get_vocab_size()
        mask = np.zeros(-(-size // 32), dtype=np.int32)
        for token in [*self._tokenizer.encode(text, add_special_tokens=False).ids, size_of_end(self._tokenizer)]:
            assert matcher.fill_mask(mask) is None
            if not np.unpackbits(mask.view(np.uint8), bitorder="little")[token]:
                return False
            assert matcher.take([token]) is None
        return True

    def drawn(self, grammar: str, text: str, begin: str) -> tuple[int, int]:
        """How many of the text's tokens behind `begin` are drawn, as no run of what must follow has them, and of how
        many."""
        matcher = self._grammars.start(grammar)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        start = len(self._tokenizer.encode(begin, add_special_tokens=False).ids)
        assert matcher.take(ids[:start]) is None
        place, drawn = start, 0
        while place < len(ids):
            run = matcher.forced()
            if not run:
                run, drawn = [ids[place]], drawn + 1
            assert run == ids[place : place + len(run)]
            assert matcher.take(run) is None
            place += len(run)
        return drawn, len(ids) - start


def size_of_end(tokenizer: tokenizers.Tokenizer) -> int:
    return tokenizer.token_to_id("<eos>")


@pytest.fixture(scope="module", params=["texts", "tokens"])
def forms(request) -> Forms:
    """Markers as texts, and as tokens where models have them."""
    texts = [write(("f", {"a": "b"})) for write, _ in (FORMATS[name] for name in NAMES)]
    found = {each for text in texts for each in re.findall(r"</?[|\w｜▁:]+\|?>", text)} | {'<|"|>'}
    found |= {"<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|message_sep|>"}
    plain = {"<parameter", "</parameter>", "</function>", "</invoke>", "<invoke>"}
    return Forms(sorted(found - plain) if request.param == "tokens" else [])


@pytest.mark.parametrize("name", NAMES)
def test_strict_calls_in_text(name, forms):
    write, has_text = FORMATS[name]
    grammar = forms.of(name).free([WEATHER, OTHER], True, None)
    before = "I look.\n" if has_text else ""
    for arguments in HELD:
        text = before + write(("weather", arguments))
        assert forms.holds(grammar, text), text
    assert forms.holds(grammar, before + write(("weather", HELD[0]), ("weather", HELD[1])))
    assert forms.holds(grammar, before + write(("now", {"any": "thing", "n": [1]})))
    assert forms.holds(grammar, "Only text.") and forms.holds(grammar, "")
    for arguments in OTHERS:
        text = before + write(("weather", arguments))
        assert not forms.holds(grammar, text), text
    assert not forms.holds(grammar, before + write(("never", {})))


@pytest.mark.parametrize("name", NAMES)
def test_what_must_follow_in_a_call_is_not_drawn(name, forms):
    schema = {
        "type": "object",
        "properties": {"a_city_of_the_world": {"enum": ["Oslo in Norway"]}},
        "required": ["a_city_of_the_world"],
    }
    function = CallableFunction("weather_of_the_city", schema)
    write, has_text = FORMATS[name]
    call = write((function.name, {"a_city_of_the_world": "Oslo in Norway"}))
    before = "I look.\n" if has_text else ""
    # Its beginning, and white space in JSON, are the model's.
    begin = before + call[: call.index(function.name)]
    drawn, count = forms.drawn(forms.of(name).free([function], False, None), before + call, begin)
    assert count > 40 and drawn <= 8, (drawn, count)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_bound_by_all_parts_of_a_schema(name, forms):
    text = {"$ref": "#/$defs/kind", "description": "x"}
    for own in (text, {"allOf": [text]}, {"anyOf": [text, {"type": "null"}]}):
        schema = {**SCHEMA, "properties": {"kind": own}, "required": ["kind"]}
        grammar = forms.of(name).forced([CallableFunction("f", schema)], False)
        write, _ = FORMATS[name]
        assert forms.holds(grammar, write(("f", {"kind": "a b"}))) and not forms.holds(
            grammar, write(("f", {"kind": "d"}))
        )


@pytest.mark.parametrize("name", ["kimi_k3", "cohere_command3", "gigachat3"])
def test_markup_around_the_content_is_free(name, forms):
    """The markup belongs to models whose calls follow it."""
    grammar = forms.of(name).free([WEATHER], True, None)
    first, last = (*ToolParserManager.get_tool_parser(name).frames, "")[:2]
    call, _ = FORMATS[name]
    assert forms.holds(grammar, f"{first}I look.{last}{call(('weather', HELD[0]))}")
    assert forms.holds(grammar, f"{first}Only text.{last}")
    assert not forms.holds(grammar, f"{first}I look.{last}{call(('weather', OTHERS[0]))}")


@pytest.mark.parametrize("name", NAMES)
def test_calls_beside_a_form(name, forms):
    grammar = forms.of(name).free([WEATHER], False, {"enum": [7]})
    write, _ = FORMATS[name]
    assert forms.holds(grammar, "7") and forms.holds(grammar, write(("weather", HELD[0])))
    assert not forms.holds(grammar, "8") and not forms.holds(grammar, write(("weather", OTHERS[0])))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"anyOf": [{"type": "object"}]}, "anyOf"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern of the text a"),
        ({"type": "object", "properties": {}, "required": ["b"]}, "no property describes .b."),
        ({"type": "object", "additionalProperties": True}, "additionalProperties"),
    ],
)
def test_what_cannot_be_kept_is_said(schema, says):
    with pytest.raises(UnwritableSchema, match=says):
        Forms([]).of("qwen3_coder").free([CallableFunction("f", schema)], True, None)


@pytest.mark.parametrize("name", ['say "hi"', "back\\slash", "wetter.für/x"])
def test_names_are_spelled_as_json(name):
    forms = Forms([])
    text = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {{}}}}\n</tool_call>'
    assert forms.holds(forms.of("hermes").forced([CallableFunction(name, {})], False), text)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "object", "title": None, "properties": {"a": {"type": "integer"}}, "required": ["a"], "$defs": None},
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}},
    ],
)
def test_arguments_are_objects(schema):
    forms = Forms([])
    grammar = forms.of("hermes").forced([CallableFunction("f", schema)], False)
    texts = [f'<tool_call>\n{{"name": "f", "arguments": {each}}}\n</tool_call>' for each in ('{"a": 1}', "true", "{}")]
    assert [forms.holds(grammar, text) for text in texts] == [True, False, False]


@pytest.mark.parametrize("name", ["gemma4", "pythonic"])
def test_a_schema_that_holds_its_like(name):
    branch = {"type": "object", "properties": {"next": {"$ref": "#/$defs/N"}}, "required": []}
    schema = {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"], "$defs": {"N": branch}}
    forms = Forms([])
    if name == "gemma4":
        with pytest.raises(UnwritableSchema, match="holds its like"):
            forms.of(name).free([CallableFunction("f", schema)], True, None)
        return
    grammar = forms.of(name).free([CallableFunction("f", schema)], True, None)
    assert forms.holds(grammar, '[f(n={"next": {"next": {}}})]') and not forms.holds(grammar, "[f(n={'next': 1})]")
