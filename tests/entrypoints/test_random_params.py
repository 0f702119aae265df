"""Any value in any field: a request runs, or is refused by VLLMValidationError, and the engine goes on as before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_ids
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from param_strategies import FIELDS, JUNK, SOUND, makes_a_crowd, sampling_fields
from tiny_llm import is_empty, make_tiny_llm, make_tiny_model

from vllm import LLM, RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams

MAX_STEPS = 2000
PROMPTS = [
    "a",
    "the stop",
    "naïve 🙂",
    "x" * 126,
    "x" * 128,
    [5, 6, 7],
    {"prompt_token_ids": byte_ids("abc"), "cache_salt": "s"},
]
REPETITION = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=2)
PLAIN = SamplingParams(temperature=0, max_tokens=4, logprobs=2)


class Bench:
    """An engine, and the answer that it gives to a plain request."""

    def __init__(self, folder: Any) -> None:
        self.llm: LLM = make_tiny_llm(folder)
        self._steps = 0
        engine = self.llm.llm_engine
        step = engine.step

        def counted() -> Any:
            self._steps += 1
            assert self._steps < MAX_STEPS, "the engine does not come to an end"
            return step()

        engine.step = counted  # type: ignore[method-assign]
        self._expected = self._plain_answer()

    def _plain_answer(self) -> tuple[list[int], str]:
        (output,) = self._generate(["plain"], [PLAIN])
        return answer(output)

    def _generate(self, prompts: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
        self._steps = 0
        return self.llm.generate(prompts, params, use_tqdm=False)

    def attempt(self, fields: dict[str, Any], prompt: Any) -> RequestOutput | None:
        """Run a request beside a plain one; None when it was refused."""
        try:
            params = SamplingParams(**fields)
        except VLLMValidationError as error:
            # The engine has not seen it.
            assert_says_what_is_wrong(error)
            return None
        output = None
        try:
            output, companion = self._generate([prompt, "plain"], [params, PLAIN])
            assert answer(companion) == self._expected
        except VLLMValidationError as error:
            assert_says_what_is_wrong(error)
        assert is_empty(self.llm)
        assert self._plain_answer() == self._expected
        return output


def answer(output: RequestOutput) -> tuple[list[int], str]:
    return output.outputs[0].token_ids, output.outputs[0].text


def assert_says_what_is_wrong(error: VLLMValidationError) -> None:
    assert str(error) and (error.parameter or "").partition("[")[0] in (*FIELDS, "prompt"), error.parameter


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    # Thousands of tiny steps: threads would spend them waiting for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Bench(make_tiny_model(tmp_path_factory.mktemp("tiny")))
    torch.set_num_threads(threads)


def check(output: RequestOutput | None, fields: dict[str, Any]) -> None:
    """Every answer passes this."""
    if output is None:
        return
    assert output.finished and 1 <= len(output.outputs) <= 5
    for completion in output.outputs:
        assert completion.finish_reason in ("stop", "length", "error", "repetition")
        assert completion.finish_reason != "repetition" or fields.get("repetition_detection")
        assert (completion.finish_reason == "error") == bool(completion.error)
        assert len(completion.token_ids) <= 128
        if fields.get("detokenize") is False:
            assert completion.text == ""


def test_every_field_has_its_values() -> None:
    assert sorted(SOUND) == sorted(FIELDS)


@pytest.mark.parametrize("field", FIELDS)
def test_one_field_with_any_value(bench: Bench, field: str) -> None:
    for name, make in JUNK.items():
        value = make()
        if makes_a_crowd(field, value):
            continue
        fields = {"max_tokens": 2, field: value}
        try:
            check(bench.attempt(fields, "abc"), fields)
        except BaseException as error:
            error.args = (f"{field}={name}: {error}",)
            raise


@settings(max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(fields=sampling_fields(), prompt=st.sampled_from(PROMPTS))
@example(fields={}, prompt="a")
@example(fields={"max_tokens": 3, "allowed_token_ids": [0], "repetition_detection": REPETITION}, prompt="a")
def test_fields_together(bench: Bench, fields: dict[str, Any], prompt: Any) -> None:
    check(bench.attempt(fields, prompt), fields)
