"""`logits_indices` from a server over two ranks, as curl and the openai client ask for them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from byte_tokenizer import VOCAB_SIZE
from live_server import LiveServer
from tiny_llm import make_tiny_llm

from vllm import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, INDICES = "The sky is", [2, VOCAB_SIZE // 2, VOCAB_SIZE - 1, 65]
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "logits_indices": INDICES}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(folder, "--tensor-parallel-size", "2", env={"OMP_NUM_THREADS": "1"}) as server:
        yield server


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[dict[int, float]]:
    """One rank's logits of the ids, by position."""
    params = SamplingParams(max_tokens=3, temperature=0, logprob_token_ids=INDICES)
    (output,) = make_tiny_llm(folder).generate([PROMPT], params, use_tqdm=False)
    return [{index: position[index].logit for index in INDICES} for position in output.outputs[0].logprobs]


def assert_values(found: list[dict[str, float]], expected: list[dict[int, float]]) -> None:
    assert [[int(index) for index in values] for values in found] == [list(values) for values in expected]
    for values, wanted in zip(found, expected, strict=True):
        # The model's sums differ by their order.
        assert list(values.values()) == pytest.approx(list(wanted.values()), abs=1e-3)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: LiveServer, expected: list[dict[int, float]]) -> None:
    command = ["curl", "-sS", "--max-time", "60", f"{server.url}/v1/completions"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(BODY)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    (choice,) = json.loads(done.stdout)["choices"]
    assert_values(choice["logits_values_per_token"], expected)


def test_the_openai_client(server: LiveServer, expected: list[dict[int, float]]) -> None:
    fields = {name: value for name, value in BODY.items() if name != "logits_indices"}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        completion = client.completions.create(**fields, extra_body={"logits_indices": INDICES})
        chat = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=2,
            temperature=0,
            extra_body={"logits_indices": INDICES, "chat_template": "{{ messages[0]['content'] }}"},
        )
    assert_values(completion.choices[0].model_extra["logits_values_per_token"], expected)
    values = chat.choices[0].model_extra["logits_values_per_token"]
    assert [list(map(int, position)) for position in values] == [INDICES] * 2
