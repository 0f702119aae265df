"""The commands of docs/trust.md, on a random model under the names that the page has for its models."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import pickle
import random
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from readers_here import read_here
from tiny_llm import make_tiny_model

from vllm.auditing import readings
from vllm.auditing.models import EMBEDDED, ModelSpec
from vllm.auditing.tasks import cost_path
from vllm.cli import serve
from vllm.cli.main import build_parser, main
from vllm.server.server_args import ServerArgs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ASSIGNMENT = re.compile(r'(\w+)="([^"]*)"')


def commands_of(page: str) -> list[list[str]]:
    """The arguments of each line of shell, whose variables are replaced."""
    found: list[list[str]] = []
    variables: dict[str, str] = {}
    for kind, text in _BLOCK.findall(page):
        for line in text.replace("\\\n", "").splitlines() if kind == "sh" else ():
            if match := _ASSIGNMENT.fullmatch(line):
                variables[match[1]] = match[2]
                continue
            for name, value in variables.items():
                line = line.replace(f"${name}", value)
            found.append(shlex.split(line, comments=True))
    return found


AUDITS = [words[2:] for words in commands_of(PAGE) if words[:2] == ["vllm", "audit"]]


def given(words: list[str], flag: str) -> list[str]:
    return [value for each, value in itertools.pairwise(words) if each == flag]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "m", max_position_embeddings=512)


@pytest.fixture
def folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the page names."""
    for name in ("examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "reviews.jsonl").symlink_to(ROOT / "examples" / "data" / "reviews.jsonl")
    (tmp_path / EMBEDDED).symlink_to(model)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "LICENSE").symlink_to(ROOT / "LICENSE")
    for words in AUDITS:
        reference = ModelSpec.parse(*given(words, "--reference"), None)
        for spec in (reference, *(ModelSpec.parse(each, reference) for each in given(words, "--candidate"))):
            if spec.path is not None and not (tmp_path / spec.path).exists():
                (tmp_path / spec.path).symlink_to(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pretended(command: list[str], input: bytes, **_: object) -> subprocess.CompletedProcess[bytes]:
    """Rows with random labels, or texts of a position."""
    job = pickle.loads(input)
    generator = random.Random(str(job.spec))
    lines = [json.loads(line) for line in job.file.read_text().splitlines()][: job.limit]
    with job.output.open("w") as rows:
        for index, fields in enumerate(lines):
            own: dict[str, object] = {"own_logprobs": [-1.0], "kl": [0.1], "same_top": [1]}
            if job.labels is not None:
                logprobs = {label: -generator.expovariate(1) for label in job.labels}
                own = {"logprobs": logprobs, "ranks": dict.fromkeys(job.labels, 1), "label_mass": 0.5}
            rows.write(f"{json.dumps({**fields, **own, 'index': index, 'num_prompt_tokens': index})}\n")
    cost = {"num_rows": len(lines), "num_failed": 0, "failure": None, "seconds": 1, "loading_seconds": 1, "peak_mib": 1}
    cost_path(job.output).write_text(json.dumps(cost))
    return subprocess.CompletedProcess(command, 0, b"")


@pytest.mark.parametrize("place", range(len(AUDITS)))
def test_each_audit_can_be_asked(place: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, models and vocabularies pass, and readings become a result."""
    monkeypatch.setattr(readings.subprocess, "run", pretended)
    code = main(["audit", *AUDITS[place], "--quiet", "--output", "audit.json"])
    found = json.loads((folder / "audit.json").read_text())
    budget = found["budget"]
    assert code == (1 if budget is not None and budget["cheapest"] is None else 0)
    assert [each["name"] for each in found["candidates"]] == given(AUDITS[place], "--candidate")


def test_the_audit_of_facts_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_here(monkeypatch)
    (words,) = (words for words in AUDITS if "facts" in words[0] and "--limit" not in words)
    assert main(["audit", *words, "--limit", "2", "--quiet", "--output", "audit.json"]) == 0
    candidates = {each["name"]: each for each in json.loads((folder / "audit.json").read_text())["candidates"]}
    assert all(each["rows"] == 2 for each in candidates.values())
    assert candidates["reference"]["labels"]["kl_mean"] == 0 < candidates["bfloat16"]["labels"]["kl_mean"]


def test_the_lines_of_python_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_here(monkeypatch)
    (block,) = (text for kind, text in _BLOCK.findall(PAGE) if kind == "python")
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(block, names)
    flips, kl = said.getvalue().split()
    assert int(flips) >= 0 and float(kl) > 0


def test_a_server_is_started_as_the_page_says() -> None:
    (words,) = (words[1:] for words in commands_of(PAGE) if words[:2] == ["vllm", "serve"])
    args = ServerArgs.from_cli_args(build_parser().parse_args(words))
    serve.check_args(args)
    assert args.audit_share == 0.01 and args.audit_reference == "MODEL:float32"
