"""Requests with different adapters and with none in the same steps, against transformers with merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import VOCAB_SIZE, make_architecture
from test_architectures import check_readings, expected_logprobs
from tiny_adapters import give_adapters, linears, make_adapter, merged

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.usefixtures("one_thread")

# A query, key and value side by side, a gate beside what it is multiplied with, transposed weights, heads whose rows
# change places, one linear of the checkpoint that is three of the model's, factors that the model folds into weights.
FAMILIES = ("llama", "gpt2", "gpt_neox", "phi3", "gptj", "falcon_h1")


def make_engine(folder: Path, **fields: Any) -> LLM:
    usual: dict[str, Any] = dict(dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=24, max_num_seqs=8)
    usual |= dict(
        max_model_len=128, max_logprobs=VOCAB_SIZE, enable_prefix_caching=False, enable_lora=True, max_loras=3
    )
    return LLM(str(folder), **(usual | fields))


def worker_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.executor.worker


def load(llm: LLM, folders: list[Path]) -> list[LoRARequest]:
    """The adapters as requests, loaded and numbered from 1 on."""
    requests = [LoRARequest(f"a{number}", number, str(folder)) for number, folder in enumerate(folders, 1)]
    assert all([worker_of(llm).add_lora(request) for request in requests])
    return requests


def prompts(num_adapters: int, count: int = 8) -> list[list[int]]:
    """Their first tokens name the adapter, 0 = none, in turn."""
    generator = torch.Generator().manual_seed(5)
    lengths = [3 + 7 * (index % 5) for index in range(count)]
    rest = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    return [[index % (num_adapters + 1), *ids] for index, ids in enumerate(rest)]


def run(llm: LLM, asked: list[list[int]], num_steps: int = 4) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=num_steps, logprobs=5, prompt_logprobs=0, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": each} for each in asked], params, use_tqdm=False)


def check(models: list[Any], asked: list[list[int]], outputs: list[Any]) -> None:
    """Each request's readings are those of its own model."""
    for prompt, output in zip(asked, outputs, strict=True):
        want = expected_logprobs(models[prompt[0]], prompt + list(output.outputs[0].token_ids))
        check_readings(want, prompt, output)


def make(name: str, folder: Path) -> tuple[LLM, list[Any], list[Path]]:
    """An engine, the merged models, that without an adapter first, and the adapters."""
    model = make_architecture(name, folder / "model")
    last = sorted({name.rpartition(".")[2] for name in linears(model)})
    adapters = [
        make_adapter(folder / "all", model, rank=4, seed=1),
        make_adapter(folder / "some", model, rank=3, seed=2, targets=tuple(last[::2]), use_rslora=True),
        make_adapter(
            folder / "patterns", model, rank=2, seed=3, rank_pattern={r".*\.0\..*": 16}, alpha_pattern={"down_proj": 3}
        ),
    ]
    return make_engine(folder / "model"), [model, *(merged(model, each) for each in adapters)], adapters


@pytest.mark.parametrize("name", FAMILIES)
def test_readings_equal_those_of_merged_weights(name: str, tmp_path: Path) -> None:
    llm, models, adapters = make(name, tmp_path)
    requests = load(llm, adapters)
    give_adapters(llm, lambda prompt: requests[prompt[0] - 1] if prompt[0] else None)
    asked = prompts(len(adapters))
    check(models, asked, run(llm, asked))


def test_eager_steps_and_recorded_ones_are_equal(tmp_path: Path) -> None:
    llm, _, adapters = make("llama", tmp_path)
    eager = make_engine(tmp_path / "model", enforce_eager=True)
    asked = prompts(len(adapters))
    results = []
    for engine in (llm, eager):
        requests = load(engine, adapters)
        give_adapters(engine, lambda prompt, requests=requests: requests[prompt[0] - 1] if prompt[0] else None)
        results.append([output.outputs[0].cumulative_logprob for output in run(engine, asked)])
    assert results[0] == results[1]
    recorded = worker_of(llm).model_runner.replay.steps
    assert any(key[-1] for key in recorded._recorded)


def test_a_row_does_not_depend_on_its_neighbours_adapters(tmp_path: Path) -> None:
    llm, _, adapters = make("llama", tmp_path)
    requests = load(llm, adapters)
    give_adapters(llm, lambda prompt: requests[prompt[0] - 1] if prompt[0] else None)
    asked = prompts(len(adapters))
    together = run(llm, asked)
    for prompt, output in zip(asked, together, strict=True):
        (alone,) = run(llm, [prompt])
        assert alone.outputs[0].cumulative_logprob == output.outputs[0].cumulative_logprob
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_adapters_take_turns_in_the_rows(tmp_path: Path) -> None:
    """Two rows for three adapters, one of which is removed and read again as another."""
    llm, models, adapters = make("llama", tmp_path)
    llm = make_engine(tmp_path / "model", max_loras=1, max_cpu_loras=3)
    worker = worker_of(llm)
    requests = load(llm, adapters)
    current: list[Any] = [None]
    give_adapters(llm, lambda prompt: current[0])
    for number in (1, 2, 3, 0, 2, 1, 3):
        current[0] = requests[number - 1] if number else None
        (prompt,) = prompts(0, 1)
        check([models[number]], [prompt], run(llm, [prompt]))
    assert worker.list_loras() == {1, 2, 3}
    assert worker.remove_lora(2) and not worker.remove_lora(2)
    assert worker.list_loras() == {1, 3}
    current[0] = LoRARequest("other", 9, str(adapters[1]))
    assert worker.add_lora(current[0]) and not worker.add_lora(current[0])
    check([models[2]], [prompt], run(llm, [prompt]))


def test_an_engine_without_adapters_takes_none(tmp_path: Path) -> None:
    make_architecture("llama", tmp_path)
    llm = make_engine(tmp_path, enable_lora=False)
    with pytest.raises(ValueError, match="enable_lora"):
        worker_of(llm).add_lora(LoRARequest("a", 1, str(tmp_path)))
