"""Data sets scored on a Ray cluster: what `LLM.score_labels` reads, each row once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_cluster import actor_pids, kill_an_actor_at_first_part
from tiny_llm import make_tiny_llm, make_tiny_model

pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")

from vllm.batch import score_dataset

LABELS = [" a", "the stop"]
NUM_ROWS = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def dataset(ray_cluster: str) -> Any:
    import pyarrow as pa
    import ray.data

    texts = [f"the stop {i}" for i in range(NUM_ROWS)]
    texts[5:7] = [None, "far too long " * 20]
    # "error" is a column that the results replace.
    columns = {"key": [f"k{i}" for i in range(NUM_ROWS)], "body": texts, "stars": range(NUM_ROWS), "error": texts}
    return ray.data.from_arrow(pa.table(columns))


def options(model: Path, replicas: int = 2) -> dict[str, Any]:
    return {
        "text_field": "body",
        "template": "{stars}: {text}",
        "replicas": replicas,
        "cpus_per_replica": 1,
        "batch_size": 8,
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 128,
    }


def check(rows: list[dict[str, Any]], model: Path) -> None:
    """All rows, each once, in any order, with what one engine reads."""
    rows = sorted(rows, key=lambda row: row["stars"])
    assert [row["key"] for row in rows] == [f"k{i}" for i in range(NUM_ROWS)]
    assert rows[5]["error"] == "'body' must be a string, got null" and rows[5]["probs"] is None
    assert "the prompt has 263 tokens" in rows[6]["error"]
    good = [row for row in rows if row["stars"] not in (5, 6)]
    prompts = [f"{row['stars']}: {row['body']}" for row in good]
    for row, scores in zip(good, make_tiny_llm(model).score_labels(prompts, LABELS, use_tqdm=False), strict=True):
        assert row["error"] is None and row["prediction"] == scores.best.label
        assert row["num_prompt_tokens"] == len(scores.prompt_token_ids)
        # Sums of float32 readings; what shares a batch decides their last bits.
        np.testing.assert_allclose([row["logprobs"][name] for name in LABELS], scores.logprobs, rtol=1e-5)
        np.testing.assert_allclose([row["probs"][name] for name in LABELS], scores.probabilities, rtol=1e-4)
        assert [row["ranks"][name] for name in LABELS] == [label.token_ranks[0] for label in scores.labels]
        assert [row["token_ranks"][name] for name in LABELS] == [label.token_ranks for label in scores.labels]


def test_a_plan_has_the_rows_with_their_scores(dataset: Any, model: Path) -> None:
    check(score_dataset(dataset, LABELS, **options(model, replicas=1)).take_all(), model)


def test_written_with_an_actor_killed_and_continued(
    dataset: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    output = tmp_path / "out"
    score_dataset(dataset.limit(48), LABELS, output=output, id_field="key", **options(model, replicas=1))
    assert pq.read_table(output).num_rows == 48
    there = {path: path.read_bytes() for path in output.iterdir()}

    killed = kill_an_actor_at_first_part(monkeypatch)
    rows = score_dataset(dataset, LABELS, output=output, id_field="key", **options(model)).take_all()
    assert killed and killed[0] not in actor_pids()
    check(rows, model)
    assert all(path.read_bytes() == content for path, content in there.items())

    with pytest.raises(ValueError, match=r"was made from labels \[' a', 'the stop'\], not \[' a'\]; name another"):
        score_dataset(dataset, LABELS[:1], output=output, id_field="key", **options(model))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text_field": "text"}, "no column 'text'; there is 'key', 'body'"),
        ({"template": "{none}: {text}"}, "no column 'none'"),
        ({"template": "nothing"}, "it has no field"),
        ({"labels": "a"}, "labels must be a list"),
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"replicas": 9, "cpus_per_replica": None}, "has room for 2 actors of one CPU each, not for 9"),
        ({"output": "out"}, "output needs an id_field"),
        ({"output": "out", "id_field": "id"}, "no column 'id'"),
    ],
)
def test_refused_before_anything_starts(changed: dict[str, Any], message: str, dataset: Any, model: Path) -> None:
    with pytest.raises(ValueError, match=message):
        score_dataset(dataset, **{"labels": LABELS, **options(model), **changed})


def test_arguments_that_no_engine_has(dataset: Any) -> None:
    with pytest.raises(TypeError, match="max_modellen"):
        score_dataset(dataset, LABELS, text_field="body", max_modellen=1)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="Ray is not installed: pip install"):
        score_dataset(None, LABELS)
