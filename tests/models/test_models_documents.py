"""docs/models.md is what the registry says, and docs/adding_a_model.md works as it is written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import models_table
import pytest
import survey_architectures
import transformers
from tiny_models import make_tiny, reference

from vllm import ModelRegistry

GUIDE = Path(__file__).parents[2] / "docs" / "adding_a_model.md"


def test_the_table_of_models_is_of_now():
    document = models_table.DOCUMENT.read_text(encoding="utf-8")
    assert document == models_table.render(document), "run tests/support/models_table.py"


@pytest.mark.skipif(not transformers.__version__.startswith("5.23."), reason="another version has other architectures")
def test_every_architecture_of_transformers_was_surveyed():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    results = survey_architectures.load()
    assert set(results) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    assert {status for status, _ in results.values()} <= set(survey_architectures.STATUSES)


def test_the_guide_to_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, use = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_model.py").write_text(module, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ModelRegistry, "_models", dict(ModelRegistry._models))
    folder = tmp_path / "model"
    model = make_tiny("arcee", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["MyModelForCausalLM"], "dtype": "float32"}
    path.write_text(json.dumps(config))
    names: dict[str, Any] = {"folder": str(folder)}
    # There is no tokenizer in the folder.
    exec(use.replace("LLM(folder)", "LLM(folder, skip_tokenizer_init=True)"), names)
    (output,) = names["outputs"]
    expected = reference(model, [1, 2, 3])[-1]
    reading = output.outputs[0].logprobs[0]
    # float32's rounding over four layers, summed in another order.
    for token_id in (5, 6, int(expected.argmax())):
        assert reading[token_id].logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
