"""A store of blocks where more than keys and values of one process is needed: states, ranks, drafts, pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from architectures import VOCAB_SIZE, make_architecture
from prediction_models import Reference
from test_kv_store import NUM_BLOCKS, PROMPTS, READS, cached, counts, end, readings, run
from thread_stages import make_staged_llm
from tiny_llm import make_tiny_llm, make_tiny_model
from tiny_vision import make_vision_model, prompt_of_two

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = [[1 + token % (VOCAB_SIZE - 2) for token in prompt] for prompt in PROMPTS]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [(1, 1024, 3)]}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with states: beside layers with keys and values, alone, and with a layer that drafts."""
    root = tmp_path_factory.mktemp("states")
    for name in ("granite_hybrid", "mamba"):
        make_architecture(name, root / name)
    Reference("qwen3_next", root / "qwen3_next", is_near=True)
    return {path.name: path for path in root.iterdir()}


USUAL = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 120, "mamba_block_size": 32}


def make(folder: Path, **fields: Any) -> LLM:
    return LLM(str(folder), **(USUAL | fields))


def twice(make_engine: Any, store: Path, prompts: list[Any] = TOKENS, params: SamplingParams = READS) -> list[Any]:
    """The outputs of an engine that fills a store, and of one that finds it; then the latter's blocks that it read."""
    found = []
    for _ in range(2):
        llm = make_engine(kv_store=str(store))
        found.append(run(llm, prompts, params))
        num_loaded = counts(llm)[1]
        end(llm)
    return [*found, num_loaded]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("granite_hybrid", {}),
        ("granite_hybrid", {"tensor_parallel_size": 2}),
        ("granite_hybrid", {"pipeline_parallel_size": 2}),
        ("mamba", {"async_scheduling": True}),
        ("qwen3_next", {"max_num_batched_tokens": 40, "max_num_seqs": 2}),
        ("qwen3_next", {"speculative_config": MTP}),
    ],
)
def test_a_prompt_resumes_from_the_last_state_that_was_stored(folders, tmp_path, name, fields):
    plain = make(folders[name], **fields)
    expected = readings(run(plain, TOKENS, READS.clone()))
    end(plain)
    first, second, num_loaded = twice(lambda **store: make(folders[name], **fields, **store), tmp_path)
    assert readings(first) == readings(second) == expected
    assert cached(first)[0] == 0 and cached(second)[0] == NUM_BLOCKS * 16
    assert num_loaded >= NUM_BLOCKS


def test_a_stage_may_have_no_keys_or_no_states(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,1,2")
    expected = readings(run(make(folders["granite_hybrid"]), TOKENS))
    _, second, num_loaded = twice(
        lambda **store: make_staged_llm(folders["granite_hybrid"], 3, **USUAL, **store), tmp_path
    )
    assert readings(second) == expected and cached(second)[0] == NUM_BLOCKS * 16 and num_loaded >= NUM_BLOCKS


def test_a_state_that_is_not_there_leaves_an_earlier_one(folders, tmp_path):
    """A longer prompt than the one that was stored resumes where that one's last state is."""
    longer = [[*TOKENS[0][:70], *reversed(TOKENS[0][70:])]]
    expected = readings(run(make(folders["granite_hybrid"]), longer))
    for prompts in (TOKENS[:1], longer):
        llm = make(folders["granite_hybrid"], kv_store=str(tmp_path))
        outputs = run(llm, prompts)
        end(llm)
    assert readings(outputs) == expected and cached(outputs) == [64]


def test_a_state_is_brought_where_no_snapshot_of_the_step_is(folders, tmp_path):
    fields = {"num_gpu_blocks_override": 24, "max_num_seqs": 1, "kv_store": str(tmp_path)}
    others = [[*reversed(prompt)] for prompt in TOKENS]
    expected = readings(run(make(folders["mamba"]), [*TOKENS, *others]))
    for _ in range(2):
        llm = make(folders["mamba"], **fields)
        # One request has a state at a time, and there are two snapshots.
        assert llm.llm_engine.engine_core.executor.state_slots.num_snapshots == 2
        assert readings(run(llm, [*TOKENS, *others])) == expected
        end(llm)


@pytest.mark.parametrize("reads_prompt", [False, True])
def test_each_rank_has_its_share(dense, tmp_path, reads_prompt):
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=8, prompt_logprobs=2 if reads_prompt else None)
    plain = make_tiny_llm(dense, tensor_parallel_size=2)
    expected = run(plain, PROMPTS, params)
    end(plain)
    first, second, num_loaded = twice(
        lambda **store: make_tiny_llm(dense, tensor_parallel_size=2, **store), tmp_path, PROMPTS, params
    )
    assert readings(first) == readings(second) == readings(expected)
    assert cached(second)[0] == NUM_BLOCKS * 16 and num_loaded == NUM_BLOCKS
    if reads_prompt:
        found = [[each.prompt_logprobs.logprobs.tobytes() for each in outputs] for outputs in (second, expected)]
        assert found[0] == found[1]
    # A rank alone has other blocks.
    llm = make_tiny_llm(dense, kv_store=str(tmp_path))
    assert cached(run(llm, PROMPTS[:1])) == [0]
    end(llm)


@pytest.mark.parametrize("width", [1, 2])
def test_stages_find_what_one_has_stored_and_the_reverse(dense, tmp_path, width):
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=8, prompt_logprobs=2)
    found = {}
    for name, stages, prompts in (("a", 1, PROMPTS[:2]), ("a", 2, PROMPTS), ("b", 2, PROMPTS[:2]), ("b", 1, PROMPTS)):
        fields = {"tensor_parallel_size": width, "pipeline_parallel_size": stages}
        llm = make_tiny_llm(dense, kv_store=str(tmp_path / name), **fields)
        found[name, stages] = run(llm, prompts, params)
        end(llm)
    assert readings(found["a", 2]) == readings(found["b", 1])
    assert readings(found["a", 1]) == readings(found["b", 2]) == readings(found["b", 1])[:2]
    assert cached(found["a", 2])[0] == cached(found["b", 1])[0] == NUM_BLOCKS * 16
    both = [[each.prompt_logprobs.logprobs.tobytes() for each in found[key]] for key in (("a", 2), ("b", 1))]
    assert both[0] == both[1]


def test_drafts_of_the_prompt_share_the_blocks_of_engines_without(dense, tmp_path):
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=8, ignore_eos=True)
    expected = run(make_tiny_llm(dense), PROMPTS[:1], params)
    longer = [[*PROMPTS[0], *expected[0].outputs[0].token_ids, 9]]
    for draft, num_blocks in ((NGRAM, 0), (None, NUM_BLOCKS), ({**NGRAM, "num_speculative_tokens": 5}, NUM_BLOCKS)):
        llm = make_tiny_llm(dense, kv_store=str(tmp_path), speculative_config=draft)
        outputs = run(llm, PROMPTS[:1], params)
        assert readings(outputs) == readings(expected) and cached(outputs) == [num_blocks * 16]
        end(llm)
    # Blocks that drafts have filled are there as well.
    llm = make_tiny_llm(dense, kv_store=str(tmp_path))
    assert cached(run(llm, longer)) == [len(longer[0]) // 16 * 16]
    end(llm)


def test_a_draft_model_computes_what_it_needs_of_stored_prompts(dense, tmp_path):
    draft = {"method": "draft_model", "model": str(dense), "num_speculative_tokens": 3}
    draft["num_speculative_tokens_per_batch_size"] = [(1, 1024, 3)]
    expected = run(make_tiny_llm(dense))
    found = twice(lambda **store: make_tiny_llm(dense, speculative_config=draft, **store), tmp_path, PROMPTS)
    assert readings(found[0]) == readings(found[1]) == readings(expected)
    assert cached(found[1])[0] == NUM_BLOCKS * 16


def test_pictures_are_found_by_their_values(tmp_path):
    make_vision_model("llava", tmp_path / "model")

    def read(seeds: tuple[int, int], **fields: Any) -> Any:
        llm = LLM(str(tmp_path / "model"), dtype="float32", limit_mm_per_prompt={"image": 2}, **fields)
        prompt = {**prompt_of_two("llava", seeds), "multi_modal_uuids": {"image": ["a", "b"]}}
        outputs = llm.generate(prompt, READS, use_tqdm=False)
        end(llm)
        return outputs

    expected = {seeds: readings(read(seeds)) for seeds in ((0, 1), (0, 2))}
    read((0, 1), kv_store=str(tmp_path / "store"))
    # Names of pictures are their caller's: others may have the same.
    found = {seeds: read(seeds, kv_store=str(tmp_path / "store")) for seeds in ((0, 2), (0, 1))}
    num_tokens = len(found[0, 1][0].prompt_token_ids)
    assert cached(found[0, 1]) == [(num_tokens - 1) // 16 * 16]
    assert 0 < cached(found[0, 2])[0] < cached(found[0, 1])[0]
    assert all(readings(outputs) == expected[seeds] for seeds, outputs in found.items())
