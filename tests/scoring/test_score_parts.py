"""Input files, templates, tables and pictures of `vllm score`, without a model."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from vllm.exceptions import CliError
from vllm.scoring.files import Item, TextFile, write_atomically
from vllm.scoring.labels import report as score_report
from vllm.scoring.labels.records import Labels, verdict
from vllm.scoring.labels.report import draw, format_table
from vllm.scoring.labels.task import ServerLabelScorer
from vllm.scoring.labels.templates import Template
from vllm.scoring.media import RowMedia
from vllm.scoring.report import cut, short_names
from vllm.utils.server_client import ServerError


def _write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# -- files ------


def test_jsonl_objects_strings_and_blank_lines(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.jsonl", '\ufeff{"text": "one", "id": 7}\r\n\n"two \u2028 {x}"\n{"text": ""}')
    assert list(TextFile(path, "text")) == [
        Item(1, "one", {"text": "one", "id": 7}),
        Item(3, "two \u2028 {x}", {"text": "two \u2028 {x}"}),
        Item(4, "", {"text": ""}),
    ]


def test_csv_with_quoted_line_breaks_counts_lines_of_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.CSV", 'id,review\n1,"two\nlines, ""quoted"""\n\n2,plain\n')
    items = list(TextFile(path, "review"))
    assert [(item.line, item.text) for item in items] == [(2, 'two\nlines, "quoted"'), (5, "plain")]
    assert items[0].fields == {"id": "1", "review": 'two\nlines, "quoted"'}


def test_parquet_rows_are_lines_and_what_json_lacks_is_text(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    path = tmp_path / "a.parquet"
    columns = {
        "text": ["one", "two"],
        "n": [float("nan"), 0.5],
        "day": [datetime.date(2026, 1, 2), None],
        "tags": [["x"], []],
        "price": [decimal.Decimal("1.50"), None],
    }
    pyarrow_parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow_parquet.write_table(pa.table(columns), path)
    assert list(TextFile(path, "text")) == [
        Item(1, "one", {"text": "one", "n": None, "day": "2026-01-02", "tags": ["x"], "price": "1.50"}),
        Item(2, "two", {"text": "two", "n": 0.5, "day": None, "tags": [], "price": None}),
    ]
    for table, message in (
        (pa.table({"text": ["x", None]}), "a.parquet:2: field 'text' must be a string, got null"),
        (pa.table({"body": ["x"]}), "a.parquet:1: no field 'text' in the header, which has 'body'"),
        (pa.table({"text": ["x"], "raw": [b"x"]}), "column 'raw' holds bytes"),
    ):
        pyarrow_parquet.write_table(table, path)
        with pytest.raises(CliError, match=re.escape(message)):
            list(TextFile(path, "text"))
    path.write_bytes(b"PAR1")
    with pytest.raises(CliError, match=r"a\.parquet: not Parquet"):
        list(TextFile(path, "text"))


def test_limit_stops_reading(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.jsonl", '"one"\n"two"\nnot json\n')
    assert [item.text for item in TextFile(path, "text", limit=2)] == ["one", "two"]


def test_every_iteration_starts_anew_from_pipes_too(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    writer = threading.Thread(
        target=pipe.write_text, args=('\ufefftext\none\n"t\r\nwo"\n',), kwargs={"encoding": "utf-8"}
    )
    writer.start()
    texts = TextFile(pipe, "text")
    writer.join()
    assert next(iter(texts)).text == "one"
    assert [[item.text for item in texts] for _ in range(2)] == [["one", "t\r\nwo"]] * 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '"ok"\n{"text": ', "a.jsonl:2: not JSON: Expecting value at column 10"),
        ("a.jsonl", '"ok"\n{"text": \n"x"', "a.jsonl:2: not JSON: Expecting value at column 10"),
        ("a.jsonl", '"ok"\n[1]\n', "a.jsonl:2: must be a JSON object or a JSON string, got a list"),
        ("a.jsonl", "\n12\n", "a.jsonl:2: must be a JSON object or a JSON string, got a number"),
        ("a.jsonl", '{"body": "x"}\n', "a.jsonl:1: no field 'text'; there is 'body' (see --text-field)"),
        ("a.jsonl", "{}\n", "a.jsonl:1: no field 'text'; there is none"),
        ("a.jsonl", '{"text": null}\n', "a.jsonl:1: field 'text' must be a string, got null"),
        ("a.jsonl", '{"text": 5}\n', "a.jsonl:1: field 'text' must be a string, got a number"),
        ("a.jsonl", r'"\ud800"', "a.jsonl:1: half of a surrogate pair, which is not text"),
        ("a.jsonl", "[" * 100_000, "a.jsonl:1: not usable JSON: nested too deeply"),
        ("a.jsonl", b'"ok"\n"caf\xe9"\n', "a.jsonl:2: not UTF-8"),
        ("a.csv", b'text\n"caf\n\xe9"\n', "a.csv:3: not UTF-8"),
        ("a.jsonl", "\n \n", "a.jsonl: there are no texts in it"),
        ("a.csv", "", "a.csv: there are no texts in it"),
        ("a.csv", "text\n", "a.csv: there are no texts in it"),
        ("a.csv", "id,body\n1,x\n", "a.csv:1: no field 'text' in the header, which has 'id', 'body'"),
        ("a.csv", "text,id,text\n", "a.csv:1: the header has 'text' more than once"),
        ("a.csv", "text,id\nx,1\ny\n", "a.csv:3: 1 values, but the header has 2"),
        ("a.csv", 'text\n"open\n', "a.csv:2: not CSV: unexpected end of data"),
    ],
)
def test_bad_input_names_file_line_and_fault(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CliError) as raised:
        list(TextFile(_write(tmp_path, name, content), "text"))
    assert message in str(raised.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(CliError, match="cannot read"):
            list(TextFile(path, "text"))


def test_writing_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(CliError, match="cannot write"):
        write_atomically(tmp_path / "missing" / "x", b"")


# -- templates ------


def test_fields_of_the_object_fill_the_template() -> None:
    item = Item(1, "{title} {0} }{", {"body": "{title} {0} }{", "title": "T", "stars": 4, "old": None, "ok": True})
    template = Template("{{{title}}} {stars}{old} {ok}: {text}|{body}")
    assert template.render("a.jsonl", item) == "{T} 4 true: {title} {0} }{|{title} {0} }{"


def test_text_is_the_text_whatever_its_field_is_called() -> None:
    item = Item(1, "the body", {"body": "the body", "text": "another field"})
    assert Template("{text}").render("a.jsonl", item) == "the body"


def test_unknown_field_names_line_and_field() -> None:
    with pytest.raises(CliError) as raised:
        Template("{text} {stars}").render("a.jsonl", Item(9, "x", {"text": "x", "id": 1}))
    assert str(raised.value) == "a.jsonl:9: the template's field 'stars' is not there; known: id, text"


@pytest.mark.parametrize("source", ["{text", "text}", "{}", "{text!r}", "{text:>4}", "no field", "{{text}}", ""])
def test_bad_templates_are_errors(source: str) -> None:
    with pytest.raises(CliError, match="template: "):
        Template(source)


def test_escapes_of_the_command_line() -> None:
    item = Item(1, r"a\nb", {})
    assert Template.unescaped(r"{text}\n\t\\n\x").render("a", item) == "a\\nb\n\t\\n\\x"


def test_default_template_depends_on_the_labels() -> None:
    item = Item(1, "Nice.", {})
    assert Template.default([" positive", " negative"]).render("a", item).endswith("Review: Nice.\nSentiment:")
    other = Template.default([" {a}", " b"]).render("a", item)
    assert "{a}, b" in other
    assert other.endswith("Text: Nice.\nLabel:")


# -- verdicts, table, picture ------


def _record(text: str, p: float | None, prediction: str | None, **more: Any) -> dict[str, Any]:
    return {
        "text": text,
        "probs": {" a": p, " b": None if p is None else 1 - p},
        "logprobs": {" a": -0.5, " b": None},
        "ranks": {" a": 1, " b": 4},
        "label_mass": 0.75,
        "prediction": prediction,
        **more,
    }


def test_verdicts_compare_without_the_space() -> None:
    labels = Labels([" a", " b"], [" a", " b"], [[1], [2]])
    items = [Item(i, "x", {"label": gold} if gold else {}) for i, gold in enumerate(("a", "b ", "c", None, "a"))]
    records = [_record("x", 0.9, " a")] * 4 + [_record("x", None, None)]
    assert list(map(verdict, records, items, [labels] * 5)) == [True, False, None, None, None]
    by_id = Labels(["1", "2"], [" a", " b"], [[1], [2]])
    items = [Item(1, "x", {"label": gold}) for gold in ("a", 1, "b", 2)]
    assert [verdict(_record("x", 0.9, "1"), item, by_id) for item in items] == [True, True, False, False]


def test_table_fits_the_width() -> None:
    records = [
        _record("short", 0.9, " a"),
        _record("long " * 50 + "\n\x1b[31m", 0.2, " b"),
        _record("広い" * 40, None, None),
        {"text": "broken", "error": "NaN"},
    ]
    scored = list(zip(records, [True, False, None, None], strict=True))
    table = format_table(scored, {" a": " a", " b": " b"}, 80, 4)
    lines = table.split("\n")
    assert lines[0].split() == ["text", "P(a)", "P(b)", "logprob", "rank", "mass"]
    assert lines[1].split() == ["short", "0.900", "0.100", "-0.50", "1", "0.750"]
    assert lines[2].split()[-6:] == ["0.200", "0.800", "-", "4", "0.750", "wrong"]
    assert lines[3].split()[-5:] == ["-", "-", "-", "-", "0.750"]
    assert lines[4].split() == ["broken", "-", "-", "-", "-", "-", "failed"]
    assert "\x1b" not in table
    assert all(cell_len(line) <= 80 for line in lines[:5])


def test_long_tables_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_report, "MAX_ROWS", 2)
    table = format_table([(_record("x", 0.5, " a"), None)] * 5, {" a": " a", " b": " b"}, 80, 9)
    assert table.split("\n")[3] == "... and 7 more"


def test_headings_stay_distinct() -> None:
    assert short_names([" a", " b"]) == ["a", "b"]
    assert short_names([" a", "a"]) == ["' a'", "'a'"]
    assert cut("wide 広い", 8) == "wide 広…"
    assert cut("abc, def", 6) == "abc…"


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG\r\n\x1a\n"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_picture_formats_and_awkward_texts(kind: str, start: bytes) -> None:
    scored = [(_record("costs $5 and $6_x^", 0.9, " a"), True), (_record("広い", None, None), None)]
    assert draw(scored, {" a": "$a$", " b": "b"}, "title $1", kind, 2).startswith(start)


def test_reviews_file_is_balanced() -> None:
    path = Path(__file__).parents[2] / "examples" / "data" / "reviews.jsonl"
    labels = [item.fields["label"] for item in TextFile(path, "text")]
    assert labels.count("positive") == labels.count("negative") == 12


# -- rows of media ------


class _Server:
    """It scores what has no picture."""

    model_name, max_model_len = "tiny", 100
    wait = staticmethod(asyncio.run)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        content = body["items"][0]["content"] if isinstance(body["items"][0], dict) else ()
        if any(part["type"] == "image_url" for part in content):
            raise ServerError("server", "it is no picture", 400, "items[0].content[0].image_url.url")
        return {"data": [{"num_prompt_tokens": 3, "labels": [{"label": "a", "token_ids": [1], "logprob": -1.0,
                                                               "probability": 1.0, "rank": 1}]}]}  # fmt: skip

    def in_order(self, rows: list[Any]) -> Any:
        return map(asyncio.run, rows)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"image": "there.png"}, "it is no picture"),
        ({"image": "gone.png"}, "image: no file 'gone.png' that may be read"),
        ({"image": "there.png", "text": "\ue002image\ue003"}, "the prompt: U+E002"),
    ],
)
def test_a_picture_at_fault_is_its_rows_error_on_a_server(tmp_path: Path, fields: dict[str, str], fault: str) -> None:
    _write(tmp_path, "there.png", "words")
    media = RowMedia({"image": "image"}, (tmp_path.resolve(),))
    scorer = ServerLabelScorer(_Server(), Template("{text}{image}"), ["a"], "rows", media)  # type: ignore[arg-type]
    item = Item(1, fields.get("text", "see"), fields)
    (row,) = scorer.score([item], 0, 0, None)  # type: ignore[arg-type]
    assert row["error"].startswith(fault) and str(tmp_path) not in row["error"]
