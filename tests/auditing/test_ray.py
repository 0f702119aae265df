"""`vllm audit --backend ray`: the readings of a cluster's engines are those of this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_llm import make_tiny_model

pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")


def test_an_audit_on_a_cluster_is_that_without_one(tmp_path: Path) -> None:
    model, rows = make_tiny_model(tmp_path / "m"), tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'text': f'row {i} of some'})}\n" for i in range(12)))
    from vllm.auditing.audits import Options, run

    tables = []
    for name, more in (("here", {}), ("ray", {"backend": "ray", "replicas": 1, "replica_cpus": 1})):
        options = Options(
            rows=rows, kind="labels", reference=f"{model}:float32", candidates=["bfloat16"], quiet=True,
            readings=tmp_path / name, args={"labels": ["a", "b"], "template": "{text}:", **more},
            engine={"max_model_len": 128},
        )  # fmt: skip
        found = run(options)
        tables.append(found.candidates[0].label_tables[""])
    assert tables[0].index.tolist() == tables[1].index.tolist() == list(range(12))
    for each in ("reference", "candidate"):
        assert getattr(tables[0], each).tolist() == getattr(tables[1], each).tolist()
    assert found.reference.seconds > 0 and found.to_dict()["reference"]["peak_mib"] is None
