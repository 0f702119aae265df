"""prompt_embeds: readings of the positions after them equal transformers' of inputs_embeds, whatever else happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import VOCAB_SIZE, make_architecture
from tiny_adapters import make_adapter
from torch import Tensor

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs.embeds import PromptEmbeds
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core_process.serial import decode_request, encode_request
from vllm.v1.messages import EngineCoreRequest

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
IDS = [5, 17, 64, 100]

# Tied and untied heads; scales within the embedding (which given ones do not get) and after it (which they do); learned
# positions and projections after the embedding; norms; recurrent states; latent attention; windows.
ARCHITECTURES = (
    "llama", "gemma2", "gemma3", "granite", "afmoe", "opt", "gpt2", "bloom", "nanochat", "xglm", "falcon_h1",
    "recurrent_gemma", "deepseek_v3",
)  # fmt: skip
OVERRIDES = {"opt": {"word_embed_proj_dim": 16}}


def make_llm(folder: Path, **fields: Any) -> LLM:
    usual = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 96, "max_logprobs": -1}
    return LLM(str(folder), **{**usual, "enable_prompt_embeds": True, **fields})


def own_rows(model: Any, ids: list[int]) -> Tensor:
    """The rows that `inputs_embeds` has for tokens."""
    with torch.no_grad():
        rows: Tensor = model.get_input_embeddings()(torch.tensor(ids))
    # Falcon H1 multiplies its own embeddings alone.
    return rows * model.config.embedding_multiplier if model.config.model_type == "falcon_h1" else rows


def some_rows(model: Any, count: int, seed: int) -> Tensor:
    """[count, W]: of no token, but as large as tokens'."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (2, count), generator=generator).tolist()
    return (own_rows(model, ids[0]) + own_rows(model, ids[1])) / 2


@torch.no_grad()
def logprobs_of(model: Any, rows: Tensor) -> np.ndarray:
    """[T, V]"""
    return model(inputs_embeds=rows[None]).logits[0].float().log_softmax(-1).numpy()


def check(model: Any, rows: Tensor, output: Any) -> None:
    """Every generated position's readings."""
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    want = logprobs_of(model, torch.cat([rows, own_rows(model, tokens)]))
    assert want.std() > 0.3, "logits that are all alike would prove nothing"
    assert len(completion.logprobs) == len(tokens)
    for step, entries in enumerate(completion.logprobs):
        row = want[len(rows) - 1 + step]
        assert {*IDS, tokens[step]} <= set(entries)
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(row[token], abs=TOLERANCE)
            above, not_below = (row > row[token] + TOLERANCE).sum(), (row >= row[token] - TOLERANCE).sum()
            assert above < entry.rank <= not_below


def reading(**fields: Any) -> SamplingParams:
    usual = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprob_token_ids": IDS, "detokenize": False}
    return SamplingParams(**{**usual, **fields})


def generate(llm: LLM, prompts: list[Any], params: Any = None) -> list[Any]:
    return llm.generate(prompts, params or reading(), use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "model_impl"),
    [*((name, "auto") for name in ARCHITECTURES), ("gemma3", "transformers"), ("opt", "transformers")],
)
def test_readings_equal_transformers(name: str, model_impl: str, tmp_path: Path) -> None:
    model = make_architecture(name, tmp_path, **OVERRIDES.get(name, {}))
    # Prompts in chunks beside others' decode steps, and the second call's prefixes from the cache.
    llm = make_llm(tmp_path, max_num_batched_tokens=16, max_num_seqs=4, model_impl=model_impl)
    ids = list(range(7, 40))
    prompts = [some_rows(model, 3, 1), own_rows(model, ids), some_rows(model, 41, 2)]
    for _ in range(2):
        outputs = generate(llm, [*({"prompt_embeds": rows} for rows in prompts), ids, [9]])
        for rows, output in zip([*prompts, own_rows(model, ids), own_rows(model, [9])], outputs, strict=True):
            check(model, rows, output)
        assert outputs[1].outputs[0].token_ids == outputs[3].outputs[0].token_ids
        assert outputs[2].prompt_token_ids == [0] * 41


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return make_architecture("llama", folder)


@pytest.fixture(scope="module")
def llm(folder: Path, model: Any) -> LLM:
    return make_llm(folder)


def mixed(model: Any, length: int, seed: int) -> tuple[dict[str, Any], Tensor]:
    """A prompt of runs of embeddings and tokens, and what it comes to."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
    is_token = (torch.rand(length, generator=generator) < 0.5).repeat_interleave(3)[:length].tolist()
    rows = some_rows(model, length, seed)
    whole = torch.where(torch.tensor(is_token)[:, None], own_rows(model, ids), rows)
    # Rows in the place of a token are not looked at.
    rows = rows.masked_fill(torch.tensor(is_token)[:, None], 7.0)
    return {"prompt_embeds": rows, "prompt_token_ids": ids, "prompt_is_token_ids": is_token}, whole


def test_tokens_between_embeddings(llm, model):
    prompts, wholes = zip(*(mixed(model, length, seed) for seed, length in enumerate((5, 40, 61))), strict=True)
    for _ in range(2):
        for prompt, whole, output in zip(prompts, wholes, generate(llm, list(prompts)), strict=True):
            check(model, whole, output)
            assert output.prompt_token_ids == prompt["prompt_token_ids"]


def test_tokens_alone(llm, model):
    prompt = {"prompt_embeds": ones(3, 32), "prompt_token_ids": [7, 8, 9], "prompt_is_token_ids": [True] * 3}
    (output,) = generate(llm, [prompt], reading(prompt_logprobs=1))
    check(model, own_rows(model, [7, 8, 9]), output)
    assert len(output.prompt_logprobs) == 3


def test_prompt_tokens_after_the_embeddings_are_read(llm, model):
    ids = list(range(20, 50))
    rows, is_token = some_rows(model, 30, 3), [False] * 20 + [True] * 10
    whole = torch.cat([rows[:20], own_rows(model, ids[20:])])
    prompt = {"prompt_embeds": rows, "prompt_token_ids": ids, "prompt_is_token_ids": is_token}
    want = logprobs_of(model, whole)
    for _ in range(2):
        (output,) = generate(llm, [prompt], reading(prompt_logprobs=2, prompt_logprob_start=19))
        check(model, whole, output)
        entries = output.prompt_logprobs[-10:]
        for position, found in enumerate(entries, 20):
            row = want[position - 1]
            assert found[ids[position]].logprob == pytest.approx(row[ids[position]], abs=TOLERANCE)
            assert found[row.argmax()].rank == 1
    with pytest.raises(VLLMValidationError, match="prompt_logprob_start=19"):
        generate(llm, [prompt], reading(prompt_logprobs=2))
    with pytest.raises(VLLMValidationError, match="prompt_embeds has none up to position 29"):
        generate(llm, [{"prompt_embeds": rows}], reading(prompt_logprob_token_ids=[4]))


def test_only_the_same_content_is_shared(llm, model):
    """All of these prompts have the same ids where no token is."""
    one, other = some_rows(model, 40, 4), some_rows(model, 40, 4)
    other[39] += 0.1
    ids, is_token = [0] * 40, [False] * 32 + [True] * 8
    prompts = [
        {"prompt_embeds": one},
        {"prompt_embeds": other},
        {"prompt_embeds": one, "prompt_token_ids": ids, "prompt_is_token_ids": is_token},
        {"prompt_embeds": one, "cache_salt": "salt"},
        ids,
    ]
    tail = own_rows(model, [0] * 8)
    wholes = [one, other, torch.cat([one[:32], tail]), one, own_rows(model, ids)]
    llm.reset_prefix_cache()
    for prompt, whole in zip(prompts, wholes, strict=True):
        (output,) = generate(llm, [prompt])
        assert output.num_cached_tokens == 0
        check(model, whole, output)
    for output, whole in zip(generate(llm, prompts), wholes, strict=True):
        assert output.num_cached_tokens >= 32
        check(model, whole, output)
    for output in generate(llm, [prompts[0]] * 3):
        check(model, one, output)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_gpu_blocks_override": 9, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 9, "max_num_seqs": 4, "swap_space": 0.01},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 8},
        {"tensor_parallel_size": 2, "max_num_batched_tokens": 32},
        {"async_scheduling": True, "max_num_batched_tokens": 16},
        {"enforce_eager": True},
        {"max_num_seqs": 1},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        {"speculative_config": {"method": "suffix"}},
        {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
    ],
    ids=lambda fields: next(iter(fields.values()))["method"] if "speculative_config" in fields else next(iter(fields)),
)
def test_other_engines_do_the_same(folder, model, fields):
    if (config := fields.get("speculative_config")) and config["method"] == "draft_model":
        fields = {"speculative_config": config | {"model": str(folder)}}
    llm = make_llm(folder, **fields)
    ids = [11, 12, 13] * 9
    prompts: list[tuple[Any, Tensor]] = [
        ({"prompt_embeds": rows}, rows) for rows in (some_rows(model, n, n) for n in (1, 2, 17, 33))
    ]
    prompts += [mixed(model, 25, 5), mixed(model, 9, 7), (ids, own_rows(model, ids))]
    for _ in range(2):
        outputs = generate(llm, [prompt for prompt, _ in prompts], reading(max_tokens=24))
        for (_, whole), output in zip(prompts, outputs, strict=True):
            check(model, whole, output)
    if "num_gpu_blocks_override" in fields:
        assert llm.llm_engine.engine_core.scheduler.num_preemptions > 0


def test_one_row_after_recorded_steps(llm, model):
    """A prompt of one embedding looks like a step of decoding, which are replayed."""
    generate(llm, [[8]], reading(max_tokens=8))
    rows = some_rows(model, 1, 8)
    (output,) = generate(llm, [{"prompt_embeds": rows}])
    check(model, rows, output)
    rows = some_rows(model, 33, 9)
    generate(llm, [{"prompt_embeds": rows}])
    # All but one of its rows may come from the cache.
    (output,) = generate(llm, [{"prompt_embeds": rows}])
    check(model, rows, output)


def test_penalties_count_tokens_alone(llm, model):
    rows = some_rows(model, 12, 10)
    (plain,) = generate(llm, [{"prompt_embeds": rows}], reading(max_tokens=1, logprob_token_ids=[0, 3]))
    params = reading(max_tokens=1, logprob_token_ids=[0, 3], repetition_penalty=4.0, logprobs_mode="processed_logprobs")
    (output,) = generate(llm, [{"prompt_embeds": rows}], params)
    ids, is_token = [3] * 12, [False] * 11 + [True]
    for token in (0, 3):
        expected = plain.outputs[0].logprobs[0][token].logprob
        assert output.outputs[0].logprobs[0][token].logprob == pytest.approx(expected, abs=TOLERANCE)
    prompt = {"prompt_embeds": rows, "prompt_token_ids": ids, "prompt_is_token_ids": is_token}
    whole = torch.cat([rows[:11], own_rows(model, [3])])
    with torch.no_grad():
        logits = model(inputs_embeds=whole[None]).logits[0, -1].float()
    logits[3] = logits[3] / 4 if logits[3] > 0 else logits[3] * 4
    (output,) = generate(llm, [prompt], params)
    for token in (0, 3):
        found = output.outputs[0].logprobs[0][token].logprob
        assert found == pytest.approx(float(logits.log_softmax(-1)[token]), abs=TOLERANCE)


def test_logits_processors_get_the_tokens_of_the_prompt(llm, model):
    seen: list[list[int]] = []

    def processor(prompt_ids: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
        seen.append(list(prompt_ids))
        return logits

    prompt, _ = mixed(model, 25, 5)
    generate(llm, [prompt], reading(max_tokens=1, logits_processors=[processor]))
    pairs = zip(prompt["prompt_token_ids"], prompt["prompt_is_token_ids"], strict=True)
    assert seen == [[token for token, is_token in pairs if is_token]]


def test_many_sequences_labels_and_beams(llm, model):
    rows = some_rows(model, 18, 11)
    (output,) = generate(llm, [{"prompt_embeds": rows}], reading(n=3, temperature=1.0, seed=5))
    for completion in output.outputs:
        want = logprobs_of(model, torch.cat([rows, own_rows(model, list(completion.token_ids))]))
        for step, entries in enumerate(completion.logprobs):
            assert entries[17].logprob == pytest.approx(want[17 + step, 17], abs=TOLERANCE)
    (scores,) = llm.score_labels([{"prompt_embeds": rows}], [[4, 9], [8]])
    after = logprobs_of(model, torch.cat([rows, own_rows(model, [4])]))
    assert scores.logprobs[0] == pytest.approx(after[17, 4] + after[18, 9], abs=TOLERANCE)
    assert scores.logprobs[1] == pytest.approx(after[17, 8], abs=TOLERANCE)
    params = SamplingParams(use_beam_search=True, n=2, best_of=2, max_tokens=3, temperature=0, ignore_eos=True)
    (output,) = llm.generate([{"prompt_embeds": rows}], params, use_tqdm=False)
    for beam in output.outputs:
        tokens = list(beam.token_ids)
        want = logprobs_of(model, torch.cat([rows, own_rows(model, tokens)]))
        total = sum(want[17 + step, token] for step, token in enumerate(tokens))
        assert beam.cumulative_logprob == pytest.approx(total, abs=TOLERANCE)


def test_adapters(folder, model, tmp_path):
    """One of all linear layers changes what embeddings come to, too."""
    request = LoRARequest("one", 1, str(make_adapter(tmp_path / "one", model)))
    llm = make_llm(folder, enable_lora=True)
    ids = list(range(30, 52))
    prompts: list[Any] = [{"prompt_embeds": own_rows(model, ids)}, ids]
    plain = generate(llm, prompts)
    for number in range(2):
        outputs = llm.generate(prompts, reading(), use_tqdm=False, lora_request=request)
        first, other = (output.outputs[0] for output in outputs)
        assert first.token_ids == other.token_ids
        assert first.logprobs[0][17].logprob == pytest.approx(other.logprobs[0][17].logprob, abs=TOLERANCE)
        assert abs(first.logprobs[0][17].logprob - plain[0].outputs[0].logprobs[0][17].logprob) > 1e-3
        assert outputs[0].num_cached_tokens == 21 * number


def test_half_precision(folder, model):
    """Given rows are rounded to the model's dtype."""
    llm = make_llm(folder, dtype="bfloat16")
    ids = list(range(40, 60))
    outputs = generate(llm, [{"prompt_embeds": own_rows(model, ids)}, ids])
    first, other = (output.outputs[0].logprobs[0] for output in outputs)
    assert {token: entry.logprob for token, entry in first.items()} == {
        token: entry.logprob for token, entry in other.items()
    }


def test_the_callers_tensor_may_change_later(llm, model):
    rows = some_rows(model, 20, 12)
    own = rows.clone()
    llm.llm_engine.add_request("0", {"prompt_embeds": own}, reading())
    own.zero_()
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    check(model, rows, outputs[-1])


def ones(*shape: int, **fields: Any) -> Tensor:
    return torch.ones(shape, **fields)


BAD = {
    "no tensor": ({"prompt_embeds": [[1.0] * 32]}, r"must be a tensor \[T, 32\], got list"),
    "integers": ({"prompt_embeds": ones(2, 32, dtype=torch.int64)}, "must be of float32, float16 or bfloat16"),
    "doubles": ({"prompt_embeds": ones(2, 32, dtype=torch.float64)}, "got float64"),
    "one dimension": ({"prompt_embeds": ones(32)}, r"got \[32\]"),
    "a batch": ({"prompt_embeds": ones(2, 3, 32)}, r"got \[2, 3, 32\]"),
    "too wide": ({"prompt_embeds": ones(2, 33)}, r"\[T, 32\].*got \[2, 33\]"),
    "no rows": ({"prompt_embeds": ones(0, 32)}, "1 to 96 rows"),
    "too many": ({"prompt_embeds": ones(97, 32)}, "1 to 96 rows.*got 97"),
    "no room": ({"prompt_embeds": ones(96, 32)}, "leaves no room for output"),
    "many of one": ({"prompt_embeds": ones(1, 32).expand(1 << 40, 32)}, "1 to 96 rows"),
    "sparse": ({"prompt_embeds": ones(2, 32).to_sparse()}, "dense"),
    "meta": ({"prompt_embeds": ones(2, 32, device="meta")}, "dense"),
    "not a number": ({"prompt_embeds": ones(2, 32) * torch.nan}, "not finite"),
    "infinite": ({"prompt_embeds": ones(2, 32) * torch.inf}, "not finite"),
    "mask alone": ({"prompt_token_ids": [1], "prompt_is_token_ids": [True]}, "pass it with them"),
    "no ids": ({"prompt_embeds": ones(1, 32), "prompt_is_token_ids": [False]}, "needs prompt_token_ids"),
    "mask of numbers": (
        {"prompt_embeds": ones(1, 32), "prompt_token_ids": [1], "prompt_is_token_ids": [0]},
        "list of booleans",
    ),
    "short mask": (
        {"prompt_embeds": ones(2, 32), "prompt_token_ids": [1, 2], "prompt_is_token_ids": [False]},
        "each of the 2 rows",
    ),
    "short ids": (
        {"prompt_embeds": ones(2, 32), "prompt_token_ids": [1]},
        "each of the 2 rows of prompt_embeds, got 1",
    ),
    "wrong id": ({"prompt_embeds": ones(1, 32), "prompt_token_ids": [VOCAB_SIZE]}, "out of vocabulary"),
    "no text": ({"prompt_embeds": ones(1, 32), "prompt": 7}, "prompt must be"),
}


@pytest.mark.parametrize(("prompt", "message"), BAD.values(), ids=BAD)
def test_bad_prompts(llm, prompt, message):
    with pytest.raises(VLLMValidationError, match=message):
        generate(llm, [[5], prompt])
    with pytest.raises(VLLMValidationError, match=r"prompts\[1\]"):
        generate(llm, [[5], prompt])
    assert not llm.llm_engine.has_unfinished_requests()


def test_what_overflows_half_precision_is_not_finite():
    with pytest.raises(VLLMValidationError, match="not finite in float16"):
        PromptEmbeds.of(ones(1, 4) * 1e6, None, 4, 8, "float16")


def test_truncation_cuts_no_embeddings(llm, model):
    rows = some_rows(model, 20, 13)
    generate(llm, [{"prompt_embeds": rows}], reading(truncate_prompt_tokens=20))
    with pytest.raises(VLLMValidationError, match="cut them yourself"):
        generate(llm, [{"prompt_embeds": rows}], reading(truncate_prompt_tokens=19))


def test_it_has_to_be_asked_for(folder, model):
    llm = make_llm(folder, enable_prompt_embeds=False)
    with pytest.raises(VLLMValidationError, match="enable_prompt_embeds=True"):
        generate(llm, [{"prompt_embeds": some_rows(model, 3, 1)}])
    (output,) = generate(llm, [{"prompt_token_ids": [5, 6], "prompt_embeds": None}])
    check(model, own_rows(model, [5, 6]), output)


def test_models_that_take_more_of_a_token_refuse_at_the_start(tmp_path):
    make_architecture("gemma3n", tmp_path)
    with pytest.raises(ValueError, match="enable_prompt_embeds=True cannot be used: Gemma3nForCausalLM"):
        make_llm(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_transport(dtype):
    is_token = [True, False, False, True, False]
    embeds = PromptEmbeds.of(torch.randn(5, 6), is_token, 6, 8, dtype)
    request = EngineCoreRequest("a", [1, 0, 0, 4, 0], SamplingParams(max_tokens=1), prompt_embeds=embeds)
    found = decode_request(encode_request(request)).prompt_embeds
    assert found is not None
    assert found.rows.dtype is getattr(torch, dtype)
    assert torch.equal(found.rows, embeds.rows)
    assert found.positions.tolist() == [1, 2, 4]
    assert found.digest == embeds.digest
