"""`vllm score` killed and continued: the output is the one of a run that nobody stopped."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preloaded import FORKED
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM
from vllm.cli.main import main
from vllm.scoring import batches as score_batches
from vllm.scoring import run as score_run

NUM_TEXTS, BATCH_ROWS = 61, 8
LABELS = ["a", " the", "the stop", "stop it"]

# Runs the command and kills itself as soon as so many things have happened: a byte was written, or a step was computed.
KILLED_RUN = """
import os, signal, sys
from vllm.scoring import batches as score_batches, rows as score_rows, run
from vllm.cli.main import main
from vllm.v1.engine.llm_engine import LLMEngine

bytes_left, steps_left = int(sys.argv[1]), int(sys.argv[2])
score_batches.BATCH_ROWS = int(sys.argv[3])
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

class Mortal(score_rows.RowFile):
    def __enter__(self):
        class Writer:
            def __init__(self, file): self.file = file
            def __getattr__(self, name): return getattr(self.file, name)
            def write(self, data):
                global bytes_left
                self.file.write(data[:bytes_left])
                bytes_left -= len(data)
                if bytes_left <= 0:
                    self.file.flush()
                    die()
        self._file = Writer(self._file)
        return self

def step(self, run=LLMEngine.step):
    global steps_left
    steps_left -= 1
    if steps_left <= 0:
        die()
    return run(self)

run.RowFile, LLMEngine.step = Mortal, step
sys.exit(main(sys.argv[4:]))
"""
NEVER = 10**9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(model: Path) -> LLM:
    return make_tiny_llm(model)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    generator = random.Random(0)
    words = ["the stop", "cat", "é", "😀", "it is", "\u2028", "on"]
    texts = [" ".join(generator.choices(words, k=generator.randint(1, 12))) for _ in range(NUM_TEXTS)]
    texts[20] = "far too long " * 20
    Path("a.jsonl").write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)))


@pytest.fixture
def loaded(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr(score_run, "load", lambda args: tiny)
    monkeypatch.setattr(score_batches, "BATCH_ROWS", BATCH_ROWS)
    return tiny


def arguments(output: str, *more: str, labels: list[str] | None = None) -> list[str]:
    fixed = ["--template", "a cat that sat on a mat for long said {text}:", "--quiet", "--no-picture"]
    return ["score", "a.jsonl", "--labels", *(labels or LABELS), *fixed, "--output", output, *more]


def whole_run() -> bytes:
    assert main(arguments("whole.jsonl")) == 1
    return Path("whole.jsonl").read_bytes()


def scored_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> int:
    """How many prompts were scored during a call."""
    counts: list[int] = []
    plain = llm.score_labels

    def counted(prompts: Any, *rest: Any, **named: Any) -> Any:
        counts.append(len(prompts))
        return plain(prompts, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(llm, "score_labels", counted)
        call()
    return sum(counts)


def test_killed_at_random_points_and_resumed_until_done(model: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    engine = ["--model", str(model), "--dtype", "bfloat16", "--max-model-len", "128"]

    def run(output: str, num_bytes: int, num_steps: int, *more: str) -> int:
        limits = [str(num_bytes), str(num_steps), str(BATCH_ROWS)]
        command = [sys.executable, "-c", FORKED + KILLED_RUN, *limits, *arguments(output, *engine, *more)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert result.returncode == -signal.SIGKILL or "1 of 61 texts failed" in result.stderr, result.stderr
        return result.returncode

    assert run("whole.jsonl", NEVER, NEVER) == 1
    whole = Path("whole.jsonl").read_bytes()
    assert whole.count(b"\n") == NUM_TEXTS
    generator, output = random.Random(1), Path("killed.jsonl")
    torn, sizes = 0, [0]
    for attempt in range(4):
        num_bytes = generator.randrange(1, len(whole) // 4) if attempt % 2 == 0 else NEVER
        num_steps = generator.randrange(1, 4) if attempt % 2 else NEVER
        assert run("killed.jsonl", num_bytes, num_steps, "--resume") == -signal.SIGKILL
        content = output.read_bytes()
        assert whole.startswith(content)
        torn += not content.endswith(b"\n")
        sizes.append(content.count(b"\n"))
    assert torn and sizes == sorted(sizes) and 0 < sizes[-1] < NUM_TEXTS
    assert run("killed.jsonl", NEVER, NEVER, "--resume") == 1
    assert output.read_bytes() == whole


def test_every_length_that_a_kill_can_leave(loaded: LLM) -> None:
    whole = whole_run()
    Path("o.jsonl.meta.json").write_bytes(Path("whole.jsonl.meta.json").read_bytes())
    generator = random.Random(2)
    line_ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in [0, 1, *line_ends[6:10], len(whole) - 1, len(whole), *generator.choices(range(len(whole)), k=12)]:
        Path("o.jsonl").write_bytes(whole[:length])
        assert main(arguments("o.jsonl", "--resume")) == 1
        assert Path("o.jsonl").read_bytes() == whole


@pytest.mark.parametrize(("num_rows", "num_scored"), [(0, 60), (8, 52), (40, 21), (45, 21), (56, 5), (61, 0)])
def test_whole_batches_are_not_scored_again(
    num_rows: int, num_scored: int, loaded: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = whole_run().splitlines(keepends=True)
    Path("whole.jsonl").write_bytes(b"".join(lines[:num_rows]))
    assert scored_rows(loaded, monkeypatch, lambda: main(arguments("whole.jsonl", "--resume"))) == num_scored
    assert Path("whole.jsonl").read_bytes() == b"".join(lines)


def test_rows_are_there_while_the_run_goes_on(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = loaded.score_labels

    def watching(*args: Any, **named: Any) -> Any:
        seen.append(Path("o.jsonl").read_bytes().count(b"\n"))
        return plain(*args, **named)

    monkeypatch.setattr(loaded, "score_labels", watching)
    assert main(arguments("o.jsonl")) == 1
    assert seen == list(range(0, NUM_TEXTS, BATCH_ROWS))


def test_a_batch_is_scored_with_nothing_left_of_the_one_before(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def queried_and_hit() -> tuple[int, int]:
        stats = loaded.llm_engine.engine_core.scheduler.stats()
        return stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens

    def steps_of(*more: str) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        plain = loaded.score_labels

        def watching(*args: Any, **named: Any) -> Any:
            before = queried_and_hit()
            result = plain(*args, **named)
            seen.append(tuple(after - start for after, start in zip(queried_and_hit(), before, strict=True)))
            return result

        with monkeypatch.context() as patch:
            patch.setattr(loaded, "score_labels", watching)
            assert main(arguments("o.jsonl", *more)) == 1
        return seen

    whole = steps_of()
    lines = Path("o.jsonl").read_bytes().splitlines(keepends=True)
    Path("o.jsonl").write_bytes(b"".join(lines[:27]))
    assert steps_of("--resume") == whole[3:]
    assert all(hit for _, hit in whole)


def test_the_summary_of_a_resumed_run_covers_all_rows(loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_text("".join(f'{{"text": "{i}", "label": "a"}}\n' for i in range(20)))
    plain = [argument for argument in arguments("o.jsonl") if argument != "--quiet"]
    assert main(plain) == 0
    first = capsys.readouterr().out
    lines = Path("o.jsonl").read_bytes().splitlines(keepends=True)
    Path("o.jsonl").write_bytes(b"".join(lines[:8]))
    assert main([*plain, "--resume"]) == 0
    resumed = capsys.readouterr().out
    assert resumed.split("results:")[0] == first.split("results:")[0]
    accuracy = next(line for line in first.splitlines() if line.startswith("accuracy"))
    assert accuracy in resumed and " of 20 " in accuracy
    assert "resumed:    8 of 20 rows were there" in resumed and "(12 prompts" in resumed


def _fails(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("vllm score: error: ") and message in error and "\n" not in error


def test_an_output_that_exists_is_kept(loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    whole = whole_run()
    capsys.readouterr()
    _fails(arguments("whole.jsonl"), "whole.jsonl exists; --resume continues it, --overwrite replaces it", capsys)
    assert Path("whole.jsonl").read_bytes() == whole
    assert main(arguments("whole.jsonl", "--overwrite", labels=["x", "y"])) == 1
    assert json.loads(Path("whole.jsonl").read_bytes().splitlines()[0])["probs"].keys() == {"x", "y"}
    assert json.loads(Path("whole.jsonl.meta.json").read_text())["labels"] == ["x", "y"]
    assert main(arguments("whole.jsonl", "--overwrite")) == 1
    assert Path("whole.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--limit", "60"], "num_texts 61, not 60"),
        (["--labels", "a", " the"], "labels ['a', ' the', 'the stop', 'stop it'], not ['a', ' the'];"),
        (["--template", "{text}?"], "template 'a cat that sat on a mat for long said {text}:', not '{text}?';"),
        (["--model", "other"], "model None, not 'other';"),
        (["--dtype", "float16"], "dtype 'auto', not 'float16';"),
        (["--max-model-len", "100"], "max_model_len None, not 100;"),
    ],
)
def test_rows_of_another_kind_are_not_continued(
    more: list[str], message: str, loaded: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = whole_run()
    capsys.readouterr()
    _fails(arguments("whole.jsonl", "--resume", *more), message, capsys)
    assert Path("whole.jsonl").read_bytes() == whole


def test_the_size_of_a_step_may_change(loaded: LLM) -> None:
    whole = whole_run()
    Path("whole.jsonl").write_bytes(whole[: len(whole) // 2])
    assert main(arguments("whole.jsonl", "--resume", "--max-num-seqs", "4")) == 1
    assert Path("whole.jsonl").read_bytes() == whole


def test_other_texts_are_not_continued(loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    whole_run()
    capsys.readouterr()
    Path("a.jsonl").write_text(Path("a.jsonl").read_text().replace('"id": 60', '"id": 61'))
    _fails(arguments("whole.jsonl", "--resume"), "whole.jsonl was made from texts_sha256 '", capsys)


def test_an_output_that_is_not_ours(loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    lines = whole_run().splitlines(keepends=True)
    capsys.readouterr()
    output, meta = Path("whole.jsonl"), Path("whole.jsonl.meta.json")
    for bad in (lines[2:3], [b"not JSON\n"], [b"[1]\n"]):
        output.write_bytes(b"".join([*lines[:1], *bad, *lines[2:]]))
        _fails(arguments("whole.jsonl", "--resume"), "whole.jsonl:2: not row 1; --overwrite starts anew", capsys)
    meta.write_text("[]")
    _fails(arguments("whole.jsonl", "--resume"), "whole.jsonl.meta.json is not a JSON object", capsys)
    meta.unlink()
    _fails(arguments("whole.jsonl", "--resume"), "whole.jsonl.meta.json, which would tell what", capsys)


def test_two_runs_do_not_write_one_file(loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    whole = whole_run()
    capsys.readouterr()
    with Path("whole.jsonl").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for how in ("--resume", "--overwrite"):
            _fails(arguments("whole.jsonl", how), "another process is writing whole.jsonl", capsys)
    assert Path("whole.jsonl").read_bytes() == whole


def test_a_full_disk_is_an_error_that_can_be_resumed(loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    whole = whole_run()
    capsys.readouterr()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, hard))
    try:
        _fails(arguments("o.jsonl"), "cannot write o.jsonl: ", capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert os.path.getsize("o.jsonl") < len(whole)
    assert main(arguments("o.jsonl", "--resume")) == 1
    assert Path("o.jsonl").read_bytes() == whole
