"""All that the pages name exists: files and folders, and links between pages; and how comments begin."""

from __future__ import annotations

import pkgutil
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"),
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md")),
]
# It lists the files of upstream's tests.
FOREIGN_FILES = {"docs/upstream_tests.md"}
# Examples of names that a reader chooses, and files that commands write.
PLACEHOLDER = re.compile(r"NAME|OUTPUT|^my_|^compare\.md$")
A_FILE = re.compile(r"[\w./-]+\.(?:cpp|h|jsonl|md|pyi?|sh|svg|toml|txt)")
IN_A_TREE = re.compile(r"(?<![\w./-])(?:benchmarks|csrc|docker|docs|examples|tests|vllm)/[\w./-]*\w(?![\w*])")
A_MODULE = re.compile(r"`(vllm(?:\.\w+)+)`")
# They are no modules, but groups of entry points.
GROUPS = {"vllm.general_plugins", "vllm.logits_processors"}
# Pages with upstream's names, which tests/test_upstream_names.py looks up.
FOREIGN_NAMES = {"docs/migration.md"}


@cache
def known_places() -> frozenset[str]:
    """Every file and folder of the checkout, by its path and by each end of it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [path.split("/") for path in listed.stdout.splitlines()]
    return frozenset(
        "/".join(parts[start:end]) for parts in paths for end in range(1, len(parts) + 1) for start in range(end)
    )


def missing_places(page: str, text: str) -> list[str]:
    spans = [span.rstrip("/") for span in re.findall(r"`([^`\s]+)`", text)]
    named = [span for span in spans if A_FILE.fullmatch(span)]
    named += [path for path in IN_A_TREE.findall(text) if path not in named]
    links = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target]
    lost = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    return lost + [name for name in named if name not in known_places() and not PLACEHOLDER.search(name)]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in FOREIGN_FILES])
def test_paths_that_a_page_names_exist(page: str) -> None:
    assert missing_places(page, (ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in FOREIGN_FILES | FOREIGN_NAMES])
def test_modules_and_names_that_a_page_names_exist(page: str) -> None:
    for name in {*A_MODULE.findall((ROOT / page).read_text(encoding="utf-8"))} - GROUPS:
        pkgutil.resolve_name(name)


def test_every_package_is_in_the_architecture() -> None:
    packages = {path.parent.name for path in (ROOT / "vllm").glob("*/*.py")} - {"v1"}
    packages |= {f"v1/{path.parent.name}" for path in (ROOT / "vllm" / "v1").glob("*/*.py")}
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text[: text.index("## The path of one request")]
    assert sorted(package for package in packages if f"`{package}" not in table) == []


def test_a_lost_path_is_found() -> None:
    text = "`vllm/lost.py`, `lost.md`, [there](docs/lost.md), `README.md`, `vllm/ops`, `a.b`, [here](README.md#speed)"
    assert missing_places("README.md", text) == ["docs/lost.md", "vllm/lost.py", "lost.md", "docs/lost.md"]
    block = (
        "python benchmarks/lost.py --out benchmarks/NAME.json tests/ops/test_*.py\nhttps://a.org/docs/lost.md vllm/ops/"
    )
    assert missing_places("README.md", block) == ["benchmarks/lost.py"]


def test_comments_begin_with_a_subject() -> None:
    begun = re.compile(r'(?:"""|# |// )(?:Of|What|Those) ')
    sources = [path for room in ("vllm", "tests", "tools", "csrc", "benchmarks") for path in (ROOT / room).rglob("*.*")]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sources
        if path.suffix in (".py", ".cpp", ".h")
        for line in path.read_text(encoding="utf-8").splitlines()
        if begun.search(line)
    ]
    assert found == []
