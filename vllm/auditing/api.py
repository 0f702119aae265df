"""`vllm.audit`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm.auditing.audits import Options, run
from vllm.auditing.results import Audit
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError, VLLMValidationError


def audit(
    rows: str | Path | Iterable[str | dict[str, Any]],
    *,
    reference: str,
    candidates: str | Sequence[str],
    labels: Sequence[str] | Sequence[int] | None = None,
    template: str | None = None,
    questions: str | Path | Sequence[dict[str, Any]] | None = None,
    query: str | None = None,
    rerank: bool = False,
    query_field: str | None = None,
    embed: bool = False,
    text_field: str | None = None,
    chunk_tokens: int | None = None,
    gold: str | Sequence[str] | None = None,
    by: str | Sequence[str] = (),
    budget: str | None = None,
    limit: int | None = None,
    readings: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    **engine_args: Any,
) -> Audit:
    """How far other models' readings of the same rows are from a reference's, as `vllm audit` says it.

    Labels are read if `labels` are given, decisions if `questions` are, scores of documents with `query` or `rerank`,
    vectors with `embed`, and whole texts otherwise.

    Args:
        rows: a file (JSONL, CSV or Parquet), a folder of texts, or the rows themselves.
        reference: MODEL[:dtype[:quantization]], and further engine arguments as ",name=value".
        candidates: the same; a dtype or "quantization=int8" alone is the reference's model, "reference" the reference
            itself in other company, a URL a running server.
        labels: texts, or token ids.
        template: the prompt, with {text} and other {fields}; backslash n is a line break.
        questions: a JSON file of questions, or the questions.
        query: the query of all documents.
        rerank: documents are scored, each for the query of its row, in `query_field` (None: "query").
        embed: vectors of the texts are compared.
        text_field: the field of the text; None: "text".
        chunk_tokens: read texts in pieces of so many tokens, the second half of each, as llama.cpp does.
        gold: the field of known labels (None: "label", where it is there); of questions, QUESTION=FIELD.
        by: fields to group the rows by.
        budget: such as "flips<=0.5%" or "kl<=0.01".
        limit: the first rows alone.
        readings: folder of the readings, which later audits use again; None: `<stem>.audit` of a file, and none that
            stays of rows that are given themselves.
        overwrite: read all models anew.
        quiet: no bars.
        **engine_args: fields of EngineArgs, of all models.

    Raises:
        TypeError: an engine argument that EngineArgs does not have.
        ValueError: what cannot be asked, or read; names which.
    """
    EngineArgs(**engine_args)
    listed = [candidates] if isinstance(candidates, str) else list(candidates)
    kind = _kind(
        labels=labels is not None, questions=questions is not None, rerank=rerank or query is not None, embed=embed
    )
    if labels is not None:
        _check_labels(labels)
    for name, value, least in (("limit", limit, 1), ("chunk_tokens", chunk_tokens, 4)):
        if value is not None and value < least:
            raise VLLMValidationError(f"{name} must be at least {least}, got {value}", name, value)
    args: dict[str, Any] = {"template": template, "chunk_tokens": chunk_tokens, "query_field": query_field}
    for name, value in {**args, "gold": gold, "by": by or None}.items():
        if value is not None and kind not in _KINDS_OF[name]:
            raise VLLMValidationError(f"{name} has no meaning for {kind}", name, value)
    with tempfile.TemporaryDirectory() as folder:
        args |= {"limit": limit, "query": query}
        if labels is not None:
            args["labels" if isinstance(labels[0], str) else "label_ids"] = list(labels)
        if questions is not None:
            args["questions"] = _file(Path(folder, "questions.json"), questions)
        given = isinstance(rows, (str, Path))
        file = Path(rows) if isinstance(rows, (str, Path)) else _lines(Path(folder, "rows.jsonl"), rows)
        kept = Path(readings) if readings is not None else None if given else Path(folder, "readings")
        options = Options(
            rows=file,
            kind=kind,
            reference=reference,
            candidates=listed,
            text_field=text_field or "text",
            gold=[gold] if isinstance(gold, str) else gold,
            by=[by] if isinstance(by, str) else by,
            budget=budget,
            readings=kept,
            overwrite=overwrite,
            quiet=quiet,
            args={name: value for name, value in args.items() if value is not None},
            engine=engine_args,
        )
        try:
            return run(options)
        except CliError as error:
            raise VLLMValidationError(str(error)) from error


_KINDS_OF = {
    "template": ("labels",), "chunk_tokens": ("text",), "query_field": ("rerank",), "gold": ("labels", "questions"),
    "by": ("labels", "questions"),
}  # fmt: skip


def _check_labels(labels: Sequence[str] | Sequence[int]) -> None:
    if not len(labels):
        raise VLLMValidationError("labels must not be empty", "labels", labels)
    if isinstance(labels, str) or len({isinstance(each, str) for each in labels}) > 1:
        raise VLLMValidationError(f"labels must be a list of texts, or of token ids, got {labels!r}", "labels", labels)


def _kind(**asked: bool) -> str:
    """The kind that is asked, by name; "text" of none."""
    found = [name for name, is_asked in asked.items() if is_asked]
    if len(found) > 1:
        raise VLLMValidationError(f"{' and '.join(found)} exclude each other")
    return found[0] if found else "text"


def _file(path: Path, questions: str | Path | Sequence[dict[str, Any]]) -> Path:
    if isinstance(questions, (str, Path)):
        return Path(questions)
    path.write_text(json.dumps(list(questions)), encoding="utf-8")
    return path


def _lines(path: Path, rows: Iterable[str | dict[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    return path
