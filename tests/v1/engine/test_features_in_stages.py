"""Features that only some requests ask for give the same tokens and bits in two stages as in one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model, random_prompts
from safetensors.torch import load_file, save_file
from tiny_adapters import make_adapter
from tiny_llm import make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts(100, (5, 40, 2, 60, 33, 70))]
GREEDY = SamplingParams(max_tokens=5, temperature=0, logprobs=1, prompt_logprobs=1, ignore_eos=True)
FORM = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a", "b"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, and three adapters for it."""
    folder = tmp_path_factory.mktemp("tiny")
    _, model = make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE, num_hidden_layers=4)
    make_byte_tokenizer(folder)
    for number in range(3):
        make_adapter(folder / f"adapter{number}", model, seed=number)
    return folder


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[list[LLM]]:
    """One of one stage, and one of two."""
    fields: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    made = [make_tiny_llm(folder, pipeline_parallel_size=size, **fields) for size in (1, 2)]
    yield made
    for llm in made:
        llm.llm_engine.engine_core.shutdown()


def results(llm: LLM, params: SamplingParams = GREEDY, **fields: Any) -> list[Any]:
    found = []
    for output in llm.generate(PROMPTS, params, use_tqdm=False, **fields):
        found += [(each.token_ids, each.text, each.finish_reason) for each in output.outputs]
        found += [each.logprobs.logprobs.tolist() for each in output.outputs if each.logprobs is not None]
        if output.prompt_logprobs is not None:
            found.append(output.prompt_logprobs.logprobs.tolist())
    return found


def structured(**form: Any) -> Callable[[LLM], Any]:
    return lambda llm: results(
        llm,
        SamplingParams(max_tokens=20, temperature=0, logprobs=1, structured_outputs=StructuredOutputsParams(**form)),
    )


def beams(llm: LLM) -> Any:
    outputs = llm.beam_search(PROMPTS[:3], BeamSearchParams(beam_width=3, max_tokens=6))
    return [(each.tokens, each.cum_logprob) for output in outputs for each in output.sequences]


def teacher(llm: LLM) -> Any:
    ids = [[(row * 7 + column) % 100 for column in range(4)] for row in range(39)]
    params = SamplingParams(max_tokens=0, prompt_logprob_token_ids=ids)
    (output,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    return output.prompt_logprobs.logprobs.tolist()


def adapters(llm: LLM) -> Any:
    folder = Path(llm.llm_engine.model_config.path)
    one, two, three = (LoRARequest(f"adapter{each}", each + 1, str(folder / f"adapter{each}")) for each in range(3))
    # Two at once have room.
    return results(llm, lora_request=[one, None, two, one, three, two])


def updated(llm: LLM) -> Any:
    folder = Path(llm.llm_engine.model_config.path)
    changed = {name: tensor * 1.25 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(changed, folder / "changed.safetensors")
    llm.collective_rpc("update_weights_from_file", args=(str(folder / "changed.safetensors"),))
    found = results(llm)
    llm.collective_rpc("reload_weights")
    return found, results(llm)


def slept(level: int) -> Callable[[LLM], Any]:
    def sleep(llm: LLM) -> Any:
        llm.sleep(level)
        llm.wake_up()
        return results(llm)

    return sleep


FEATURES: dict[str, Callable[[LLM], Any]] = {
    "a form": structured(json=json.dumps(FORM)),
    "a choice, whose rest is forced": structured(choice=["hello world", "help"]),
    "beams": beams,
    "several sequences": lambda llm: results(llm, SamplingParams(n=3, max_tokens=5, seed=4, logprobs=1)),
    "penalties and bad words": lambda llm: results(
        llm, SamplingParams(max_tokens=6, temperature=0, logprobs=1, bad_words=["ab"], repetition_penalty=1.3)
    ),
    "a function on logits": lambda llm: results(
        llm,
        SamplingParams(max_tokens=5, temperature=0, logits_processors=[lambda _, output, row: row.roll(sum(output))]),
    ),
    "a teacher's table": teacher,
    "labels": lambda llm: repr(llm.score_labels(["abc def", "xyz"], ["yes", "no way"], use_tqdm=False)),
    "adapters": adapters,
    "other weights": updated,
    "sleep": slept(1),
    "deep sleep": slept(2),
}


@pytest.mark.parametrize("ask", FEATURES.values(), ids=FEATURES)
def test_features(ask: Callable[[LLM], Any], engines: list[LLM]) -> None:
    alone, staged = engines
    expected = ask(alone)
    assert ask(staged) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"kv_cache_dtype": "fp8"},
        {"swap_space": 0.01, "num_gpu_blocks_override": 12, "max_num_seqs": 4},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_engines(fields: dict[str, Any], folder: Path) -> None:
    alone, staged = (make_tiny_llm(folder, pipeline_parallel_size=size, **fields) for size in (1, 2))
    for _ in range(2):
        assert results(staged) == results(alone)
    staged.llm_engine.engine_core.shutdown()


def test_pooling(folder: Path) -> None:
    alone, staged = (make_tiny_llm(folder, runner="pooling", pipeline_parallel_size=size) for size in (1, 2))
    for task in "embed", "token_embed":
        ours, expected = (
            [output.outputs.data.tolist() for output in llm.encode(PROMPTS, pooling_task=task, use_tqdm=False)]
            for llm in (staged, alone)
        )
        assert ours == expected
    staged.llm_engine.engine_core.shutdown()
