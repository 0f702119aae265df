"""`vllm audit --backend ray`: the readings of a cluster's engines are those of this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models_util import make_hf_model
from tiny_adapters import make_adapter
from tiny_llm import make_tiny_model

pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")


def test_an_audit_on_a_cluster_is_that_without_one(tmp_path: Path, ray_cluster: str) -> None:
    model, rows = make_tiny_model(tmp_path / "m"), tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'text': f'row {i} of some'})}\n" for i in range(12)))
    make_adapter(tmp_path / "adapter", make_hf_model("llama", "small", vocab_size=268))
    from vllm.auditing.audits import Options, run

    tables = []
    for name, more in (("here", {}), ("ray", {"backend": "ray", "replicas": 1, "replica_cpus": 1})):
        options = Options(
            rows=rows, kind="labels", reference=f"{model}:float32", quiet=True, readings=tmp_path / name,
            candidates=[f"adapter={tmp_path / 'adapter'}"], engine={"max_model_len": 128},
            args={"labels": ["a", "b"], "template": "{text}:", **more},
        )  # fmt: skip
        found = run(options)
        tables.append([each.label_tables[""] for each in found.candidates])
    for here, there in zip(*tables, strict=True):
        assert here.index.tolist() == there.index.tolist() == list(range(12))
        for each in ("reference", "candidate"):
            assert getattr(here, each).tolist() == getattr(there, each).tolist()
    assert found.candidates[0].labels.kl_mean > 0
    assert found.reference.seconds > 0 and found.to_dict()["reference"]["peak_mib"] is None
