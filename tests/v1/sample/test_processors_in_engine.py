"""Custom processors, callables and bad words through LLM.generate."""

from __future__ import annotations

import sys

import pytest
import torch
from byte_tokenizer import byte_ids
from installed_package import TARGET_TOKEN, install
from tiny_llm import is_empty, make_tiny_llm

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotLogitsProcessor

LENGTH = {"max_tokens": 6, "ignore_eos": True}
GREEDY = {"temperature": 0, **LENGTH}
PROMPTS = ["one", "the second", "3", "stop four", "5th"]


@pytest.fixture(scope="module")
def plain(folder):
    return make_tiny_llm(folder)


@pytest.fixture
def target_token(tmp_path, monkeypatch):
    """The module `target_token`, in a folder that is on sys.path for the test."""
    folder = install(tmp_path / "site", "target_token", TARGET_TOKEN, {})
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("target_token", None)


def generate(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert is_empty(llm)
    return [output.outputs[0] for output in outputs]


@pytest.mark.parametrize("name", ["TargetToken", "TargetTokenOfRequest"])
@pytest.mark.parametrize("way", ["name", "entry point", "class"])
def test_a_target_token_is_forced(folder, plain, target_token, way, name):
    specs = None
    if way == "name":
        specs = [f"target_token:{name}"]
    elif way == "class":
        specs = [getattr(__import__("target_token"), name)]
    else:
        entry = f"[vllm.logits_processors]\nforced = target_token:{name}\n"
        (target_token / "target_token-1.0.dist-info" / "entry_points.txt").write_text(entry)
    llm = make_tiny_llm(folder, logits_processors=specs, max_num_seqs=3)

    def with_target(token, **fields):
        return SamplingParams(extra_args={"target_token": token}, **fields)

    params = [
        with_target(77, **GREEDY),
        SamplingParams(**GREEDY),
        with_target(8, seed=1, top_k=3, **LENGTH),
        SamplingParams(extra_args={"something": "else"}, seed=2, **LENGTH),
        with_target(200, logprobs=1, **GREEDY),
    ]
    forced = generate(llm, PROMPTS, params)
    assert [forced[i].token_ids for i in (0, 2, 4)] == [[77] * 6, [8] * 6, [200] * 6]
    untouched = generate(plain, [PROMPTS[1], PROMPTS[3]], [params[1], params[3]])
    assert [forced[i].token_ids for i in (1, 3)] == [each.token_ids for each in untouched]
    # The readings are the model's own, of a token that it did not favour.
    assert forced[4].logprobs[0][200].rank > 1
    assert len(forced[4].logprobs[0]) == 2


class TestSlots:
    """Processors of upstream's newer interface, which keep their state by slot."""

    class Unrepeated(SlotLogitsProcessor):
        """Lowers the logit of every token that the text holds by `extra_args["lower"]`."""

        def __init__(self, vllm_config, req_states):
            assert vllm_config.speculative_config is None
            self.states = req_states
            self.lower = torch.zeros(req_states.max_num_reqs)
            self.staged = torch.zeros(req_states.max_num_reqs)

        @classmethod
        def validate_params(cls, sampling_params):
            if (sampling_params.extra_args or {}).get("lower", 0) < 0:
                raise ValueError("lower must not be negative")

        def add_request(self, req_idx, sampling_params):
            self.staged[req_idx] = (sampling_params.extra_args or {}).get("lower", 0)
            if self.staged[req_idx] == 13:
                raise ValueError("unlucky")
            return bool(self.staged[req_idx])

        def apply_staged_writes(self):
            self.lower.copy_(self.staged)

        def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
            assert (self.lower[ctx.expanded_idx_mapping.long()] > 0).all()
            for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
                length = int(self.states.total_len.gpu[slot])
                ids = self.states.all_token_ids.gpu[slot, :length].long()
                assert length == ctx.seq_lens_upper_bound_np[row] == ctx.pos[row] + 1
                assert ids[-1] == ctx.input_ids[row]
                if self.lower[slot] == 7:
                    raise RuntimeError("seven")
                logits[row, ids.unique()] -= self.lower[slot]
            return logits

    def test_history(self, folder, plain):
        def lowered(by):
            def process(prompt_ids, output_ids, logits):
                logits[sorted({*prompt_ids, *output_ids})] -= by
                return logits

            return SamplingParams(logits_processors=[process], **GREEDY)

        def asking(by):
            return SamplingParams(extra_args={"lower": by}, **GREEDY)

        # Fewer slots than requests: a slot's next request has nothing of the last one.
        llm = make_tiny_llm(folder, logits_processors=[self.Unrepeated], max_num_seqs=2)
        mixed = [asking(9.0), SamplingParams(**GREEDY), asking(0.25), asking(0), asking(9.0)]
        found = generate(llm, PROMPTS, mixed)
        expected = [lowered(9.0), SamplingParams(**GREEDY), lowered(0.25), SamplingParams(**GREEDY), lowered(9.0)]
        assert [each.token_ids for each in found] == [each.token_ids for each in generate(plain, PROMPTS, expected)]
        with pytest.raises(VLLMValidationError, match="must not be negative"):
            llm.generate(PROMPTS[0], asking(-1))

        failed = llm.generate(PROMPTS, [asking(7), *mixed[1:4], asking(13)], use_tqdm=False)
        errors = [output.outputs[0].error for output in failed]
        assert "Unrepeated raised RuntimeError: seven" in errors[0] and errors[1] is errors[3] is None
        assert "Unrepeated raised ValueError: unlucky" in errors[4]
        assert failed[1].outputs[0].token_ids == found[1].token_ids


class TestErrors:
    class Broken(LogitsProcessor):
        """Does what `extra_args["do"]` of a request says."""

        built = 0

        def __init__(self, vllm_config, device, is_pin_memory):
            type(self).built += 1
            self.tasks = {}

        def is_argmax_invariant(self):
            return False

        def update_state(self, batch_update):
            for _, params, _, _ in batch_update.added if batch_update else ():
                task = (params.extra_args or {}).get("do")
                if task == "fail in update_state":
                    raise RuntimeError("state lost")
                self.tasks[id(params)] = task

        def apply(self, logits):
            if "fail in apply" in self.tasks.values():
                raise IndexError("out of luck")
            return logits.half() if "wrong" not in self.tasks.values() else logits.argmax(dim=-1)

    @pytest.mark.parametrize(
        ("task", "message"),
        [
            ("fail in update_state", "logits processor Broken raised RuntimeError: state lost"),
            ("fail in apply", "logits processor Broken raised IndexError: out of luck"),
            ("wrong", r"logits processor Broken returned a tensor of shape \(\d,\), not \(\d, \d+\)"),
        ],
    )
    def test_a_processor_of_the_batch(self, folder, task, message):
        llm = make_tiny_llm(folder, logits_processors=[self.Broken])
        built = self.Broken.built
        good = SamplingParams(**GREEDY)
        for completion in generate(llm, ["a", "b"], [good, SamplingParams(extra_args={"do": task})]):
            assert completion.finish_reason == "error"
            assert completion.token_ids == []
            with pytest.raises(RuntimeError, match=message):
                raise RuntimeError(completion.error)
        (again,) = generate(llm, ["a"], good)
        assert (again.finish_reason, len(again.token_ids), self.Broken.built) == ("length", 6, built + 1)

    class OfRequest(AdapterLogitsProcessor):
        def is_argmax_invariant(self):
            return False

        def new_req_logits_processor(self, params):
            def third_time_fails(output_ids, logits):
                if len(output_ids) == 2:
                    raise OverflowError("third token")
                return logits

            return third_time_fails if (params.extra_args or {}).get("fail") else None

    def test_a_processor_of_a_request(self, folder, plain):
        llm = make_tiny_llm(folder, logits_processors=[self.OfRequest])
        good = SamplingParams(**GREEDY)
        params = [good, SamplingParams(extra_args={"fail": True}, **GREEDY), good]
        first, failed, last = generate(llm, PROMPTS[:3], params)
        assert failed.finish_reason == "error" and len(failed.token_ids) == 2
        assert "logits processor OfRequest raised OverflowError: third token" in failed.error
        expected = generate(plain, [PROMPTS[0], PROMPTS[2]], good)
        assert [first.token_ids, last.token_ids] == [each.token_ids for each in expected]

    def test_a_callable(self, plain):
        def fails_later(output_ids, logits):
            return logits / (len(output_ids) - 1 or 1) if len(output_ids) < 2 else [][0]

        good = SamplingParams(**GREEDY)
        failed, other = generate(plain, ["a", "b"], [SamplingParams(logits_processors=[fails_later], **GREEDY), good])
        assert failed.finish_reason == "error" and len(failed.token_ids) == 2
        assert "logits processor fails_later raised IndexError: list index out of range" in failed.error
        assert other.token_ids == generate(plain, ["b"], good)[0].token_ids

    def test_a_constructor(self, folder):
        class Stubborn(self.Broken):
            def __init__(self, vllm_config, device, is_pin_memory):
                raise MemoryError("no room")

        with pytest.raises(RuntimeError, match="logits processor Stubborn raised MemoryError: no room"):
            make_tiny_llm(folder, logits_processors=[Stubborn])

    def test_validate_params_comes_before_anything_is_queued(self, folder, target_token):
        llm = make_tiny_llm(folder, logits_processors=["target_token:TargetToken"])
        bad = SamplingParams(extra_args={"target_token": "seven"})
        with pytest.raises(VLLMValidationError, match="target_token must be an integer, got 'seven'"):
            llm.generate(["a", "b"], [SamplingParams(), bad], use_tqdm=False)
        assert is_empty(llm)
        assert len(generate(llm, ["a"], SamplingParams(**GREEDY))[0].token_ids) == 6


def test_extra_args_arrive_as_they_were_given(folder):
    seen = []

    class Curious(AdapterLogitsProcessor):
        def __init__(self, vllm_config, device, is_pin_memory):
            super().__init__(vllm_config, device, is_pin_memory)
            seen.append((vllm_config.model_config.max_model_len, device, is_pin_memory))

        def is_argmax_invariant(self):
            return True

        def new_req_logits_processor(self, params):
            seen.append(params.extra_args)
            return None

    anything = object()
    extra_args = {"a": 1, "nested": {"list": [1, anything]}}
    llm = make_tiny_llm(folder, logits_processors=[Curious])
    generate(llm, ["a"], SamplingParams(extra_args=extra_args, **GREEDY))
    assert seen == [(128, torch.device("cpu"), False), {"a": 1, "nested": {"list": [1, anything]}}]


class TestCallables:
    def test_the_three_forms(self, plain):
        """Each forces the number of tokens so far, counted in its own way."""

        def only(token, logits):
            logits[token] += 1000
            return logits

        def with_output(output_ids, logits):
            return only(10 + len(output_ids), logits)

        def with_prompt(prompt_ids, output_ids, logits):
            return only(len(prompt_ids) + len(output_ids), logits.clone())

        def of_matrix(logits):
            only(44, logits[0])

        params = [
            SamplingParams(logits_processors=[each], **fields)
            for each, fields in ((with_output, GREEDY), (with_prompt, {"seed": 1, **LENGTH}), (of_matrix, GREEDY))
        ]
        first, second, third = generate(plain, [[5], [5, 6, 7, 8], [5]], params)
        assert first.token_ids == [10, 11, 12, 13, 14, 15]
        assert second.token_ids == [4, 5, 6, 7, 8, 9]
        assert third.token_ids == [44] * 6

    def test_state_of_samples_is_their_own(self, plain):
        """n sequences of a request each hand their own output to the callable."""
        seen = []

        def watch(output_ids, logits):
            seen.append(tuple(output_ids))
            return logits

        params = SamplingParams(n=3, seed=5, logits_processors=[watch], **LENGTH)
        (output,) = plain.generate(["abc"], params, use_tqdm=False)
        expected = [tuple(each.token_ids[:length]) for each in output.outputs for length in range(6)]
        assert sorted(seen) == sorted(expected)


class TestBadWords:
    def run(self, llm, **fields):
        params = SamplingParams(max_tokens=100, ignore_eos=True, seed=3, **fields)
        return generate(llm, ["a"], params)[0]

    def test_a_word_of_several_tokens(self, plain):
        ids = byte_ids("xyz")
        assert "xyz" in self.run(plain, allowed_token_ids=ids).text
        text = self.run(plain, allowed_token_ids=ids, bad_words=["xyz"]).text
        assert "xyz" not in text
        assert "xy" in text and "yz" in text

    def test_a_word_with_and_without_its_space(self, plain):
        the, space_the = plain.llm_engine.tokenizer.convert_tokens_to_ids(["the", "Ġthe"])
        ids = [the, space_the, *byte_ids("k ")]
        assert {the, space_the} < set(self.run(plain, allowed_token_ids=ids).token_ids)
        for word in ("the", " the"):
            assert set(self.run(plain, allowed_token_ids=ids, bad_words=[word]).token_ids) == set(byte_ids("k "))

    def test_they_need_a_tokenizer(self, folder):
        llm = make_tiny_llm(folder, skip_tokenizer_init=True)
        with pytest.raises(VLLMValidationError, match="bad_words need a tokenizer"):
            llm.generate([[5]], SamplingParams(bad_words=["x"], detokenize=False), use_tqdm=False)
        assert is_empty(llm)
