"""The form of structured.py's answers, as each engine takes it: a list of records that outlasts the measured tokens."""

from __future__ import annotations

from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 40,
    "maxItems": 60,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "role": {"enum": ["engineer", "designer", "manager", "analyst"]},
            "age": {"type": "integer", "minimum": 18, "maximum": 99},
            "remote": {"type": "boolean"},
        },
        "required": ["name", "role", "age", "remote"],
        "additionalProperties": False,
    },
}

# The same for llama.cpp, without white space.
GBNF = r"""
root ::= "[" item ("," item){39,59} "]"
item ::= "{\"name\":" string ",\"role\":" role ",\"age\":" age ",\"remote\":" ("true" | "false") "}"
string ::= "\"" char{0,40} "\""
char ::= [^"\\\x00-\x1F] | "\\" ["\\/bfnrt]
role ::= "\"engineer\"" | "\"designer\"" | "\"manager\"" | "\"analyst\""
age ::= "1" [89] | [2-9] [0-9]
"""
