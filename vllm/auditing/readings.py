"""The folder of readings: a file of rows a model, which later audits of the same rows find by what it is made from."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, NoReturn

from vllm.auditing.models import ModelSpec
from vllm.auditing.servers import fingerprint
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.scoring.batches import deciding
from vllm.scoring.files import io_errors, write_atomically
from vllm.scoring.rows import meta_path
from vllm.scoring.task import Task

_READER = "vllm.auditing.reader"
_MAX_SLUG = 60
_COSTS = ("seconds", "loading_seconds", "peak_mib")
EXIT_INTERRUPTED = 130
ERROR = "error: "
"""Begins the last line of a reader that fails by what was asked."""


@dataclass(frozen=True)
class Readings:
    """A model's rows.

    Attributes:
        spec: the model.
        path: JSONL file, or with Ray a folder of parts.
        num_rows, num_failed: rows, and those among them that have an error.
        failure: the first error; None: there is none.
        seconds, loading_seconds: of reading all rows, and of loading the model; NaN: it is not known.
        peak_mib: most memory of the model's process; NaN: it is not known.
        label_texts, label_token_ids: of the labels, [k]; empty without labels.
    """

    spec: ModelSpec
    path: Path
    num_rows: int
    num_failed: int
    failure: str | None
    seconds: float
    loading_seconds: float
    peak_mib: float
    label_texts: list[str]
    label_token_ids: list[list[int]]

    @property
    def name(self) -> str:
        """As the model was given."""
        return self.spec.name

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows, one by one."""
        paths = sorted(self.path.glob("part-*.jsonl")) if self.path.is_dir() else [self.path]
        for path in paths:
            with io_errors("read", path), path.open(encoding="utf-8", newline="\n") as lines:
                for line in lines:
                    yield json.loads(line)


class Reader:
    """Reads models one after the other, each in a process of its own, and keeps what they read in `folder`."""

    def __init__(self, folder: Path, args: argparse.Namespace, kind: type[Task], overwrite: bool, quiet: bool) -> None:
        """`args`: of the task, without a model. Reads the file of rows once; CliError: it has none, or bad ones."""
        self._folder, self._args, self._overwrite, self._quiet = folder, args, overwrite, quiet
        more = {**_engine({}), "adapter": None, "url": None, "resume": True, "overwrite": False}
        task = kind(argparse.Namespace(**{**vars(args), **more}))
        _, self._made_from = task.read_texts(args, None)
        self.num_rows: int = self._made_from["num_texts"]
        with io_errors("make", folder):
            folder.mkdir(parents=True, exist_ok=True)

    def check(self, spec: ModelSpec) -> None:
        """CliError: it is a server that does not answer, or has no such model."""
        if spec.url is not None:
            self._fingerprint(spec.url, spec)

    def _fingerprint(self, url: str, spec: ModelSpec) -> str:
        return fingerprint(url, spec.path, self._args.api_key, self._args.timeout)

    def read(self, spec: ModelSpec, reference: Readings | None = None) -> Readings:
        """The rows of a model, from the folder if they are there. CliError: it cannot be read; what was read stays."""
        path = self._path(spec, reference)
        done = path.with_name(f"{path.name}.cost.json")
        known = _json(done)
        if self._overwrite or not known or known.get("num_rows") != self.num_rows or "seconds" not in known:
            known = self._run(spec, path, done, known, reference)
        costs: dict[str, float] = {name: math.nan if known[name] is None else known[name] for name in _COSTS}
        return Readings(
            spec,
            path,
            known["num_rows"],
            known["num_failed"],
            known["failure"],
            **costs,
            label_texts=known.get("label_texts", []),
            label_token_ids=known.get("label_token_ids", []),
        )

    def _path(self, spec: ModelSpec, reference: Readings | None) -> Path:
        engine = EngineArgs(**spec.engine)
        usual = EngineArgs()
        changed = {
            each.name: repr(getattr(engine, each.name))
            for each in fields_of(EngineArgs)
            if getattr(engine, each.name) != getattr(usual, each.name)
        }
        made_from = [self._made_from, deciding(engine), changed, spec.adapter, spec.url, spec.stamp()]
        if spec.url is not None:
            made_from.append(self._fingerprint(spec.url, spec))
        if reference is not None and self._args.kind == "text":
            made_from.append(reference.path.name)
        digest = hashlib.sha256(json.dumps(made_from, default=str, sort_keys=True).encode()).hexdigest()[:16]
        slug = re.sub(r"[^\w.+-]+", "_", Path(spec.path or spec.name).name if spec.url is None else spec.url)[
            -_MAX_SLUG:
        ]
        suffix = "" if self._args.backend is not None else ".jsonl"
        return self._folder / f"{slug}-{digest}{suffix}"

    def _run(
        self, spec: ModelSpec, path: Path, done: Path, known: dict[str, Any], reference: Readings | None
    ) -> dict[str, Any]:
        given = dict(vars(self._args))
        given |= {"spec": spec.name, "adapter": spec.adapter, "url": spec.url, "output": path, "parent": os.getpid()}
        resume = not self._overwrite and meta_path(path).exists()
        given |= {"resume": resume, "overwrite": not resume, "quiet": self._quiet}
        if self._args.kind == "text":
            given["reference_rows"] = reference and reference.path
            given["reference_spec"] = reference and reference.spec
        given["known_labels"] = reference and (reference.label_texts, reference.label_token_ids)
        engine = dict(spec.engine)
        if self._args.kind == "text":
            engine["max_logprob_token_ids"] = -1
        if spec.adapter is not None:
            engine["enable_lora"] = True
        job = argparse.Namespace(**{**given, **_engine(engine)})
        if not self._quiet:
            print(f"reading {spec.name}", file=sys.stderr)
        ended = subprocess.run(
            [sys.executable, "-m", _READER], input=pickle.dumps(job), stdout=subprocess.PIPE, check=False
        )
        if ended.returncode:
            self._fail(spec.name, ended.returncode, ended.stdout)
        found = _json(done)
        # A run that was killed between its last row and its cost has nothing new to measure.
        found = {**dict.fromkeys(_COSTS), **{name: known[name] for name in _COSTS if name in known}, **found}
        write_atomically(done, f"{json.dumps(found, ensure_ascii=False)}\n".encode())
        return found

    @staticmethod
    def _fail(name: str, status: int, said: bytes) -> NoReturn:
        if status == -signal.SIGINT or status == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        if last.startswith(ERROR):
            raise CliError(f"{name}: {last.removeprefix(ERROR)}")
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        raise CliError(f"reading {name} ended {how}; the same command continues it")


def _engine(given: dict[str, Any]) -> dict[str, Any]:
    """All fields of EngineArgs."""
    return vars(EngineArgs(**given))


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
