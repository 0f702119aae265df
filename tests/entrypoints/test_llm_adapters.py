"""LoRA adapters through every door of LLM, against transformers' model with the adapter merged in, in float32."""

from __future__ import annotations

import random

import pytest
import torch
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model
from tiny_adapters import make_adapter, merged
from tiny_llm import is_empty, make_tiny_llm

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.params.beam_search import BeamSearchParams
from vllm.sampling_params import StructuredOutputsParams

TOLERANCE = 1e-4
NUM_ADAPTERS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
PROMPTS = [[5, 9, 12, 40, 7], list(range(30, 70)), [8], [5, 9, 12, 40, 7, 90, 91]]


class Made:
    """A model, adapters of it, and what the merged models say."""

    def __init__(self, folder) -> None:
        self.folder = folder
        _, self.model = make_random_model("llama", "small", folder / "model", vocab_size=VOCAB_SIZE)
        make_byte_tokenizer(folder / "model")
        self.models = {None: self.model}
        self.requests = []
        for number in range(1, NUM_ADAPTERS + 1):
            path = make_adapter(folder / f"a{number}", self.model, rank=2 * number, seed=number)
            self.requests.append(LoRARequest(f"a{number}", number, str(path)))
            self.models[f"a{number}"] = merged(self.model, path)

    @torch.no_grad()
    def logprobs(self, adapter: LoRARequest | None, ids: list[int]) -> torch.Tensor:
        """float64 [tokens, vocabulary], of what follows each."""
        model = self.models[None if adapter is None else adapter.lora_name]
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    def check(self, output, adapter: LoRARequest | None) -> None:
        """Its tokens are the merged model's, with its readings."""
        assert output.lora_request == adapter
        (completion,) = output.outputs
        prompt, found = output.prompt_token_ids, completion.token_ids
        rows = self.logprobs(adapter, prompt + found)[len(prompt) - 1 :]
        for row, token, readings in zip(rows, found, completion.logprobs, strict=False):
            assert token == int(row.argmax())
            for each, reading in readings.items():
                assert reading.logprob == pytest.approx(float(row[each]), abs=TOLERANCE)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def llm(made):
    options = {"max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 8, "max_num_seqs": 4, "num_gpu_blocks_override": 24}
    return make_tiny_llm(made.folder / "model", enable_lora=True, **options)


def ids_of(prompts):
    return [{"prompt_token_ids": each} for each in prompts]


def test_generate_with_one_for_all_and_with_one_each(made, llm):
    first = made.requests[0]
    for output in llm.generate(ids_of(PROMPTS), GREEDY, lora_request=first, use_tqdm=False):
        made.check(output, first)
    each = [made.requests[3], None, made.requests[1], made.requests[0]]
    for output, own in zip(llm.generate(ids_of(PROMPTS), GREEDY, lora_request=each), each, strict=True):
        made.check(output, own)
    with pytest.raises(VLLMValidationError, match="lora_request has 2 entries for 4 prompts"):
        llm.generate(ids_of(PROMPTS), GREEDY, lora_request=each[:2])
    with pytest.raises(VLLMValidationError, match="must be a LoRARequest, got int"):
        llm.generate("ab", GREEDY, lora_request=7)
    assert is_empty(llm)


def test_chat_and_enqueue(made, llm):
    own = made.requests[2]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (output,) = llm.chat([{"role": "user", "content": "hello"}], GREEDY, chat_template=template, lora_request=own)
    made.check(output, own)
    llm.enqueue("abc", GREEDY, lora_request=own)
    (output,) = llm.wait_for_completion(use_tqdm=False)
    made.check(output, own)


def test_beam_search(made, llm):
    own, ids = made.requests[1], PROMPTS[0]
    (found,) = llm.beam_search(ids_of([ids]), BeamSearchParams(beam_width=3, max_tokens=4), lora_request=own)
    wanted = made.models[own.lora_name].generate(
        torch.tensor([ids]), num_beams=3, max_new_tokens=4, do_sample=False, length_penalty=1.0
    )
    assert found.sequences[0].tokens == wanted[0].tolist()


LABELS = [[7, 8], [9], [7, 9, 11]]


def label_logprobs(made, adapter, prompt):
    totals = []
    for label in LABELS:
        rows = made.logprobs(adapter, prompt + label)[len(prompt) - 1 : -1]
        totals.append(float(rows.gather(1, torch.tensor(label)[:, None]).sum()))
    return totals


def test_labels_by_several_adapters(made, llm):
    adapters = [None, *made.requests]
    found = llm.score_labels(ids_of(PROMPTS), LABELS, lora_requests=adapters, use_tqdm=False)
    assert [len(each) for each in found] == [len(adapters)] * len(PROMPTS)
    for prompt, row in zip(PROMPTS, found, strict=True):
        for adapter, scores in zip(adapters, row, strict=True):
            wanted = label_logprobs(made, adapter, prompt)
            assert [each.logprob for each in scores.labels] == pytest.approx(wanted, abs=3 * TOLERANCE)
    single = llm.score_labels(ids_of(PROMPTS), LABELS, lora_request=made.requests[0])
    assert [each.labels[0].logprob for each in single] == [row[1].labels[0].logprob for row in found]
    for wrong in ([], "a1"):
        with pytest.raises(VLLMValidationError, match="lora_requests"):
            llm.score_labels("ab", LABELS, lora_requests=wrong)
    with pytest.raises(VLLMValidationError, match="in place of lora_request"):
        llm.score_labels("ab", LABELS, lora_request=adapters[1], lora_requests=adapters)


def test_decide(made, llm):
    question = {"type": "predicate", "name": "fits", "instructions": "Is it good?"}
    plain = llm.decide("a text", [question])[0]
    own = llm.decide("a text", [question], lora_request=made.requests[0])[0]
    alone = make_tiny_llm(made.folder / "model", enable_lora=True, max_lora_rank=8)
    again = alone.decide(["a text", "a text"], [question], lora_request=[made.requests[0], None])
    assert again == [own, plain] and own != plain


@torch.no_grad()
def test_random_requests_while_adapters_come_and_go(made, llm):
    """Each answer is the one that its adapter gives alone, whatever was evicted and read again."""
    draw = random.Random(3)
    engine = llm.llm_engine
    asked, found = {}, {}
    for number in range(200):
        adapter = draw.choice([None, *made.requests])
        prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.choice([1, 3, 17, 40]))]
        if number % 3 == 0:
            prompt = PROMPTS[1] + prompt
        params = SamplingParams(temperature=0, max_tokens=draw.randrange(1, 5), logprobs=1)
        engine.add_request(f"r{number}", {"prompt_token_ids": prompt}, params, lora_request=adapter)
        asked[f"r{number}"] = adapter
        for _ in range(draw.randrange(3)):
            found |= {each.request_id: each for each in engine.step() if each.finished}
        if draw.random() < 0.1:
            engine.remove_lora(draw.randrange(1, NUM_ADAPTERS + 1))
    while engine.has_unfinished_requests():
        found |= {each.request_id: each for each in engine.step() if each.finished}
    assert len(found) == 200
    for name, adapter in asked.items():
        made.check(found[name], adapter)
    assert engine.list_loras() and len(engine.list_loras()) <= 3 and is_empty(llm)


def test_memory_returns(made, llm):
    engine = llm.llm_engine
    for each in made.requests[:3]:
        assert engine.add_lora(each)
    assert engine.list_loras() == {1, 2, 3}
    assert engine.pin_lora(2)
    engine.add_lora(made.requests[3])
    assert engine.list_loras() == {2, 3, 4}
    for number in (2, 3, 4):
        assert engine.remove_lora(number)
    assert engine.list_loras() == set() and not engine.remove_lora(2)
    assert llm.collective_rpc("list_loras") == [set()]


def test_a_damaged_adapter_changes_nothing(made, llm, tmp_path):
    engine, good = llm.llm_engine, made.requests[0]
    engine.add_lora(good)
    before = engine.list_loras()
    with pytest.raises(ValueError, match="adapter_config.json"):
        llm.generate("ab", GREEDY, lora_request=LoRARequest("none", 7, str(tmp_path)))
    large = make_adapter(tmp_path / "large", made.model, rank=16)
    with pytest.raises(ValueError, match="max_lora_rank"):
        llm.generate(["ab", "cd"], GREEDY, lora_request=[good, LoRARequest("large", 8, str(large))])
    with pytest.raises(VLLMValidationError, match="another path"):
        llm.generate("ab", GREEDY, lora_request=LoRARequest("a1", 1, str(large)))
    assert engine.list_loras() == before and is_empty(llm)
    (output,) = llm.generate("ab", GREEDY, lora_request=good)
    made.check(output, good)


def test_one_that_is_loaded_again_in_place(made, llm, tmp_path):
    path = make_adapter(tmp_path / "changing", made.model, rank=4, seed=50)
    own = LoRARequest("changing", 9, str(path), load_inplace=True)
    prompts = ids_of([PROMPTS[1], PROMPTS[1] + [4]])
    for seed in (50, 51):
        make_adapter(path, made.model, rank=4, seed=seed)
        made.models["changing"] = merged(made.model, path)
        for output in llm.generate(prompts, GREEDY, lora_request=own):
            made.check(output, own)


def test_drafted_tokens_are_verified_by_the_requests_adapter(made):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    llm = make_tiny_llm(made.folder / "model", enable_lora=True, max_loras=2, speculative_config=drafts)
    each = [made.requests[0], None, made.requests[1], made.requests[2]]
    prompts = [ids * 3 for ids in PROMPTS[:1] * 4]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    for output, own in zip(llm.generate(ids_of(prompts), params, lora_request=each), each, strict=True):
        made.check(output, own)


def test_prompt_readings_and_answers_bound_to_a_choice(made, llm):
    own, params = made.requests[0], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt = PROMPTS[1]
    for adapter in (own, None, own):
        (output,) = llm.generate(ids_of([prompt]), params, lora_request=adapter)
        rows = made.logprobs(adapter, prompt)
        for place, reading in enumerate(output.prompt_logprobs[1:]):
            token = prompt[place + 1]
            assert reading[token].logprob == pytest.approx(float(rows[place, token]), abs=TOLERANCE)
    form = StructuredOutputsParams(choice=["ab", "cd"])
    bound = SamplingParams(temperature=0, max_tokens=8, structured_outputs=form, choice_readings=True)
    outputs = llm.generate("x", bound, lora_request=own) + llm.generate("x", bound)
    for output, adapter in zip(outputs, (own, None), strict=True):
        ids = output.prompt_token_ids
        encode = llm.llm_engine.tokenizer.encode
        wanted = []
        for text in ("ab", "cd"):
            label = encode(text, add_special_tokens=False)
            rows = made.logprobs(adapter, ids + label)[len(ids) - 1 : -1]
            wanted.append(float(rows.gather(1, torch.tensor(label)[:, None]).sum()))
        found = output.outputs[0].choice_readings
        assert found.logprobs.tolist() == pytest.approx(wanted, abs=TOLERANCE)


def test_adapters_that_are_not_enabled(made):
    plain = make_tiny_llm(made.folder / "model")
    with pytest.raises(VLLMValidationError, match="start the engine with enable_lora=True"):
        plain.generate("ab", GREEDY, lora_request=made.requests[0])
    with pytest.raises(VLLMValidationError, match="enable_lora=True"):
        plain.llm_engine.list_loras()
