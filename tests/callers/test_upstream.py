"""The page of upstream's own tests: what it counts, and what it says of files that are not run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "upstream_tests"))
import run as upstream
import survey
from marks import reasons

RESULT = """<testsuite>
<testcase name="a"/>
<testcase name="b[1]"><failure message="wrong"/></testcase>
<testcase name="c"><skipped message="LoRA"/></testcase>
<testcase name="d"><skipped message="needs a device"/></testcase>
</testsuite>"""


@pytest.fixture
def result(tmp_path: Path) -> upstream.Result:
    (tmp_path / "result.xml").write_text(RESULT)
    made = upstream.Result("test_one.py")
    upstream.read(tmp_path / "result.xml", made)
    return made


def test_the_page_counts_what_is_left_out_beside_what_passes(result: upstream.Result, tmp_path: Path) -> None:
    row = upstream.cells(result)
    assert row[:4] == ["4", "1", "1", "2"]
    assert row[5] == "LoRA: 1; a mark of the test's own, or of its devices: 1"
    rows = {"test_one.py": row, "test_two.py": ["3", "3", "0", "0", "earlier", ""]}
    page = "\n".join(upstream.document(rows, [result]))
    assert "2 files have 7 tests (one for each set of parameters): 4 pass, 1 fail, and 2 are left out" in page
    assert "1 files pass whole" in page
    assert "- `test_one.py`: `b`" in page
    (tmp_path / "page.md").write_text(page)
    assert upstream.rows_of(tmp_path / "page.md") == rows


def test_rows_of_the_page_without_days(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("| `test_one.py` | 3 | 2 | 0 | 1 | LoRA |\n")
    assert upstream.rows_of(tmp_path / "page.md") == {"test_one.py": ["3", "2", "0", "1", "earlier", "LoRA"]}
    assert upstream.rows_of(tmp_path / "none.md") == {}


def test_files_and_imports_by_reason(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "test_run.py").write_text("from vllm import LLM\nimport vllm.outputs as o\ndef test_a(): ...\n")
    (tmp_path / "kernels" / "test_k.py").write_text(
        "def test_a():\n    from vllm.v1.attention.ops.none import f, g\nasync def test_b(): ...\ndef helper(): ...\n"
    )
    (tmp_path / "odd" / "test_o.py").write_text("from vllm import no_such_name\nfrom json import loads\n")
    assert survey.num_functions(tmp_path) == {"kernels/test_k.py": 2, "odd/test_o.py": 0, "test_run.py": 1}
    lines = survey.document(tmp_path, ["test_run.py"])
    assert (
        "Of 3 files with 3 test functions, 2 with 2 are not run (a function with parameters counts once here):" in lines
    )
    assert f"| 1 | 2 | {reasons('folders')['kernels']} |" in lines
    assert "| 1 | 0 | not looked at yet |" in lines
    assert any(line.startswith("All files together import 5 names of `vllm`") and "2 can" in line for line in lines)
    assert f"| 2 | 1 | {reasons('imports')['vllm.v1.attention']} |" in lines
    assert "| 1 | 1 | no reason yet |" in lines


def test_the_longest_path_has_the_reason() -> None:
    known = {"a": "short", "a.b": "long"}
    found = [survey.reason(known, path, ".") for path in ("a", "a.c", "a.b.c", "ab", "")]
    assert found == ["short", "short", "long", None, None]
