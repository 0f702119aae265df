"""Grammars in the dialects that callers send: GBNF as llama.cpp has it, and Lark."""

from __future__ import annotations

import pytest
from grammar_walks import accepts, byte_grammars

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.grammar import grammar_text
from vllm.v1.structured_output.matcher import Grammars

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return byte_grammars(tmp_path_factory.mktemp("bytes"))


JSON = r"""
# any value in an object
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
        string ":" ws value
        ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws  # with remarks
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= name | num | "(" ws expr ")" ws
name  ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
CHESS = r"""
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move ::= (pawn | piece | castle) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
QUERY = """
root ::= query
query ::= "SELECT " column " from " table " where " column "= " number
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
number ::= "1 " | "2 "
"""


@pytest.mark.parametrize(
    ("grammar", "held", "others"),
    [
        (JSON, ["{}", '{"a": [1, -2.5e3, "x\\n\\u00e9"], "b": null}'], ["[]", "{a}", '{"a":}']),
        # The end of one part may begin the next.
        (SUMS, ["1+2=3\n", "(a*b) = c\n", "a=b\n\nc=d\n"], ["1+=3\n", "1+2"]),
        (CHESS, ["1. e4 e5\n2. Nf3 O-O\n", "1. e4 e5\n12. Qxe8+ O-O-O#\n"], ["1. e4 e5\n", "1. e9 e5\n2. a1 a2\n"]),
        (QUERY, ["SELECT col_1  from table_1  where col_2 = 1 "], ["SELECT col_1 "]),
        ('root ::= "ab" "c" | [a-z] "b" "d"', ["abc", "abd", "zbd"], ["ab", "zbc"]),
        ('root ::= ("- " item)+\nitem ::= [^\\n]+ "\\n"', ["- one\n- two\n"], ["one\n", "- \n"]),
        ('root ::= "a"{2} [b-d]{2,} "e"{1,3} ("xy"){0,2}', ["aabce", "aabcdeeexyxy"], ["abce", "aabe", "aabceeee"]),
        ('root ::= "<" .+ ">"', ["<abc>", "<\n>", "<>>"], ["<>"]),
        (r'root ::= [\u3041-\u3096]+ | "\U0001F600" | [א-ת]+ | "é"', ["\u3042", "😀", "אב", "é"], ["a", "\u3040"]),
        ('root ::= start | if-then | if_2\nstart ::= "s"\nif-then ::= "i"\nif_2 ::= "2"', ["s", "i", "2"], ["x"]),
        ('root ::= root "+" "x" | "x"', ["x", "x+x+x"], ["+x", "x+"]),
        ('# top\nroot ::= "a#b" # after\n  | "c" # more\n', ["a#b", "c"], ["a", "a#b # after"]),
        (r'root ::= "\t\"\\\x41" | [\]\-\^a]+ | [^\]a-c]', ['\t"\\A', "]-^a", "z"], ["b", "c"]),
        ('root ::= [a^b]+ [-+]? [+-]?', ["a^b-", "a+-"], ["c", "-"]),
        ('root ::= "a" (| "b" |) "c" | "" |', ["ac", "abc", ""], ["ab"]),
        ('start ::= "a"*', ["", "aaa"], ["b"]),
        ('start: "SELECT " column " from " /[a-z]+/\ncolumn: "a" | "b"', ["SELECT a from xyz"], ["SELECT a"]),
        ('%import common.INT\nstart: INT ("+" INT)*\n%ignore / +/', ["1+22", "1 + 2"], ["+"]),
        ('%llguidance {}\n?start: "a" -> first\n  | "b" ~ 2..3 -> second', ["a", "bb", "bbb"], ["b", "c"]),
    ],
)  # fmt: skip
def test_what_a_grammar_allows(grammars: Grammars, grammar: str, held: list[str], others: list[str]) -> None:
    text = grammar_text(StructuredOutputsParams(grammar=grammar))
    for longest in (False, True):
        assert [each for each in held if not accepts(grammars.start(text), each, longest=longest)] == []
    assert [each for each in others if accepts(grammars.start(text), each)] == []


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("root ::= other", "line 1: other has no rule"),
        ('first ::= "a"', "no rule is called root"),
        ('root ::= "a"\nroot ::= "b"', "line 2: root has a rule already"),
        ('root ::= "a', "line 1: .* is nothing that GBNF has"),
        ('root ::= ("a"', r"line 1: \( is not closed"),
        ('root ::= "a")', r"line 1: \) closes nothing"),
        ("root ::= * ", r"line 1: nothing stands before \*"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= []", "has no characters"),
        (r'root ::= "\UFFFFFFFF"', "is no character"),
        ('x\nroot ::= "a"', "consists of rules"),
        # Syntax of other dialects.
        ('root ::= <think> "a"', "line 1: '<think>"),
        ('root ::= "a" (="b")', "nothing that GBNF has"),
        ("root ::= /[a-z]+/", "nothing that GBNF has"),
        ('root = "a" , "b" ;', "lexer error"),
        ('start: a\na.2: "x"', "priority not supported"),
        ('start: pair{"a"}\npair{x}: x x', "params not supported"),
        ('%llguidance []\nstart: "a"', "followed by an object"),
        ("start: other", "unknown name"),
    ],
)
def test_what_is_refused(grammars: Grammars, grammar: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        grammars.start(grammar_text(StructuredOutputsParams(grammar=grammar)))


@pytest.mark.parametrize(
    "grammar",
    [
        'start: A A "b"\nA: /a+/',
        "start: A B\nA: /a+/\nB: /a+b/",
        'start: A ("," " " A)*\nA: "a"\n%ignore /[ ]+/',
        '%llguidance {"no_forcing": false}\nstart: A A "b"\nA: /a+/',
        'root ::= "a" root',
    ],
)
def test_what_never_ends_is_followed_step_by_step(grammars: Grammars, grammar: str) -> None:
    matcher = grammars.start(grammar_text(StructuredOutputsParams(grammar=grammar)))
    assert not accepts(matcher, "aaaaaaaaaa, b")
