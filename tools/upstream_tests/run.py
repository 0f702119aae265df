"""Upstream's own tests over our engine: `python tools/upstream_tests/run.py TESTS [FILE ...]`.

TESTS is the folder of upstream's tests (from its source distribution). They run from a copy in a temporary folder in
which models' names are replaced by one tiny random model and the shared fixtures by those of support/; needs
pytest-asyncio. marks.toml says what runs, and why the rest does not. Prints one line a file: collected, passed, failed,
skipped; then each failure in a line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import survey
from marks import MARKS, reasons

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SUPPORT = ROOT / "tests" / "support"
MODELS = ROOT / "tests" / "models"

_GRACE_SECONDS = 30.0
# A row of the page has so many cells.
_NUM_CELLS = 7
_REFUSED = "refused by name"
_INI = "[pytest]\nasyncio_mode = strict\nasyncio_default_fixture_loop_scope = function\n"


@dataclass
class Result:
    """One file's counts, and a line for each kind of failure and skip."""

    file: str
    passed: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    trouble: str = ""

    def row(self) -> str:
        collected = self.passed + len(self.failed) + self.skipped.total()
        return f"{self.file:58} {collected:9} {self.passed:6} {len(self.failed):6} {self.skipped.total():7}"


def main() -> None:
    """Run what the command line names and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="the folder of upstream's tests")
    parser.add_argument("files", nargs="*", default=MARKS["files"], help="files, folders or patterns in it")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one file")
    parser.add_argument("-k", default="", help="as pytest's")
    parser.add_argument("--document", type=Path, help="write the table there, as markdown; it keeps other files' rows")
    parser.add_argument("--verbose", action="store_true", help="show pytest's own output")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(arguments.tests.resolve(), work)
        files = [file for name in arguments.files for file in expand(work / "tests", name)]
        print(f"{'file':58} collected passed failed skipped", flush=True)
        results: list[Result] = []
        for file in files:
            results.append(run(work, file, arguments))
            print(results[-1].row(), results[-1].trouble, flush=True)
            report(results[-1])
        if arguments.document is not None:
            rows = rows_of(arguments.document) | {result.file: cells(result) for result in results}
            page = document(rows, [result for result in results if result.failed])
            sections = survey.document(arguments.tests, rows)
            arguments.document.write_text("\n".join([*page, *sections]) + "\n")
    passed, failed = sum(result.passed for result in results), sum(len(result.failed) for result in results)
    print(f"\n{passed} passed, {failed} failed, {sum(result.skipped.total() for result in results)} skipped")


def prepare(tests: Path, work: Path) -> None:
    """Copy the tests to work/tests, with the model's folder for models' names and our shared fixtures."""
    sys.path[:0] = [str(SUPPORT), str(MODELS), str(HERE / "support"), str(ROOT)]
    from adapter_model import make_adapter_of
    from pooling_models import make_pooling_models
    from tiny_vision import ASSISTANT, make_chat_model
    from word_model import make_word_model

    model = make_word_model(
        work / "tiny", (file.read_text() for file in sorted(tests.rglob("*.py"))), markers=MARKS["markers"]
    )
    pooling = make_pooling_models(work)
    places = dict.fromkeys(MARKS["models"], model)
    places |= {name: pooling[kind] for kind, names in MARKS["pooling_models"].items() for name in names}
    places |= dict.fromkeys(MARKS["adapters"], make_adapter_of(model, work / "adapter"))
    for family, others in MARKS["vision_models"].items():
        make_chat_model(family, work / family, ASSISTANT)
        places |= dict.fromkeys(others, work / family)
    copy = work / "tests"
    shutil.copytree(tests, copy, ignore=shutil.ignore_patterns("__pycache__", "kernels", "compile", "distributed"))
    if (tests.parent / "examples").is_dir():
        shutil.copytree(tests.parent / "examples", work / "examples")
    (work / "pytest.ini").write_text(_INI)
    names = sorted(places, key=len, reverse=True)
    for file in copy.rglob("*.py"):
        text = old = file.read_text()
        # Whose names are folders of its own.
        kept = MARKS["adapters"] if "lora_resolvers" in file.parts else ()
        for name in (each for each in names if each not in kept):
            for quote in "\"'":
                text = text.replace(f"{quote}{name}{quote}", f"{quote}{places[name]}{quote}")
        if text != old:
            file.write_text(text)
    shutil.copy(HERE / "support" / "absent.py", work)
    for name, source in (
        ("conftest.py", "fixtures.py"),
        ("utils.py", "servers.py"),
        ("models/utils.py", "model_helpers.py"),
    ):
        shutil.copy(HERE / "support" / source, copy / name)
    # Fixtures of several devices, which others import.
    (copy / "distributed").mkdir()
    (copy / "distributed" / "conftest.py").write_text("publisher_config = random_port = None\n")


def expand(tests: Path, name: str) -> list[str]:
    """The test files that a file, a folder or a pattern names, relative to the tests."""
    pattern = f"{name}/**/test_*.py" if (tests / name).is_dir() else name
    return [str(path.relative_to(tests)) for path in sorted(tests.glob(pattern))]


def run(work: Path, file: str, arguments: argparse.Namespace) -> Result:
    """One file in a pytest of its own."""
    folders = [str(each) for each in (ROOT, SUPPORT, MODELS, work)]
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    skips = reasons("tests") | dict.fromkeys(MARKS["run"], "")
    tables = {
        "SKIPS": sorted(skips.items(), key=lambda item: -len(item[0])),
        "ABSENT": reasons("names"),
        "DROPPED_FLAGS": MARKS["dropped_flags"],
    }
    tables["ADAPTERS"] = dict.fromkeys(MARKS["adapters"], str(work / "adapter"))
    # Their models have longer contexts than ours.
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    if file.startswith(tuple(MARKS["any_tokenizer"])):
        env["UPSTREAM_TOKENIZER"] = str(work / "tiny")
    env |= {f"UPSTREAM_{name}": json.dumps(table) for name, table in tables.items()}
    xml = work / "result.xml"
    xml.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={work}", "-c", "pytest.ini"]
    command += [f"--junitxml={xml}", "--tb=short", f"tests/{file}", *(["-k", arguments.k] if arguments.k else [])]
    output = None if arguments.verbose else subprocess.DEVNULL
    result = Result(file)
    process = subprocess.Popen(command, cwd=work, env=env, stdout=output, stderr=output)
    try:
        process.wait(arguments.timeout)
    except subprocess.TimeoutExpired:
        result.trouble = f"not ended after {arguments.timeout:.0f} s"
        process.send_signal(signal.SIGINT)  # pytest still writes what it has
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if xml.exists():
        read(xml, result)
    elif not result.trouble:
        result.trouble = "cannot be collected"
    return result


def read(xml: Path, result: Result) -> None:
    """Fill the result from pytest's report."""
    for case in ET.parse(xml).getroot().iter("testcase"):
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skip = case.find("skipped")
        if bad is not None:
            message = bad.get("message", "")
            if message == "collection failure":
                message = " ".join(line[2:].strip() for line in (bad.text or "").splitlines() if line.startswith("E "))
            result.failed.append((case.get("name", ""), " ".join(message.split())[:300]))
        elif skip is not None:
            result.skipped[skip.get("message", "")] += 1
        else:
            result.passed += 1


def report(result: Result) -> None:
    """A line for each failure, then for each reason of a skip."""
    kinds: dict[str, list[str]] = {}
    for name, message in result.failed:
        kinds.setdefault(message, []).append(name)
    for message, names in kinds.items():
        print(f"    FAILED {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {message}")
    for reason, count in result.skipped.items():
        print(f"    skipped {count}: {reason[:150]}")


_HEAD = """# Upstream's own tests

`python tools/upstream_tests/run.py TESTS [FILE ...] --document docs/upstream_tests.md` makes this page: it runs the
tests of upstream's source distribution (version 0.33.0) over this engine on a CPU, with small models in the place of
theirs and stand-ins for their shared fixtures. Why a test is left out stands in
[marks.toml](../tools/upstream_tests/marks.toml). "run": the day; earlier runs did not note it.
"""


def rows_of(path: Path) -> dict[str, list[str]]:
    """The cells of an earlier page's rows, by file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    rows = [row if len(row) == _NUM_CELLS else [*row[:-1], "earlier", row[-1]] for row in found]
    return {row[0].strip("`"): row[1:] for row in rows}


def document(rows: dict[str, list[str]], failed: list[Result]) -> list[str]:
    """The page's lines: what was collected in all, and a row a file. `failed`: the results that name failed tests."""
    num_collected, num_passed, num_failed, num_left = (
        sum(int(row[index]) for row in rows.values()) for index in range(4)
    )
    whole = sum(row[0] == row[1] != "0" for row in rows.values())
    lines = [
        _HEAD,
        f"{len(rows)} files have {num_collected:,} tests (one for each set of parameters): {num_passed:,} pass, "
        f"{num_failed:,} fail, and {num_left:,} are left out. {whole} files pass whole.",
        "",
        "| file | collected | passed | failed | left out | run | because |",
        "|---|---|---|---|---|---|---|",
        *(f"| `{file}` | {' | '.join(row)} |" for file, row in rows.items()),
    ]
    lines += ["", "## Failed", ""] if failed else []
    return lines + [f"- `{each.file}`: {', '.join(f'`{_plain(name)}`' for name, _ in each.failed)}" for each in failed]


def cells(result: Result) -> list[str]:
    """A row of the page, without the file's name."""
    known = {*MARKS["because"], _REFUSED}
    reasons: Counter[str] = Counter()
    for reason, count in result.skipped.items():
        reasons[reason if reason in known else "a mark of the test's own, or of its devices"] += count
    skipped = result.skipped.total()
    counts = [result.passed + len(result.failed) + skipped, result.passed, len(result.failed), skipped]
    because = [f"{reason}: {count}" if len(reasons) > 1 else reason for reason, count in reasons.most_common()]
    because += filter(None, [result.trouble])
    return [*map(str, counts), datetime.date.today().isoformat(), "; ".join(because)]


def _plain(name: str) -> str:
    """A test's name without its parameters, which may hold folders."""
    return name.partition("[")[0]


if __name__ == "__main__":
    main()
