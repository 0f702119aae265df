"""LLM.beam_search and generate(use_beam_search=True): the engine's searches against transformers', and what can happen
to them on the way."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beam_search_reference import transformers_search
from byte_tokenizer import EOS
from models_util import make_random_model, random_prompts
from tiny_llm import is_empty, make_tiny_llm, make_tiny_model

from vllm import LLM, BeamSearchParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

EOS_IDS = [2, *range(30, 60)]
# width, k, length_penalty, early_stopping, max_tokens
CASES = [
    (2, 1, 1.0, False, 12),
    (4, 4, 1.0, "never", 12),
    (4, 2, 0.0, True, 12),
    (5, 5, -1.0, False, 12),
    (5, 3, 2.0, "never", 12),
    (4, 4, 0.5, True, 1),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads have nothing to share in models as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(arch: str, folder: Path) -> tuple[Path, Any]:
    """The folder and transformers' model. With this seed and these ids sequences of many lengths compete."""
    return make_random_model(arch, "small", folder, seed=3, eos_token_id=EOS_IDS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return make_model("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(199, (1, 16, 5, 37))


def make_llm(folder: Path, **fields: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, **fields})


def beam_params(width: int, k: int, length_penalty: float, early_stopping: Any, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        use_beam_search=True,
        temperature=0,
        best_of=width,
        n=k,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_tokens=max_tokens,
    )


class RecordingBar:
    """Stands in for tqdm."""

    def __init__(self, updates: list[int]) -> None:
        self.updates = updates

    def update(self, count: int) -> None:
        self.updates.append(count)

    def close(self) -> None:
        pass


def scores_of(completions: list[Any], length_penalty: float) -> list[float]:
    return [each.cumulative_logprob / len(each.token_ids) ** length_penalty for each in completions]


def contents(outputs: list[Any]) -> list[Any]:
    return [[(each.tokens, each.finish_reason, each.stop_reason) for each in output.sequences] for output in outputs]


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_both_doors_equal_transformers(arch, prompts, request):
    folder, model = request.getfixturevalue(arch)
    llm = make_llm(folder)
    # All cases and prompts in one call: they run side by side.
    pairs = list(itertools.product(prompts, CASES))
    completed = llm.generate([prompt for prompt, _ in pairs], [beam_params(*case) for _, case in pairs], use_tqdm=False)
    own_params = [
        BeamSearchParams(width, max_tokens, length_penalty=penalty, early_stopping=early)
        for _, (width, _, penalty, early, max_tokens) in pairs
    ]
    found = llm.beam_search([prompt for prompt, _ in pairs], own_params, use_tqdm=False)
    lengths = set()
    for (prompt, case), output, beams in zip(pairs, completed, found, strict=True):
        width, k, length_penalty, early_stopping, max_tokens = case
        (expected,) = transformers_search(
            model, [prompt], width, EOS_IDS, max_new_tokens=max_tokens,
            length_penalty=length_penalty, early_stopping=early_stopping,
        )  # fmt: skip
        tokens, scores = [each for each, _ in expected], [score for _, score in expected]
        assert [each.token_ids for each in output.outputs] == tokens[:k]
        assert scores_of(output.outputs, length_penalty) == pytest.approx(scores[:k], abs=1e-4)
        assert [each.index for each in output.outputs] == list(range(k))
        assert output.prompt_token_ids == prompt and output.finished
        assert [each.tokens for each in beams.sequences] == [prompt + each for each in tokens]
        assert [each.score for each in beams.sequences] == pytest.approx(scores, abs=1e-4)
        for each in output.outputs:
            assert each.finish_reason == ("stop" if each.token_ids[-1] in EOS_IDS else "length")
            assert each.stop_reason is None and each.logprobs is None and each.text == ""
            lengths.add(len(each.token_ids))
    assert {1, 12} < lengths and len(lengths) > 4
    assert is_empty(llm)


def test_one_beam_is_greedy(llama, prompts):
    llm = make_llm(llama[0])
    beams = llm.generate(prompts, beam_params(1, 1, 2.0, False, 12), use_tqdm=False)
    greedy = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, logprobs=0), use_tqdm=False)
    for one, other in zip(beams, greedy, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_prefix_caching": False},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 7},
        {"num_gpu_blocks_override": 5, "block_size": 16},
        {"max_logprobs": 0},
    ],
)
def test_the_way_it_is_run_changes_nothing(llama, prompts, fields):
    params = BeamSearchParams(4, 12, early_stopping="never")
    before = make_llm(llama[0]).beam_search(prompts, params, use_tqdm=False)
    llm = make_llm(llama[0], **fields)
    after = llm.beam_search(prompts, params, use_tqdm=False)
    assert contents(after) == contents(before)
    for one, other in zip(before, after, strict=True):
        assert [each.score for each in one.sequences] == pytest.approx([each.score for each in other.sequences])
    assert is_empty(llm)


def test_the_beams_share_what_is_cached(llama):
    prompt = random_prompts(199, (40,))
    llm = make_llm(llama[0])
    stats = llm.llm_engine.engine_core.scheduler.stats
    (cold,) = llm.generate(prompt, beam_params(4, 1, 1.0, False, 4), use_tqdm=False)
    assert cold.num_cached_tokens == 0
    # After the first step, the prompt's two full blocks are there for each beam of each step.
    assert stats().num_prefix_hit_tokens == 3 * 4 * 32
    (warm,) = llm.generate(prompt, beam_params(4, 1, 1.0, False, 4), use_tqdm=False)
    assert warm.num_cached_tokens == 32 and warm.outputs == cold.outputs


def test_a_salt_keeps_the_cached_prefix_apart(llama):
    (prompt,) = random_prompts(199, (40,))
    llm = make_llm(llama[0])
    cached = []
    for salt in ("a", "b", "a"):
        salted = {"prompt_token_ids": prompt, "cache_salt": salt}
        (output,) = llm.generate([salted], beam_params(2, 1, 1.0, False, 3), use_tqdm=False)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 32]


class TestWhatEndsASequence:
    def test_stop_token_ids_end_it_and_are_named(self, llama, prompts):
        folder, model = llama
        llm = make_llm(folder)
        stop = [7, *range(80, 110)]
        params = beam_params(4, 4, 1.0, False, 12)
        params.stop_token_ids = stop
        reasons = set()
        for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            (expected,) = transformers_search(model, [prompt], 4, [*EOS_IDS, *stop], max_new_tokens=12)
            assert [each.token_ids for each in output.outputs] == [tokens for tokens, _ in expected]
            for each in output.outputs:
                assert each.stop_reason == (each.token_ids[-1] if each.token_ids[-1] in stop else None)
                reasons.add(each.stop_reason)
        assert reasons > {None}

    def test_ignore_eos(self, llama, prompts):
        folder, model = llama
        found = make_llm(folder).beam_search(prompts, BeamSearchParams(4, 8, ignore_eos=True), use_tqdm=False)
        for prompt, output in zip(prompts, found, strict=True):
            (expected,) = transformers_search(model, [prompt], 4, None, max_new_tokens=8)
            assert [each.tokens for each in output.sequences] == [prompt + tokens for tokens, _ in expected]
            assert {each.finish_reason for each in output.sequences} == {"length"}

    def test_the_context_ends_it_as_length(self, llama, prompts):
        folder, model = llama
        llm = make_llm(folder, max_model_len=40)
        for max_tokens in (30, None):
            params = beam_params(3, 3, 1.0, "never", 1)
            params.max_tokens = max_tokens
            params.ignore_eos = True
            (output,) = llm.generate(prompts[3], params, use_tqdm=False)
            (expected,) = transformers_search(model, [prompts[3]], 3, None, max_new_tokens=3)
            assert [each.token_ids for each in output.outputs] == [tokens for tokens, _ in expected]
            assert {each.finish_reason for each in output.outputs} == {"length"}


class TestProcessedLogits:
    """The candidates are then read from the processed logits; transformers processes logprobs, so they are
    normalised again."""

    @staticmethod
    def expected(model: Any, prompt: list[int], change: Any) -> list[tuple[list[int], float]]:
        def process(input_ids: Any, scores: Any) -> Any:
            return change(scores).log_softmax(-1)

        return transformers_search(model, [prompt], 4, EOS_IDS, max_new_tokens=8, logits_processor=[process])[0]

    @pytest.mark.parametrize("bias", [{}, {5: 4.0, 70: 3.0, 31: 5.0, 0: -100.0}])
    @pytest.mark.parametrize("allowed", [None, [*range(25, 90), 5]])
    def test_logit_bias_and_allowed_token_ids(self, llama, prompts, bias, allowed):
        folder, model = llama
        params = beam_params(4, 4, 1.0, False, 8)
        params.logit_bias, params.allowed_token_ids = bias, allowed

        def change(scores: Any) -> Any:
            scores = scores.clone()
            if allowed is not None:
                keep = scores[:, allowed].clone()
                scores.fill_(-torch.inf)
                scores[:, allowed] = keep
            for token_id, value in bias.items():
                scores[:, token_id] += value
            return scores

        for prompt, output in zip(prompts, make_llm(folder).generate(prompts, params, use_tqdm=False), strict=True):
            tokens, scores = zip(*self.expected(model, prompt, change), strict=True)
            assert [each.token_ids for each in output.outputs] == list(tokens)
            assert scores_of(output.outputs, 1.0) == pytest.approx(scores, abs=1e-4)

    @pytest.mark.parametrize("temperature", [0.5, 3.0])
    def test_temperature(self, llama, prompts, temperature):
        folder, model = llama
        params = BeamSearchParams(4, 8, temperature=temperature)
        for prompt, output in zip(prompts, make_llm(folder).beam_search(prompts, params, use_tqdm=False), strict=True):
            tokens, scores = zip(*self.expected(model, prompt, lambda scores: scores / temperature), strict=True)
            assert [each.tokens for each in output.sequences] == [prompt + each for each in tokens]
            assert [each.score for each in output.sequences] == pytest.approx(scores, abs=1e-4)

    def test_custom_processors_and_their_arguments(self, llama, prompts):
        class Favour(AdapterLogitsProcessor):
            """Adds 5 to the tokens that a request names."""

            def is_argmax_invariant(self) -> bool:
                return False

            def new_req_logits_processor(self, params: SamplingParams) -> Any:
                favoured = (params.extra_args or {}).get("favour")
                if favoured is None:
                    return None

                def add(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
                    logits[favoured] += 5.0
                    return logits

                return add

        plain, biased, favoured = (beam_params(4, 4, 1.0, False, 8) for _ in range(3))
        biased.logit_bias = {5: 5.0, 70: 5.0}
        favoured.extra_args = {"favour": [5, 70]}
        llm = make_llm(llama[0], logits_processors=[Favour])
        found = llm.generate(prompts * 3, [plain] * 4 + [biased] * 4 + [favoured] * 4, use_tqdm=False)
        assert [each.outputs for each in found[4:8]] == [each.outputs for each in found[8:]]
        assert [each.outputs for each in found[:4]] != [each.outputs for each in found[8:]]

    def test_fewer_sequences_than_beams(self, llama):
        params = beam_params(4, 4, 1.0, False, 3)
        params.allowed_token_ids = [9]
        (output,) = make_llm(llama[0]).generate([[1, 2, 3]], params, use_tqdm=False)
        assert [each.token_ids for each in output.outputs] == [[9, 9, 9]]
        assert output.outputs[0].cumulative_logprob == pytest.approx(0.0, abs=1e-6)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return make_tiny_llm(make_tiny_model(tmp_path_factory.mktemp("tiny")))


class TestWithATokenizer:
    def test_texts(self, llm):
        tokenizer = llm.llm_engine.tokenizer
        params = {"max_tokens": 3, "early_stopping": True}
        ids = tokenizer.encode("the cat")
        (plain,) = llm.beam_search("the cat", BeamSearchParams(3, ignore_eos=True, **params), use_tqdm=False)
        for each in plain.sequences:
            assert each.tokens[: len(ids)] == ids and len(each.tokens) == len(ids) + 3
            assert each.text == tokenizer.decode(each.tokens) and each.text.startswith("the cat")

        biased = {"use_beam_search": True, "temperature": 0, "n": 3, "logit_bias": {EOS: 8.0}, **params}
        (hidden,) = llm.generate("the cat", SamplingParams(**biased), use_tqdm=False)
        (shown,) = llm.generate(
            "the cat",
            SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False, **biased),
            use_tqdm=False,
        )
        (off,) = llm.generate("the cat", SamplingParams(detokenize=False, **biased), use_tqdm=False)
        ends = [each.finish_reason for each in hidden.outputs]
        assert "stop" in ends and hidden.prompt == "the cat"
        for one, other, third in zip(hidden.outputs, shown.outputs, off.outputs, strict=True):
            assert one.token_ids == other.token_ids == third.token_ids and third.text == ""
            stopped = one.finish_reason == "stop"
            assert one.text == tokenizer.decode(one.token_ids[:-1] if stopped else one.token_ids)
            assert other.text == tokenizer.decode(one.token_ids, skip_special_tokens=False)
            assert other.text.endswith("</s>") == stopped

    def test_the_end_of_a_sequence_in_its_text(self, llm):
        embedding = llm.get_tokenizer()
        for include, skip in itertools.product((True, False), (True, False)):
            params = BeamSearchParams(
                30, 2, include_stop_str_in_output=include, skip_special_tokens=skip, length_penalty=-1.0
            )
            (output,) = llm.beam_search("the", params, use_tqdm=False)
            for each in output.sequences:
                ends = each.finish_reason == "stop"
                assert ends == (each.tokens[-1] == EOS)
                shown = each.tokens[:-1] if ends and not include else each.tokens
                assert each.text == embedding.decode(shown, skip_special_tokens=skip)

    def test_the_readings_of_each_token(self, llm):
        (output,) = llm.beam_search("the cat", BeamSearchParams(3, 4, ignore_eos=True), use_tqdm=False)
        for each in output.sequences:
            generated = each.tokens[-4:]
            assert [next(iter(position)) for position in each.logprobs] == generated
            own = [position[token_id] for position, token_id in zip(each.logprobs, generated, strict=True)]
            assert sum(entry.logprob for entry in own) == pytest.approx(each.cum_logprob)
            assert [entry.decoded_token for entry in own] == llm.llm_engine.tokenizer.decode_tokens(generated)
            for position in each.logprobs:
                others = list(position.values())[1:]
                assert len(position) == 3 and [e.rank for e in others] == sorted(e.rank for e in others)
        # The same positions as ordinary readings of the best sequence.
        best = output.sequences[0]
        check = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
        for i in range(4):
            (plain,) = llm.generate([best.tokens[: len(best.tokens) - 4 + i]], check, use_tqdm=False)
            wanted = plain.outputs[0].logprobs[0]
            assert {k: v.logprob for k, v in best.logprobs[i].items()} == pytest.approx(
                {k: wanted[k].logprob for k in best.logprobs[i]}, abs=1e-5
            )

    def test_mixed_with_ordinary_requests(self, llm):
        beam = SamplingParams(use_beam_search=True, temperature=0, n=2, max_tokens=6)
        plain = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
        sampled = SamplingParams(n=2, seed=3, max_tokens=4)
        kinds = [plain, beam, sampled, beam]
        texts = ["a", "b", "the cat", "stop"]
        together = llm.generate(texts, kinds, use_tqdm=False)
        assert [output.prompt for output in together] == texts
        for text, params, output in zip(texts, kinds, together, strict=True):
            (alone,) = llm.generate(text, params, use_tqdm=False)
            assert [each.token_ids for each in output.outputs] == [each.token_ids for each in alone.outputs]
            assert [each.text for each in output.outputs] == [each.text for each in alone.outputs]
        assert len({output.request_id for output in together}) == 4
        assert is_empty(llm)

    def test_the_progress_bar_counts_prompts(self, llm):
        totals: list[int] = []
        updates: list[int] = []

        def make_bar(total: int, **_: Any) -> RecordingBar:
            totals.append(total)
            return RecordingBar(updates)

        llm.beam_search(["a", "b"], BeamSearchParams(2, 3), use_tqdm=make_bar)
        assert (totals, updates) == ([2], [1, 1])

    def test_metrics(self, llm):
        (output,) = llm.generate("a", SamplingParams(use_beam_search=True, temperature=0, max_tokens=3), use_tqdm=False)
        metrics = output.metrics
        assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


class TestFailures:
    PROMPTS = ([3, 4, 5], [6, 7, 8, 9], [10, 11])

    @pytest.fixture
    def folder(self, tmp_path):
        """A model whose head is not its embedding, which `poison` is to leave alone."""
        return make_random_model("llama", "odd", tmp_path)[0]

    @pytest.fixture
    def llm(self, folder):
        return make_llm(folder)

    @staticmethod
    def poison(llm: LLM, token_id: int) -> None:
        """Whatever reads this token gives NaN."""

        def fill(worker: Any) -> None:
            worker.model_runner.model.model.embed_tokens.weight.data[token_id] = torch.nan

        llm.collective_rpc(fill)

    def test_a_prompt_with_nan_logits_ends_alone(self, llm):
        params = beam_params(3, 2, 1.0, False, 6)
        clean = llm.generate(list(self.PROMPTS), params, use_tqdm=False)
        self.poison(llm, 7)
        llm.reset_prefix_cache()
        broken = llm.generate(list(self.PROMPTS), params, use_tqdm=False)
        assert [each.finish_reason for each in broken[1].outputs] == ["error"]
        assert broken[1].request_id in broken[1].outputs[0].error and "NaN" in broken[1].outputs[0].error
        for i in (0, 2):
            assert [each.token_ids for each in broken[i].outputs] == [each.token_ids for each in clean[i].outputs]
        found = llm.beam_search(list(self.PROMPTS), BeamSearchParams(3, 6), use_tqdm=False)
        assert found[1].sequences == [] and "NaN" in found[1].error
        assert found[0].error is None and len(found[0].sequences) == 3
        assert is_empty(llm)

    def test_nan_in_one_beam_ends_its_prompt_and_drops_the_other_beams(self, folder):
        # One request a step: the broken beam is the first of its step, the others are still waiting.
        llm = make_llm(folder, max_num_seqs=1)
        params = beam_params(3, 3, 1.0, "never", 6)
        clean = llm.generate(list(self.PROMPTS), params, use_tqdm=False)
        used = {token for output in clean[1:] for each in output.outputs for token in each.token_ids}
        first = clean[0].outputs[0].token_ids[0]
        assert first not in used.union(*self.PROMPTS)
        self.poison(llm, first)
        llm.reset_prefix_cache()
        finished: list[int] = []
        broken = llm.generate(list(self.PROMPTS), params, use_tqdm=lambda **_: RecordingBar(finished))
        assert [each.finish_reason for each in broken[0].outputs] == ["error"]
        for one, other in zip(broken[1:], clean[1:], strict=True):
            assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
        assert finished == [1, 1, 1]
        assert is_empty(llm)

    def test_a_search_that_outgrows_the_cache_ends_alone(self, llama):
        llm = make_llm(llama[0], num_gpu_blocks_override=2)
        prompts = [list(range(100, 130)), [5, 6, 7]]
        long, short = llm.beam_search(prompts, BeamSearchParams(3, 10, ignore_eos=True), use_tqdm=False)
        assert long.sequences == [] and "KV cache" in long.error
        assert short.error is None and [len(each.tokens) for each in short.sequences] == [13] * 3
        assert is_empty(llm)

    def test_interruptions_and_faults_leave_nothing(self, llm, monkeypatch):
        before = contents(llm.beam_search(list(self.PROMPTS), BeamSearchParams(3, 6), use_tqdm=False))
        core = llm.llm_engine.engine_core
        places = (
            (core.scheduler, "schedule"),
            (core.executor.worker.model_runner.model, "compute_logits"),
            (llm.llm_engine.output_processor, "process_outputs"),
            (llm.llm_engine, "add_processed"),
        )
        for (owner, name), at, error in itertools.product(places, (1, 2, 5), (KeyboardInterrupt, MemoryError)):
            calls = itertools.count(1)
            inner = getattr(owner, name)

            def fail(*args, inner=inner, at=at, calls=calls, error=error, **kwargs):
                if next(calls) == at:
                    raise error
                return inner(*args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fail)
                with pytest.raises(error):
                    llm.beam_search(list(self.PROMPTS), BeamSearchParams(3, 6), use_tqdm=False)
            assert is_empty(llm), (name, at)
        assert contents(llm.beam_search(list(self.PROMPTS), BeamSearchParams(3, 6), use_tqdm=False)) == before

    def test_a_bad_request_beside_it_queues_nothing(self, llm):
        beam = beam_params(2, 2, 1.0, False, 4)
        with pytest.raises(VLLMValidationError, match="priority 1 needs"):
            llm.generate(list(self.PROMPTS), [beam, beam, SamplingParams()], use_tqdm=False, priority=[0, 0, 1])
        with pytest.raises(VLLMValidationError, match="priority 1 needs"):
            llm.generate(list(self.PROMPTS), beam, use_tqdm=False, priority=[0, 1, 0])
        assert is_empty(llm)

    @pytest.mark.parametrize(
        ("priority", "expected"),
        [
            ([1, 0, 0], ["1"] * 5 + ["2", "0", "0", "0", "0", "0"]),
            # Of equal priority, a search's later readings are as old as its first.
            ([0, 0, 0], ["0"] * 5 + ["1"] * 5 + ["2"]),
        ],
    )
    def test_priority_and_arrival_hold_for_all_readings(self, llama, priority, expected):
        llm = make_llm(llama[0], scheduling_policy="priority", max_num_seqs=1)
        order: list[str] = []
        inner = llm.llm_engine.step

        def step() -> list[Any]:
            outputs = inner()
            order.extend(output.request_id.partition(".")[0] for output in outputs)
            return outputs

        llm.llm_engine.step = step
        beam, plain = beam_params(2, 2, 1.0, False, 3), SamplingParams(temperature=0, max_tokens=1)
        llm.generate([[5, 6], [7, 8], [9]], [beam, beam, plain], use_tqdm=False, priority=priority)
        assert order == expected


class TestParams:
    @pytest.mark.parametrize(
        ("fields", "name"),
        [
            ({"beam_width": 0}, "beam_width"),
            ({"beam_width": 2.5}, "beam_width"),
            ({"beam_width": True}, "beam_width"),
            ({"beam_width": 16385}, "beam_width"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": None}, "max_tokens"),
            ({"temperature": -0.1}, "temperature"),
            ({"temperature": float("nan")}, "temperature"),
            ({"length_penalty": float("inf")}, "length_penalty"),
            ({"length_penalty": "1"}, "length_penalty"),
            ({"early_stopping": "always"}, "early_stopping"),
            ({"early_stopping": 1}, "early_stopping"),
            ({"ignore_eos": None}, "ignore_eos"),
            ({"skip_special_tokens": 1}, "skip_special_tokens"),
            ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ],
    )
    def test_bad_values_are_named(self, fields, name):
        with pytest.raises(VLLMValidationError, match=name) as caught:
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})
        assert caught.value.parameter == name

    def test_numpy_numbers_are_numbers(self):
        params = BeamSearchParams(np.int64(3), np.int32(4), temperature=np.float32(0.5))
        assert (type(params.beam_width), type(params.max_tokens), type(params.temperature)) == (int, int, float)

    @pytest.mark.parametrize(
        "fields",
        [{"temperature": 1.0}, {"top_p": 0.5}, {"logprobs": 1}, {"stop": "a"}, {"min_tokens": 1}, {"max_tokens": 0}],
    )
    def test_what_beam_search_cannot_be_combined_with(self, fields):
        (name,) = fields
        with pytest.raises(VLLMValidationError, match="use_beam_search") as caught:
            SamplingParams(**{"use_beam_search": True, "temperature": 0, **fields})
        assert caught.value.parameter == name

    def test_the_wrong_kind_of_params(self, llama):
        llm = make_llm(llama[0])
        with pytest.raises(VLLMValidationError, match="BeamSearchParams, got SamplingParams"):
            llm.beam_search([[1]], SamplingParams(), use_tqdm=False)
        with pytest.raises(VLLMValidationError, match="SamplingParams, got BeamSearchParams"):
            llm.generate([[1]], BeamSearchParams(2, 2), use_tqdm=False)
        with pytest.raises(VLLMValidationError, match="2 entries for 1 prompts"):
            llm.beam_search([[1]], [BeamSearchParams(2, 2)] * 2, use_tqdm=False)
        with pytest.raises(VLLMValidationError, match="no room"):
            llm.beam_search([[1] * 64], BeamSearchParams(2, 2), use_tqdm=False)
        assert llm.beam_search([], BeamSearchParams(2, 2), use_tqdm=False) == []
        assert is_empty(llm)
