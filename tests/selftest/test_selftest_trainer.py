"""The engine's logprobs of sampled tokens are those of transformers' forward, and an engine that errs is found out."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models_util import ARCHITECTURES, make_random_model
from tiny_llm import is_empty

from vllm import LLM
from vllm.layers.linear import LinearBase
from vllm.selftest.trainer import LIMIT, Deviation, Sampled, Trainer, compare, make_prompts, sample

MAX_TOKENS = 6
# The limit of bfloat16, whose significands have 8 bits, after the few layers of these models.
HALF_LIMIT = 0.2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder for each random model, made once."""
    made: dict[str, Path] = {}

    def get(arch: str) -> Path:
        if arch not in made:
            made[arch], _ = make_random_model(arch, "odd", tmp_path_factory.mktemp("model"))
        return made[arch]

    return get


def deviations(folder: Path, dtype: str, kind: str, temperature: float = 1.0, **fields: Any) -> list[Deviation]:
    llm = LLM(str(folder), dtype=dtype, skip_tokenizer_init=True, max_model_len=128, **fields)
    engine = llm.llm_engine
    sampled = sample(engine, make_prompts(engine, 2, MAX_TOKENS, seed=0), MAX_TOKENS, temperature, seed=0)
    assert is_empty(llm)
    return compare(sampled, Trainer(str(folder), kind).logprobs(sampled, temperature))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ratios_are_1_in_float32(arch: str, folder: Callable[[str], Path]) -> None:
    rows = deviations(folder(arch), "float32", "float32")
    # Prompts of 8, 40 and 122 tokens.
    assert [(row.context, row.tokens) for row in rows] == [(None, 36), (64, 24), (256, 12)]
    assert rows[0].worst == max(row.worst for row in rows) <= LIMIT


def test_logprobs_are_at_the_temperature(folder: Callable[[str], Path]) -> None:
    assert deviations(folder("llama"), "float32", "float32", temperature=0.6)[0].worst <= LIMIT


@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
def test_half_precision_is_farther_but_near(kind: str, folder: Callable[[str], Path]) -> None:
    row = deviations(folder("qwen3"), "bfloat16", kind)[0]
    assert LIMIT < row.worst < HALF_LIMIT
    assert row.mean <= row.p99 <= row.worst


def test_an_error_of_the_engine_is_found(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LinearBase.forward
    monkeypatch.setattr(LinearBase, "forward", lambda self, x, norm=None: plain(self, x, norm) * 1.01)
    assert deviations(folder("llama"), "float32", "float32")[0].worst > LIMIT


def test_distances_of_ratios() -> None:
    short = Sampled([1] * 63, [2, 3], np.log([0.5, 0.25]))
    long = Sampled([1] * 300, [4], np.log([0.125]))
    trainer = [np.log([0.6, 0.2]), np.log([0.125])]
    everything, first, last = compare([short, long], trainer)
    assert everything == Deviation(None, 3, pytest.approx(0.4 / 3), pytest.approx(0.2), pytest.approx(0.2))
    assert (first.context, first.tokens, first.worst) == (64, 2, pytest.approx(0.2))
    assert (last.context, last.tokens, last.worst) == (1024, 1, 0)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_trainer_without_a_value_is_far(value: float) -> None:
    (row, _) = compare([Sampled([1], [2], np.zeros(1))], [np.array([value])])
    assert row.worst == (math.inf if math.isnan(value) else 1.0)
