"""Models with recurrent states: the states follow their requests through all that a scheduler does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import VOCAB_SIZE, make_architecture
from thread_ranks import make_thread_llm
from tiny_llm import is_empty

from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
LENGTHS = (1, 2, 3, 40, 700)
READS = SamplingParams(
    max_tokens=5, temperature=0, ignore_eos=True, detokenize=False, logprobs=3, prompt_logprob_token_ids=[3, 7]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An LFM2 whose context holds 768 tokens, and its folder."""
    folder = tmp_path_factory.mktemp("lfm2")
    return folder, make_architecture("lfm2", folder, max_position_embeddings=768)


def make_llm(folder: Path, **fields: Any) -> LLM:
    return LLM(str(folder), **({"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 768} | fields))


def random_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams = READS) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def bits(output: RequestOutput) -> list[np.ndarray]:
    """All readings of an output."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    arrays = [np.array(completion.token_ids), completion.logprobs.logprobs, completion.logprobs.logits]
    if output.prompt_logprobs is not None:
        arrays += [output.prompt_logprobs.logprobs, output.prompt_logprobs.logits]
    return arrays


def assert_equal_bits(got: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for mine, other in zip(got, expected, strict=True):
        for own, wanted in zip(bits(mine), bits(other), strict=True):
            np.testing.assert_array_equal(own, wanted)


@torch.no_grad()
def assert_near_transformers(hf_model: Any, prompts: list[list[int]], outputs: list[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        want = hf_model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
        assert tokens == want[len(prompt) - 1 : -1].argmax(-1).tolist()
        for position in range(1, len(prompt)):
            for token in (3, 7):
                got = output.prompt_logprobs[position][token].logprob
                assert got == pytest.approx(float(want[position - 1, token]), abs=TOLERANCE)
        for step, entries in enumerate(output.outputs[0].logprobs):
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(float(want[len(prompt) - 1 + step, token]), abs=TOLERANCE)


@pytest.fixture(scope="module")
def expected(model: tuple[Path, Any]) -> list[RequestOutput]:
    """Outputs for prompts of all LENGTHS, each alone and in one step."""
    llm = make_llm(model[0], enable_prefix_caching=False)
    return [run(llm, [prompt])[0] for prompt in random_prompts(LENGTHS)]


def test_prompts_of_all_lengths_read_as_transformers_reads(model, expected) -> None:
    assert_near_transformers(model[1], random_prompts(LENGTHS), expected)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_no_bit(model, expected, chunk: int) -> None:
    llm = make_llm(model[0], max_num_batched_tokens=chunk, enable_prefix_caching=False)
    # A token a step would take a step for each of 700.
    which = slice(None, -1) if chunk == 1 else slice(None)
    assert_equal_bits(run(llm, random_prompts(LENGTHS)[which]), expected[which])
    assert is_empty(llm)


def test_preempted_requests_begin_anew(model, expected) -> None:
    # The blocks of the longest request, and no more.
    llm = make_llm(model[0], num_gpu_blocks_override=48, enable_prefix_caching=False, max_num_batched_tokens=256)
    prompts = [prompt for prompt in random_prompts(LENGTHS) for _ in range(4)]
    params = READS.clone()
    params.max_tokens = 40
    alone = [run(llm, [prompt], params)[0] for prompt in prompts[::4]]
    outputs = run(llm, prompts, params)
    assert llm.llm_engine.engine_core.scheduler.num_preemptions > 0
    assert_equal_bits(outputs, [output for output in alone for _ in range(4)])


def test_sixty_four_in_a_step(model) -> None:
    prompts = random_prompts(tuple(1 + index % 23 for index in range(64)), seed=3)
    llm = make_llm(model[0], max_num_seqs=64)
    together = run(llm, prompts)
    assert_equal_bits(together, [run(llm, [prompt])[0] for prompt in prompts])


def test_no_token_to_generate_and_several_of_one_prompt(model, expected) -> None:
    llm = make_llm(model[0])
    prompt = random_prompts(LENGTHS)[3]
    params = READS.clone()
    params.max_tokens = 0
    (silent,) = run(llm, [prompt], params)
    np.testing.assert_array_equal(silent.prompt_logprobs.logprobs, expected[3].prompt_logprobs.logprobs)
    params = READS.clone()
    params.n, params.temperature, params.seed = 3, 1.0, 5
    (several,) = run(llm, [prompt], params)
    single = [run(llm, [prompt + list(each.token_ids)[:2]])[0] for each in several.outputs]
    for drawn, again in zip(several.outputs, single, strict=True):
        # A reading after two drawn tokens equals that of a prompt that ends with them.
        got, want = drawn.logprobs[2], again.outputs[0].logprobs[0]
        assert all(got[token].logprob == want[token].logprob for token in got.keys() & want.keys())
    assert len({tuple(each.token_ids) for each in several.outputs}) > 1


def test_two_ranks_compute_what_one_does(model) -> None:
    llm = make_thread_llm(model[0], 2, max_model_len=768, skip_tokenizer_init=True)
    assert_near_transformers(model[1], random_prompts(LENGTHS), run(llm, random_prompts(LENGTHS)))


def test_states_sleep_too(model, expected) -> None:
    llm = make_llm(model[0])
    run(llm, random_prompts(LENGTHS))
    llm.sleep(level=1)
    assert llm.llm_engine.engine_core.executor.worker.model_runner.model.model.layers[0].self_attn.state == ()
    llm.wake_up()
    assert_equal_bits(run(llm, random_prompts(LENGTHS)), expected)


def rounding_errors(folder: Path, hf_model: Any, prompts: list[list[int]]) -> tuple[float, float]:
    """Mean errors of readings in bfloat16 against float32: ours, and transformers'."""
    outputs = run(make_llm(folder, dtype="bfloat16", max_model_len=400), prompts)
    rounded = type(hf_model).from_pretrained(folder, dtype=torch.bfloat16)
    ours, theirs = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            want, other = (
                each(torch.tensor([prompt])).logits[0].float().log_softmax(-1) for each in (hf_model, rounded)
            )
        own = np.array([[output.prompt_logprobs[p][t].logprob for t in (3, 7)] for p in range(1, len(prompt))])
        wanted = want[:-1, [3, 7]].numpy()
        ours.append(np.abs(own - wanted).mean())
        theirs.append(np.abs(other[:-1, [3, 7]].numpy() - wanted).mean())
    return float(np.mean(ours)), float(np.mean(theirs))


def test_bfloat16_is_as_near_as_transformers(model) -> None:
    ours, theirs = rounding_errors(*model, random_prompts((200, 31), seed=8))
    # A margin for what one rounding more or less does to a small model.
    assert ours <= 1.1 * theirs
