"""Runs a tiny random model of each causal language model that transformers has as transformers' own module here, and
compares it with transformers. The results are data of docs/models.md.

`python tests/support/survey_architectures.py [MODEL_TYPE ...]` runs those (none: all), writes
tests/data/transformers_architectures.txt and prints the differences.
"""

from __future__ import annotations

import gc
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import VOCAB_SIZE, make_tiny, reference

from vllm.loader import resolve_model

DATA = Path(__file__).parents[1] / "data" / "transformers_architectures.txt"
STATUSES = ("runs", "refused", "untried")
_TOLERANCE = 1e-4
# Their configurations have parts, but they are one model.
_DENSE_PARTS = ("dbrx", "moshi", "mpt")


def load() -> dict[str, tuple[str, str]]:
    """By architecture, one of STATUSES and its reason."""
    lines = [line for line in DATA.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    parts = (line.split(" ", 2) for line in lines)
    return {name: (status, rest[0] if rest else "") for name, status, *rest in parts}


def save(results: dict[str, tuple[str, str]]) -> None:
    head = "# Made by tests/support/survey_architectures.py: architecture, what became of it, and why."
    lines = [" ".join([name, *filter(None, result)]) for name, result in sorted(results.items())]
    DATA.write_text("\n".join([head, *lines, ""]), encoding="utf-8")


def survey(model_type: str) -> tuple[str, str]:
    """Try an architecture: its status and the reason. AssertionError: it runs, with other numbers."""
    from transformers import CONFIG_MAPPING

    if getattr(CONFIG_MAPPING[model_type](), "sub_configs", None) and model_type not in _DENSE_PARTS:
        return _refusal(model_type, "made of several models")
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = make_tiny(model_type, Path(folder))
            prompt = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
            reference(model, prompt)
        except Exception as error:  # a configuration may want anything
            print(f"{model_type}: no tiny model: {type(error).__name__}: {error}")
            return _refusal(model_type, "the tests have no tiny model of it")
        try:
            output = _generate(folder, prompt)
        except ValueError as error:
            return "refused", _reason(error)
        _compare(model, prompt, output)
        return "runs", ""


def _refusal(model_type: str, otherwise: str) -> tuple[str, str]:
    """The reason why a model of the usual size is refused before its weights are read; else "untried"."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    with tempfile.TemporaryDirectory() as folder:
        config = CONFIG_MAPPING[model_type]()
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
        config.save_pretrained(folder)
        try:
            resolve_model(folder, needs_weights=False, model_impl="transformers")
        except ValueError as error:
            return "refused", _reason(error)
    return "untried", otherwise


def _reason(error: ValueError) -> str:
    return re.sub(r"^\S+ cannot run as .*?: ", "", str(error)).split("\n")[0]


def _generate(folder: str, prompt: list[int]) -> Any:
    from vllm import LLM, SamplingParams

    fields: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "max_num_batched_tokens": 16}
    llm = LLM(folder, model_impl="transformers", skip_tokenizer_init=True, **fields)
    params = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    return llm.generate([prompt], params, use_tqdm=False)[0]


def _compare(model: Any, prompt: list[int], output: Any) -> None:
    tokens = list(output.outputs[0].token_ids)
    expected = reference(model, prompt + tokens)
    assert tokens == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
    for position in range(1, len(prompt)):
        reading = output.prompt_logprobs[position][prompt[position]].logprob
        assert abs(reading - float(expected[position - 1, prompt[position]])) < _TOLERANCE


def main(model_types: list[str]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    torch.set_num_threads(1)
    results = load() if DATA.exists() else {}
    for model_type in model_types or list(NAMES):
        try:
            result = survey(model_type)
        except Exception as error:  # the survey goes on
            print(f"{model_type}: {type(error).__name__}: {error}")
            result = "untried", "the survey failed"
        name = NAMES[model_type]
        # Several model types may have one class: what runs counts.
        if results.get(name, ("",))[0] != "runs":
            results[name] = result
        save(results)
        gc.collect()


if __name__ == "__main__":
    main(sys.argv[1:])
