"""Every example of docs/scoring.md runs, and a recipe's three ways give the same scores."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer

import vllm
from vllm import LLM
from vllm.loader import NO_EMBEDDED_MODEL, embedded_model_path

pytestmark = pytest.mark.skipif(embedded_model_path() is None, reason=NO_EMBEDDED_MODEL)

PAGE = Path(__file__).parents[2] / "docs" / "scoring.md"
TEXT = PAGE.read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000"
SECTIONS = {
    title: re.findall(r"```(\w+)\n(.*?)```", body, re.DOTALL)
    for title, body in re.findall(r"^##? (.+?)\n(.*?)(?=^##? |\Z)", TEXT, re.MULTILINE | re.DOTALL)
}
RECIPES = [title for title in SECTIONS if title.startswith("Recipe: ")]
# bfloat16, by processes that differ in how many threads they have.
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def run(llm: LLM, live_server: LiveServer):
    """Run a block, once: a script's variables, or what curl printed."""
    results: dict[str, dict[str, Any]] = {}

    def run_block(kind: str, code: str) -> dict[str, Any]:
        if code not in results:
            here = code.replace(URL, live_server.url)
            results[code] = run_python(here) if kind == "python" else run_shell(here)
        return results[code]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(vllm), "LLM", lambda: llm)
        yield run_block


def run_python(code: str) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    exec(compile(code, PAGE.name, "exec"), variables)
    return variables


def run_shell(code: str) -> dict[str, Any]:
    done = subprocess.run(["bash", "-euc", code], stdout=subprocess.PIPE, check=True, timeout=120)
    return json.loads(done.stdout)


@pytest.mark.parametrize("title", SECTIONS)
def test_every_block_runs(run, title):
    for kind, code in SECTIONS[title]:
        assert kind in ("python", "sh", "json")
        if kind == "sh" and shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        if kind != "json":
            result = run(kind, code)
            assert "error" not in result


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("title", RECIPES)
def test_the_ways_of_a_recipe_agree(run, title):
    (offline, curl, client) = SECTIONS[title][:3]
    assert [kind for kind, _ in (offline, curl, client)] == ["python", "sh", "python"]
    expected = run(*offline)["scores"]
    assert run(*client)["scores"] == pytest.approx(expected, abs=TOLERANCE)
    data = run(*curl)["data"]
    if title == "Recipe: judge":
        shares = [[label["probability"] for label in item["labels"]] for item in data]
        scores = [sum(grade * share for grade, share in enumerate(each, start=1)) for each in shares]
        assert scores == pytest.approx(expected, abs=5 * TOLERANCE)
    else:
        assert [item["score"] for item in data] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_answer_that_is_shown_has_the_answers_fields(run):
    (shown,) = [json.loads(code) for kind, code in SECTIONS["Answers"] if kind == "json"]
    answer = run(*SECTIONS["Recipe: reranker"][1])
    assert shown.keys() == answer.keys()
    assert shown["usage"].keys() == answer["usage"].keys()
    assert shown["data"][0].keys() == answer["data"][0].keys()
    assert shown["data"][0]["labels"][0].keys() == answer["data"][0]["labels"][0].keys()


def test_the_limits_that_are_named_are_the_real_ones():
    from vllm.server.server_args import ServerArgs
    from vllm.server.serving.labels.item_scores import MAX_READINGS, MAX_TOKENS

    for limit in (ServerArgs.max_prompts_per_request, MAX_READINGS, MAX_TOKENS):
        assert f"{limit:,}" in TEXT


def test_links_lead_somewhere():
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in SECTIONS}
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= anchors
    assert len(RECIPES) == 4
