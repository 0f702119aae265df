"""Pictures in prompts: every family's readings equal transformers', whatever else happens."""

from __future__ import annotations

import base64
import importlib.util
import io
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from thread_ranks import make_thread_llm
from tiny_vision import FAMILIES, QWEN_IMAGES, WITH_TIMM, WITH_TORCHVISION, Reference, draw, make_vision_model
from with_torchvision import FOLDER

from vllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm.config.checkpoint.config import RopeConfig
from vllm.entrypoints import async_llm
from vllm.exceptions import VLLMValidationError
from vllm.inputs.images import GivenImages
from vllm.layers.rotary_embedding import RotaryEmbedding
from vllm.models.vision.processor import Processed
from vllm.ops.packed_linear import pack_linear
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.core_process.serial import decode_request, encode_request
from vllm.v1.features.images import scheduler
from vllm.v1.features.images.runner import PictureRows
from vllm.v1.features.images.scheduler import PictureTurns
from vllm.v1.messages import EngineCoreRequest

pytestmark = pytest.mark.usefixtures("one_thread")

DOCUMENT = Path(__file__).parents[2] / "docs/images.md"
TOLERANCE = 1e-4
IDS = [5, 17, 64, 100]


class Tiny(NamedTuple):
    name: str
    folder: Path
    reference: Reference

    def prompt(self, text: str, *pictures: Any, **others: Any) -> dict[str, Any]:
        """`text` with {} where a picture goes."""
        text = text.replace("{}", FAMILIES[self.name].placeholder)
        return {"prompt": text, "multi_modal_data": {"image": list(pictures)}, **others}

    def fields(self, **fields: Any) -> dict[str, Any]:
        """The arguments of an engine, the usual ones where `fields` has no others."""
        usual = {"dtype": "float32", "max_model_len": 400, "max_logprobs": -1, "max_num_seqs": 8}
        if options := FAMILIES[self.name].options:
            usual["mm_processor_kwargs"] = options
        return {**usual, **fields}

    def llm(self, **fields: Any) -> LLM:
        return LLM(str(self.folder), **self.fields(**fields))


def make_tiny(name: str, folder: Path) -> Tiny:
    return Tiny(name, folder, Reference(*make_vision_model(name, folder), name))


def reading(**fields: Any) -> SamplingParams:
    usual = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprob_token_ids": IDS, "prompt_logprobs": 0}
    return SamplingParams(**{**usual, **fields})


def generate(llm: LLM, prompts: list[Any], params: Any = None) -> list[Any]:
    return llm.generate(prompts, params or reading(), use_tqdm=False)


def check(tiny: Tiny, prompt: dict[str, Any], output: Any, is_greedy: bool = True) -> None:
    """Every position's readings, ranks and greedy tokens."""
    (completion,) = output.outputs
    assert completion.finish_reason != "error", completion.error  # which has no readings
    ids, tokens = list(output.prompt_token_ids), list(completion.token_ids)
    want_ids, values = tiny.reference.processed(prompt["prompt"], prompt["multi_modal_data"]["image"])
    assert ids == want_ids
    want = tiny.reference.logprobs(ids + tokens, values)
    assert want.std() > 0.3, "logits that are all alike would prove nothing"
    rows = [*(output.prompt_logprobs or [None])[1:], *completion.logprobs]
    first = len(want) - 1 - len(rows)
    for row, entries in zip(want[first:], rows, strict=False):
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(row[token], abs=TOLERANCE)
            above, not_below = (row > row[token] + TOLERANCE).sum(), (row >= row[token] - TOLERANCE).sum()
            assert above < entry.rank <= not_below
    for step, (token, entries) in enumerate(zip(tokens, completion.logprobs, strict=True)):
        row = want[len(ids) - 1 + step]
        assert {*IDS, token} <= set(entries)
        assert not is_greedy or row[token] == pytest.approx(row.max(), abs=TOLERANCE)


PICTURES = [draw(40, 30, 1), draw(64, 24, 2), draw(20, 50, 3)]


# A family for each way in which steps, ranks and drafts could meet pictures: rows in a prompt, positions in three
# dimensions, rows added to later layers, experts, recurrent states, attention both ways, inputs of each layer, prompts
# in one step, pictures in tiles, and several lengths.
COMBINED = [
    name
    for name in (
        *("llava", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "gemma3", "gemma4_layer_inputs", "paligemma", "idefics3"),
        *("glm4v", "pixtral", "deepseek_ocr2", *WITH_TORCHVISION, *WITH_TIMM),
    )
    if name in FAMILIES
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Each family in turn: both of its tests run before the next is made."""
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


def sizes_of(tiny: Tiny) -> dict[str, int]:
    """Steps that end within pictures, where they may, and room for the longest prompt."""
    # PaliGemma's prompts are computed in one step, and Gemma 4's pictures, which have 70 tokens.
    # DeepSeek-OCR 2's have at least 257.
    takes_whole = tiny.name.startswith(("paligemma", "gemma4", "deepseek_ocr2"))
    longest = 2000 if tiny.name == "deepseek_ocr2" else 400
    return {"max_num_batched_tokens": 160 if takes_whole else 32, "max_model_len": longest}


def test_readings_equal_transformers(family: Tiny) -> None:
    prompts = [
        family.prompt("plain text"),
        family.prompt("look {} here", PICTURES[0]),
        family.prompt("{} and {}, then {}: which", *PICTURES),
        family.prompt("other words {} here", PICTURES[0]),
    ]
    # The second call's prefixes come from the cache.
    llm = family.llm(**sizes_of(family))
    for _ in range(2):
        for prompt, output in zip(prompts, generate(llm, prompts), strict=True):
            check(family, prompt, output)
    # Another picture in the same place is another content.
    other = family.prompt("look {} here", PICTURES[1])
    outputs = generate(llm, [prompts[1], other])
    check(family, other, outputs[1])
    readings = [np.array([out.outputs[0].logprobs[0][token].logprob for token in IDS]) for out in outputs]
    assert abs(readings[0] - readings[1]).max() > 10 * TOLERANCE


@pytest.mark.parametrize("family", COMBINED, indirect=True)
def test_features_together(family: Tiny) -> None:
    """Requests over two ranks, one of which has no picture and two of which show one picture, are drafted and
    preempted, and one of them is under a grammar."""
    # A picture of DeepSeek-OCR 2's takes seconds.
    numbers = (0, 0, 0) if family.name == "deepseek_ocr2" else (0, 1, 2, 2)
    prompts = [family.prompt(f"{index} {{}} aaa aaa", PICTURES[number]) for index, number in enumerate(numbers)]
    prompts.insert(0, family.prompt("plain aaa aaa"))
    # Drafts are always tried: otherwise it is their cost that decides.
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    drafts["num_speculative_tokens_per_batch_size"] = [(1, 1024, 3)]
    llm = make_thread_llm(
        family.folder,
        2,
        **family.fields(**sizes_of(family), enable_prefix_caching=False, speculative_config=drafts),
    )
    # Few words come again soon, and not always; transformers takes a placeholder that was generated for a picture.
    words = llm.get_tokenizer().encode("a .", add_special_tokens=False)
    fields = {"max_tokens": 24, "allowed_token_ids": words}
    params = [reading(**fields, temperature=2 * (index % 2), seed=index) for index in range(len(prompts))]
    params[-1] = reading(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    outputs = generate_short_of_blocks(llm, prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        check(family, prompt, output, is_greedy=False)
    assert outputs[-1].outputs[0].text[:2] in ("ye", "no")
    assert num_encoded(llm) == len(set(numbers)), "a picture was encoded for each of its requests, or anew"
    counts = llm.llm_engine.engine_core.stats()
    assert 0 < counts["num_accepted_tokens"] < counts["num_draft_tokens"]
    llm.llm_engine.engine_core.shutdown()


def generate_short_of_blocks(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    """As `generate`, by an engine that has no block left once all have begun to answer, until it preempts one."""
    engine, done, held = llm.llm_engine, {}, []
    scheduler = engine.engine_core.scheduler
    for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(number), prompt, own)
    while engine.has_unfinished_requests():
        if not scheduler.num_preemptions and not len(scheduler.waiting):
            held += scheduler.kv.pool.allocate(scheduler.kv.pool.num_free)
        done |= {output.request_id: output for output in engine.step()}
        if scheduler.num_preemptions and held:
            scheduler.kv.pool.release(held)
            held = []
    assert scheduler.num_preemptions
    return [done[str(number)] for number in range(len(prompts))]


TESTS_OF_FAMILIES = [test_readings_equal_transformers.__name__, test_features_together.__name__]


def test_readings_of_families_that_need_more() -> None:
    # `make test` installs timm there.
    families = {**WITH_TORCHVISION, **(WITH_TIMM if FOLDER.is_dir() else {})}
    if families.keys() <= FAMILIES.keys():
        pytest.skip("they are in the table")
    script = str(Path(__file__).parents[1] / "support/with_torchvision.py")
    selected = [f"{__file__}::{test}[{name}]" for name in families for test in TESTS_OF_FAMILIES]
    # transformers looks for the packages once a process.
    command = [sys.executable, script, "-q", "-p", "no:cacheprovider", *selected]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and f"{len(selected)} passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("qwen3_vl", tmp_path_factory.mktemp("qwen"))


def num_encoded(llm: LLM) -> int:
    runner = llm.llm_engine.engine_core.executor.worker.model_runner
    return runner.guest(PictureRows)._cache.num_encoded


def test_a_picture_is_encoded_once(qwen: Tiny) -> None:
    llm = qwen.llm(enable_prefix_caching=False)
    prompts = [qwen.prompt(f"question {number} {{}} about {{}}", *PICTURES[:2]) for number in range(4)]
    for prompt, output in zip(prompts, generate(llm, prompts), strict=True):
        check(qwen, prompt, output)
    assert num_encoded(llm) == 2
    named = [qwen.prompt("a {}", PICTURES[2], multi_modal_uuids={"image": ["mine"]})]
    named.append(qwen.prompt("b {}", None, multi_modal_uuids={"image": ["mine"]}))
    outputs = generate(llm, named)
    for text, output in zip(("a {}", "b {}"), outputs, strict=True):
        check(qwen, qwen.prompt(text, PICTURES[2]), output)
    assert num_encoded(llm) == 3


def picture_guests(llm: LLM) -> tuple[PictureTurns, PictureRows]:
    core = llm.llm_engine.engine_core
    (turns,) = (each for each in core.scheduler.guests if isinstance(each, PictureTurns))
    return turns, core.executor.worker.model_runner.guest(PictureRows)


def test_names_are_known_to_prompts_of_their_salt(qwen: Tiny) -> None:
    llm = qwen.llm()
    own = {"multi_modal_uuids": {"image": ["mine"]}, "cache_salt": "a"}
    other = {**own, "cache_salt": "b"}
    generate(llm, [qwen.prompt("a {}", PICTURES[0], **own)])
    (again,) = generate(llm, [qwen.prompt("b {}", None, **own)])
    check(qwen, qwen.prompt("b {}", PICTURES[0]), again)
    for fields in (other, {"multi_modal_uuids": own["multi_modal_uuids"]}):
        with pytest.raises(VLLMValidationError, match="'mine' is not known"):
            generate(llm, [qwen.prompt("b {}", None, **fields)])
    # Another picture of the name is another's.
    generate(llm, [qwen.prompt("a {}", PICTURES[1], **other)])
    for fields, picture in ((own, PICTURES[0]), (other, PICTURES[1])):
        (output,) = generate(llm, [qwen.prompt("b {}", None, **fields)])
        check(qwen, qwen.prompt("b {}", picture), output)


def test_ids_are_laid_out_as_texts_are(paligemma: Tiny) -> None:
    llm = paligemma.llm()
    prompt = paligemma.prompt("{}{}what", *PICTURES[:2])
    ids = llm.get_tokenizer().encode(prompt["prompt"], add_special_tokens=False)
    (output,) = generate(llm, [{"prompt_token_ids": ids, "multi_modal_data": prompt["multi_modal_data"]}])
    check(paligemma, prompt, output)
    expanded = {"prompt_token_ids": output.prompt_token_ids, "multi_modal_data": prompt["multi_modal_data"]}
    assert generate(llm, [expanded])[0].prompt_token_ids == output.prompt_token_ids


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_malformed_processor_is_an_error_at_the_start(
    llava: Tiny, tmp_path: Path, name: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in llava.folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text(content)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"{name}.*language_model_only=True"):
        patch.setattr("vllm.entrypoints.llm.LLMEngine.__init__", lambda *_, **__: pytest.fail("the model was loaded"))
        LLM(str(tmp_path))
    assert LLM(str(tmp_path), language_model_only=True, max_model_len=64).generate("a", use_tqdm=False)


def test_a_server_without_its_processor_closes_its_cores(
    llava: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in llava.folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Nothing"}')
    closed: list[Any] = []
    close = async_llm._close_cores
    monkeypatch.setattr(async_llm, "_close_cores", lambda cores: (closed.extend(cores), close(cores)))
    with pytest.raises(ValueError, match="no processor 'Nothing'.*language_model_only=True"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(str(tmp_path), dtype="float32", max_model_len=64))
    assert len(closed) == 1


def test_a_missing_pillow_is_an_error_at_the_start(llava: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "PIL" else find(name, *rest))
    with pytest.raises(
        ValueError, match=r"Pillow is missing: pip install 'vllm\[vision\]', or pass language_model_only"
    ):
        llava.llm()
    assert not llava.llm(language_model_only=True).llm_engine.model_config.reads_images


def test_rows_that_were_dropped_are_made_again(qwen: Tiny) -> None:
    llm = qwen.llm(max_num_batched_tokens=16)
    turns, rows = picture_guests(llm)
    turns._max_kept_rows = 0
    prompt = qwen.prompt("{} and {}", *PICTURES[1:])
    check(qwen, prompt, generate(llm, [prompt])[0])
    assert num_encoded(llm) == 2
    prompts = [qwen.prompt(f"{index} {{}}", PICTURES[index]) for index in (1, 0, 1)]
    for _ in range(2):
        for each in prompts:
            check(qwen, each, generate(llm, [each])[0])
    assert num_encoded(llm) > 4
    generate(llm, ["no picture"])
    assert not rows._cache._rows, "rows of pictures that nobody shows are kept beyond the bound"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen2_5_vl", "float32"),
        *((name, "bfloat16") for name in FAMILIES if FAMILIES[name].image_processor[1] is QWEN_IMAGES),
    ],
)
def test_pictures_of_a_run_have_no_other_bits(name: str, dtype: str, tmp_path: Path) -> None:
    if pack_linear(torch.ones(2, 2), None).layout == "plain":
        pytest.skip("the C++ kernels are not built")
    llm = make_tiny(name, tmp_path).llm(dtype=dtype)
    tower = picture_guests(llm)[1].tower
    pictures = [*PICTURES, *(draw(16 + 8 * seed, 40, seed) for seed in range(20))]
    process = llm.llm_engine.input_processor.pictures.process
    made = [process(GivenImages((picture,), (None,), {}))[0].values for picture in pictures]
    runs = list(tower.runs(made))
    assert [number for run in runs for number in run] == list(range(len(made))) and 1 < len(runs) < len(made)
    for run in runs:
        together = tower.encode_together([made[number] for number in run])
        assert torch.equal(together, torch.cat([tower.encode(made[number]) for number in run]))


def test_a_picture_that_cannot_be_encoded_ends_its_requests_alone(qwen: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = qwen.llm(max_num_batched_tokens=400)
    tower = picture_guests(llm)[1].tower
    encode = tower.encode_together

    def failing(pictures: Any) -> torch.Tensor:
        if any(len(each["pixel_values"]) == bad for each in pictures):
            raise RuntimeError("no such picture")
        return encode(pictures)

    (made,) = llm.llm_engine.input_processor.pictures.process(GivenImages((PICTURES[1],), (None,), {}))
    bad = len(made.values["pixel_values"])
    monkeypatch.setattr(tower, "encode_together", failing)
    monkeypatch.setattr(tower, "runs", lambda pictures: [[*range(len(pictures))]] if pictures else [])
    prompts = [qwen.prompt("plain"), qwen.prompt("one {}", PICTURES[1]), qwen.prompt("two {}", PICTURES[0])]
    for _ in range(2):
        first, failed, last = generate(llm, prompts)
        assert failed.outputs[0].finish_reason == "error"
        assert "a picture cannot be encoded: RuntimeError: no such picture" in str(failed.outputs[0].error)
        check(qwen, prompts[0], first)
        check(qwen, prompts[2], last)
    assert not picture_guests(llm)[1]._cache._rows.keys() & {made.digest}


ROPE_OF_LONG_PROMPTS = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
OTHER_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2_5_vl", {"rope_parameters": {**ROPE_OF_LONG_PROMPTS, "mrope_section": [1, 2, 1]}}),
    # Its router has no such option, whatever a file says.
    ("qwen3_vl_moe", {"norm_topk_prob": False}),
    # Where it is the text decoder alone that ties its head.
    ("llava_onevision", {"tie_word_embeddings": True}),
    # Files of SmolVLM and of Pixtral have more than a decoder reads.
    ("smolvlm", {"perceiver_config": {"model_type": "vllama3"}, "pixel_shuffle_factor": 4, "use_resampler": False}),
    ("pixtral", {"is_composition": True}),
]


@pytest.mark.parametrize(("name", "text"), OTHER_OPTIONS)
def test_other_options_of_text_decoders(
    name: str, text: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[name]
    monkeypatch.setitem(FAMILIES, name, replace(family, text={**family.text, **text}))
    tiny = make_tiny(name, tmp_path)
    prompts = [tiny.prompt("plain text"), tiny.prompt("look {} here", PICTURES[0])]
    for prompt, output in zip(prompts, generate(tiny.llm(), prompts), strict=True):
        check(tiny, prompt, output)


def test_a_tokenizer_that_comes_after_ids_reads_pictures(tmp_path: Path) -> None:
    tiny = make_tiny("qwen2_5_vl", tmp_path)
    usual, llm = tiny.llm(), tiny.llm(skip_tokenizer_init=True)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    llm.set_tokenizer(usual.get_tokenizer())
    content = [{"type": "image_pil", "image_pil": PICTURES[0]}, {"type": "text", "text": "look"}]
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    template = f"{{% for part in messages[0].content %}}{{{{ part.text or '{picture}' }}}}{{% endfor %}}"
    found = [
        each.chat([{"role": "user", "content": content}], reading(), chat_template=template, use_tqdm=False)[0]
        for each in (usual, llm)
    ]
    assert found[0].prompt_token_ids == found[1].prompt_token_ids
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids


@pytest.mark.parametrize("entry", ["rope_parameters", "rope_scaling", "text_config"])
def test_overridden_sections_of_a_head(entry: str, tmp_path: Path) -> None:
    tiny = make_tiny("qwen2_5_vl", tmp_path)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    overrides = {"text_config": {"rope_parameters": rope}} if entry == "text_config" else {entry: rope}
    prompt = tiny.prompt("look {} here", PICTURES[0])
    (usual,) = generate(tiny.llm(), [prompt])
    (output,) = generate(tiny.llm(hf_overrides=overrides), [prompt])
    for module in tiny.reference.model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "rope_parameters", None):
            config.rope_parameters = {**config.rope_parameters, "mrope_section": [2, 1, 1]}
        if hasattr(module, "mrope_section"):
            module.mrope_section = [2, 1, 1]
    check(tiny, prompt, output)
    with pytest.raises(AssertionError):
        check(tiny, prompt, usual)


@pytest.mark.parametrize("sections", [[1, 2], [1, 1, 1], [1, 2, -1], ["1", 2, 1], 4])
def test_sections_that_are_not_those_of_a_head(sections: Any, tmp_path: Path) -> None:
    tiny = make_tiny("qwen2_5_vl", tmp_path)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    with pytest.raises(ValueError, match="mrope_section must be three sizes that add up to 4, got"):
        tiny.llm(hf_overrides={"rope_parameters": rope})


def test_a_videos_time_is_bounded_by_the_context(tmp_path: Path) -> None:
    llm = make_tiny("qwen2_5_vl", tmp_path).llm(max_model_len=64)
    pictures = llm.llm_engine.input_processor.pictures
    text = "<|vision_start|>" + "<|video_pad|>" * 8 + "<|vision_end|> what"
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    rows = np.flatnonzero(np.array(ids) == pictures.family.config.video_token_id)

    def located(seconds: float) -> Any:
        values = {"video_grid_thw": torch.tensor([[2, 4, 4]]), "second_per_grid_ts": torch.tensor([seconds])}
        return pictures.locate(ids, [Processed("a", text, ids, rows, values, "video")])

    assert located(10.0).shift > 0
    with pytest.raises(VLLMValidationError, match="a video's time takes the prompt to position .* is 64 tokens"):
        located(1000.0)


def test_tables_reach_further_positions() -> None:
    rope = RopeConfig("default", 1e4, {})
    short, long = RotaryEmbedding(8, 10, rope), RotaryEmbedding(8, 30, rope)
    assert not short.reach(10) and short.reach(30)
    assert torch.equal(short.cos_sin_cache, long.cos_sin_cache)


def test_a_picture_of_one_row(tmp_path: Path) -> None:
    llm = make_tiny("mistral3", tmp_path).llm()
    pictures = [draw(2, 3, 1), draw(30, 20, 2)]
    made = llm.llm_engine.input_processor.pictures.process(GivenImages((*pictures,), (None,) * 2, {}))
    assert len(made[0].rows) == 1
    tower = picture_guests(llm)[1].tower
    height, width = made[1].values["pixel_values"].shape[-2:]
    padded = torch.zeros(2, 3, height, width)
    for number, each in enumerate(made):
        pixels = each.values["pixel_values"][0]
        padded[number, :, : pixels.shape[1], : pixels.shape[2]] = pixels
    sizes = torch.cat([each.values["image_sizes"] for each in made])
    both = tower.encode({"pixel_values": padded, "image_sizes": sizes})
    torch.testing.assert_close(tower.encode(made[0].values), both[:1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kept_rows", [0, 50, 10**6])
def test_a_step_encodes_a_bounded_number_of_rows(qwen: Tiny, kept_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "ROWS_OF_A_STEP", 70)
    llm = qwen.llm(max_num_batched_tokens=400, enable_prefix_caching=False)
    turns, rows = picture_guests(llm)
    turns._max_kept_rows = kept_rows
    steps: list[list[int]] = []
    encode, before = rows.tower.encode_together, rows.before_forward

    def counted(pictures: Any) -> torch.Tensor:
        found = encode(pictures)
        steps[-1] += [len(found), *[0] * (len(pictures) - 1)]
        return found

    def begun(*args: Any) -> None:
        steps.append([])
        before(*args)

    monkeypatch.setattr(rows.tower, "encode_together", counted)
    monkeypatch.setattr(llm.llm_engine.engine_core.executor.worker.model_runner, "_before_forward", (begun,))
    prompts = [qwen.prompt(f"{{}} {n} {{}}", draw(40, 30, n), draw(64, 24, n + 10)) for n in range(4)]
    prompts += [qwen.prompt("and {}", draw(64, 24, 11))]
    for prompt, output in zip(prompts, generate(llm, prompts), strict=True):
        check(qwen, prompt, output)
    assert all(len(step) <= 1 or sum(step) <= 70 for step in steps)
    assert any(len(step) > 1 for step in steps), "pictures that fit wait for nothing"
    assert max(turns._num_kept_rows, kept_rows) == kept_rows


def test_a_reset_forgets_pictures(qwen: Tiny) -> None:
    llm = qwen.llm()
    turns, rows = picture_guests(llm)
    prompt = qwen.prompt("{}", PICTURES[0])
    generate(llm, [prompt])
    assert turns._num_kept_rows == sum(map(len, rows._cache._rows.values())) > 0
    assert llm.reset_prefix_cache()
    assert not turns._num_kept_rows
    generate(llm, ["no picture"])
    assert not rows._cache._rows
    check(qwen, prompt, generate(llm, [prompt])[0])


@pytest.mark.parametrize("name", ["qwen", "llava"])
def test_preempted_requests_go_on(name: str, request: pytest.FixtureRequest) -> None:
    tiny: Tiny = request.getfixturevalue(name)
    llm = tiny.llm(num_gpu_blocks_override=9, max_model_len=128, enable_prefix_caching=False)
    prompts = [tiny.prompt(f"{number} {{}} there", PICTURES[number]) for number in range(3)]
    # transformers takes a placeholder that was generated for a picture.
    never = {tiny.reference.model.config.image_token_id: -100}
    outputs = generate(llm, prompts, reading(max_tokens=30, prompt_logprobs=None, logit_bias=never))
    assert llm.llm_engine.engine_core.scheduler.num_preemptions
    for prompt, output in zip(prompts, outputs, strict=True):
        check(tiny, prompt, output, is_greedy=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"tensor_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"async_scheduling": True},
        {"swap_space": 0.01},
    ],
    ids=["tensor parallel", "drafts", "asynchronous", "swap"],
)
def test_with_other_features(qwen: Tiny, fields: dict[str, Any]) -> None:
    # An option that asks for nothing may have any name.
    llm = qwen.llm(max_num_batched_tokens=32, mm_processor_kwargs={"use_fast": False}, **fields)
    prompts = [qwen.prompt("plain"), qwen.prompt("{} aaa aaa aaa", PICTURES[0]), qwen.prompt("{}{}", *PICTURES[1:])]
    for prompt, output in zip(prompts, generate(llm, prompts, reading(max_tokens=12)), strict=True):
        check(qwen, prompt, output)


def test_a_store_on_disk_has_pictures(qwen: Tiny, tmp_path: Path) -> None:
    prompt = qwen.prompt("many words before it, " * 5 + "{} and {}", *PICTURES[:2])
    picture = qwen.reference.model.config.image_token_id  # transformers takes one that was generated for a picture
    for attempt in range(2):
        llm = qwen.llm(kv_store=str(tmp_path))
        (output,) = generate(llm, [prompt], reading(logit_bias={picture: -100}))
        check(qwen, prompt, output, is_greedy=False)
        cached = (len(output.prompt_token_ids) - 1) // 16 * 16
        assert cached > list(output.prompt_token_ids).index(picture)
        assert output.num_cached_tokens == attempt * cached
        llm.llm_engine.engine_core.shutdown()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.blocks"))


def test_under_a_grammar_and_by_ids(qwen: Tiny) -> None:
    llm = qwen.llm()
    prompt = qwen.prompt("which {}: ", PICTURES[0])
    form = StructuredOutputsParams(choice=["yes", "no"])
    (output,) = generate(llm, [prompt], reading(structured_outputs=form, max_tokens=8, ignore_eos=False))
    assert output.outputs[0].text in ("yes", "no")
    tokenizer = llm.get_tokenizer()
    by_ids = {**prompt, "prompt_token_ids": tokenizer.encode(prompt.pop("prompt"))}
    expanded = {**by_ids, "prompt_token_ids": output.prompt_token_ids}
    first, second = generate(llm, [by_ids, expanded])
    assert first.prompt_token_ids == second.prompt_token_ids == output.prompt_token_ids
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    check(qwen, qwen.prompt("which {}: ", PICTURES[0]), first)


def truncated() -> Any:
    file = io.BytesIO()
    draw(40, 30, 4).save(file, "PNG")
    return Image.open(io.BytesIO(file.getvalue()[:600]))


TRUNCATED = truncated()


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "1", "CMYK", "I;16"])
def test_modes_and_arrays(llava: Tiny, mode: str) -> None:
    llm = llava.llm()
    picture = draw(40, 30, 4)
    picture = picture.convert("L").convert("I").convert("I;16") if mode == "I;16" else picture.convert(mode)
    array = np.asarray(draw(40, 30, 4))
    prompts = [llava.prompt("{}", picture), llava.prompt("{}", array), llava.prompt("{}", array.transpose(2, 0, 1))]
    prompts.append(llava.prompt("{}", torch.from_numpy(array / np.float32(255)).bfloat16()))
    prompts.append(llava.prompt("{}", draw(40, 30, 4)))
    first, *others = generate(llm, prompts)
    assert len(first.outputs[0].token_ids) == 4
    for each in others:
        check(llava, prompts[-1], each)


def test_palettes_tell_pictures_apart(llava: Tiny, limited: LLM) -> None:
    first = draw(40, 30, 4).quantize(8)
    second = first.copy()
    second.putpalette((first.getpalette() or [])[::-1])
    third = first.copy()
    third.putpalette(first.getpalette() or [], "RGBA")
    pictures = (first, second, third)
    outputs = generate(limited, [llava.prompt("{}", each) for each in pictures])
    for picture, output in zip(pictures, outputs, strict=True):
        check(llava, llava.prompt("{}", picture.convert("RGB")), output)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "no place", "multi_modal_data": {"image": PICTURES[0]}}, "says where to put 0.*<image> for each"),
        ({"prompt": "<image><image>", "multi_modal_data": {"image": PICTURES[0]}}, "has 1 pictures.*put 2"),
        ({"prompt": "<image>", "multi_modal_data": {"video": [1]}}, "'video' is not read"),
        ({"prompt": "<image>", "multi_modal_data": {"image": "path.png"}}, "must be a PIL image"),
        ({"prompt": "<image>", "multi_modal_data": {"image": np.full((4, 4, 3), 2.0)}}, "floats beyond"),
        ({"prompt": "<image>", "multi_modal_data": {"image": np.zeros((0, 4, 3), np.uint8)}}, "multi_modal_data"),
        ({"prompt": "<image>", "multi_modal_data": {"image": torch.zeros(3, 4, 4, device="meta")}}, "PIL image.*meta"),
        ({"prompt": "<image>", "multi_modal_data": {"image": torch.zeros(3, 4, 4).to_sparse()}}, "PIL image.*Sparse"),
        ({"prompt": "<image>", "multi_modal_data": {"image": [None]}}, "must be a PIL image.*got None"),
        ({"prompt": "<image>", "multi_modal_data": {"image": TRUNCATED}}, "the picture cannot be read: .*truncated"),
        ({"prompt": "<image>", "multi_modal_data": [1]}, "multi_modal_data must be a dict"),
        ({"prompt": "<image>", "multi_modal_uuids": {"image": ["new"]}}, "'new' is not known"),
        (
            {
                **{"prompt": "<image>", "multi_modal_data": {"image": PICTURES[0]}},
                "multi_modal_uuids": {"image": ["a", "b"]},
            },
            "a name for each of the 1 pictures, got 2",
        ),
        ({"prompt": "<image>" * 4, "multi_modal_data": {"image": PICTURES[:1] * 4}}, "limit_mm_per_prompt allows 3"),
        ({"prompt": "a", "mm_processor_kwargs": {"size": 1}}, "mm_processor_kwargs is not supported"),
        (
            {"prompt": "<image>", "multi_modal_data": {"image": PICTURES[0]}, "mm_processor_kwargs": {"sizes": 1}},
            "mm_processor_kwargs: 'sizes' is no option of the model's processor",
        ),
        (
            {"prompt": "<image>", "multi_modal_data": {"image": PICTURES[0]}, "mm_processor_kwargs": {"size": "x"}},
            "mm_processor_kwargs: the picture cannot be processed",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(llava: Tiny, limited: LLM, prompt: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        generate(limited, [prompt])


@pytest.fixture(scope="module")
def limited(llava: Tiny) -> LLM:
    return llava.llm(limit_mm_per_prompt={"image": 3})


@pytest.mark.parametrize("fields", [{"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0}}])
def test_the_text_decoder_alone(llava: Tiny, fields: dict[str, Any]) -> None:
    llm = llava.llm(**fields)
    assert not llm.llm_engine.model_config.reads_images
    prompt = llava.prompt("plain text")
    check(llava, prompt, generate(llm, [prompt])[0])
    with pytest.raises(VLLMValidationError, match="reads no pictures: the engine was started with"):
        generate(llm, [llava.prompt("{}", PICTURES[0])])


def test_a_request_crosses_processes(qwen: Tiny) -> None:
    llm = qwen.llm()
    (prompt,) = llm.llm_engine.input_processor.process_prompts([qwen.prompt("{} {}", *PICTURES[:2])])
    request = EngineCoreRequest("a", prompt.token_ids, SamplingParams(max_tokens=1), images=prompt.images)
    images = decode_request(encode_request(request)).images
    assert prompt.images is not None and images is not None
    np.testing.assert_array_equal(images.positions, prompt.images.positions)
    for own, other in zip(images.pictures, prompt.images.pictures, strict=True):
        assert (own.digest, own.start, own.length) == (other.digest, other.start, other.length)
        assert own.values.keys() == other.values.keys()
        for name, value in own.values.items():
            assert value.dtype == other.values[name].dtype and torch.equal(value, other.values[name])


def test_the_document_names_what_is_tried() -> None:
    rows = re.findall(r"^\| .* \| `([a-z0-9_]+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted({**FAMILIES, **WITH_TORCHVISION, **WITH_TIMM})


def test_weights_sleep_and_change(llava: Tiny, tmp_path: Path) -> None:
    llm = llava.llm(enable_sleep_mode=True)
    prompt = llava.prompt("what {} is", PICTURES[0])
    check(llava, prompt, generate(llm, [prompt])[0])
    llm.sleep(level=1)
    llm.wake_up()
    llm.reset_prefix_cache()
    check(llava, prompt, generate(llm, [prompt])[0])
    other = Tiny("llava", tmp_path, Reference(*make_vision_model("llava", tmp_path, seed=3), "llava"))
    weights = load_file(tmp_path / "model.safetensors")
    llm.collective_rpc("load_weights", args=(list(weights.items()),))
    llm.reset_prefix_cache()
    check(other, prompt, generate(llm, [prompt])[0])
    # Trainers reach for the model itself, and give it one tensor at a time.
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    for own in load_file(llava.folder / "model.safetensors").items():
        model.load_weights([own])
    llm.reset_prefix_cache()
    check(llava, prompt, generate(llm, [prompt])[0])


@pytest.fixture(scope="module")
def paligemma(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("paligemma", tmp_path_factory.mktemp("paligemma"))


@pytest.mark.parametrize("name", ["qwen", "paligemma"])
def test_tokens_after_a_prompt_are_none_of_its_own(name: str, request: pytest.FixtureRequest) -> None:
    tiny: Tiny = request.getfixturevalue(name)
    llm = tiny.llm()
    prompt = tiny.prompt("{} is", PICTURES[0])
    (result,) = llm.score_labels([prompt], ["good", "bad"])
    ids, values = tiny.reference.processed(prompt["prompt"], prompt["multi_modal_data"]["image"])
    for index, label in enumerate(("good", "bad")):
        tokens = llm.get_tokenizer().encode(label, add_special_tokens=False)
        rows = tiny.reference.logprobs(ids + tokens, values)[len(ids) - 1 :]
        want = sum(float(row[token]) for row, token in zip(rows, tokens, strict=False))
        assert result.logprobs[index] == pytest.approx(want, abs=TOLERANCE)


@torch.no_grad()
def test_pooled_vectors_equal_transformers(qwen: Tiny) -> None:
    llm = qwen.llm(runner="pooling", convert="embed", max_num_batched_tokens=32)
    prompts = [qwen.prompt("see {}", PICTURES[0]), qwen.prompt("words"), qwen.prompt("{}{} both", *PICTURES[1:])]
    for prompt, output in zip(prompts, llm.embed(prompts, use_tqdm=False), strict=True):
        ids, values = qwen.reference.processed(prompt["prompt"], prompt["multi_modal_data"]["image"])
        qwen.reference.model.base_model.rope_deltas = None
        hidden = qwen.reference.model.base_model(input_ids=torch.tensor([ids]), **values).last_hidden_state[0, -1]
        want = torch.nn.functional.normalize(hidden, dim=0).numpy()
        np.testing.assert_allclose(output.outputs.embedding, want, atol=TOLERANCE)


def test_pictures_beyond_the_longest_prompt_are_not_processed(qwen: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = qwen.llm(max_model_len=64)
    pictures = llm.llm_engine.input_processor.pictures
    process, made = pictures._processed, []
    monkeypatch.setattr(pictures, "_processed", lambda *given: made.append(process(*given)) or made[-1])
    with pytest.raises(VLLMValidationError, match=r"of 50 have \d+ tokens: .* maximum context length is 64 tokens"):
        generate(llm, [qwen.prompt("{}" * 50, *(draw(40, 30, seed) for seed in range(50)))])
    counts = [len(each.rows) for each in made]
    assert sum(counts[:-1]) <= 64 < sum(counts)


def test_prompts_with_pictures_are_not_embedded_in_parts(qwen: Tiny) -> None:
    parts = {"enable_chunked_processing": True, "pooling_type": "auto"}
    llm = qwen.llm(runner="pooling", convert="embed", max_model_len=64, pooler_config=parts)
    with pytest.raises(VLLMValidationError, match="which is more than max_model_len=64"):
        llm.embed(qwen.prompt("{} and " + "many words " * 10, PICTURES[0]), use_tqdm=False)
    assert llm.embed("many words " * 10, use_tqdm=False)[0].outputs.embedding


@torch.no_grad()
def rows_of(tiny: Tiny, picture: Any) -> dict[str, torch.Tensor]:
    """The rows that the reference's tower makes of a picture, as upstream's callers pass them."""
    _, values = tiny.reference.processed(FAMILIES[tiny.name].placeholder, [picture])
    known = {name: values[name] for name in ("pixel_values", "image_grid_thw") if name in values}
    found = tiny.reference.model.base_model.get_image_features(**known, return_dict=True)
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    given = {"image_embeds": torch.cat([torch.cat(list(part)) for part in parts], dim=1)}
    return given | {name: value for name, value in known.items() if name == "image_grid_thw"}


@pytest.mark.parametrize("name", ["qwen", "llava"])
def test_rows_in_place_of_pictures(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny: Tiny = request.getfixturevalue(name)
    llm = tiny.llm(enable_mm_embeds=True, max_num_batched_tokens=32)
    given = [rows_of(tiny, picture) for picture in PICTURES]
    encode = picture_guests(llm)[1].tower.whole.get_image_features
    seen: list[Any] = []
    monkeypatch.setattr(
        picture_guests(llm)[1].tower.whole, "get_image_features", lambda **all_: seen.append(encode(**all_)) or seen[-1]
    )
    texts = ["look {} here", "{} and {}, then {}: which"]
    prompts = [tiny.prompt(texts[0], given[1]), tiny.prompt(texts[1], *given)]
    joined = {key: torch.cat([each[key] for each in given]) for key in given[0]}
    if name == "qwen":
        prompts.append({**prompts[1], "multi_modal_data": {"image": joined}})
    else:
        stacked = torch.stack([each["image_embeds"] for each in given])
        bare = (stacked, list(stacked), {"image_embeds": stacked})
        prompts += [{**prompts[1], "multi_modal_data": {"image": each}} for each in bare]
    wanted = [tiny.prompt(texts[0], PICTURES[1]), *[tiny.prompt(texts[1], *PICTURES)] * (len(prompts) - 1)]
    for prompt, output in zip(wanted, generate(llm, prompts), strict=True):
        check(tiny, prompt, output)
    assert not seen, "the tower was run"
    mixed = tiny.prompt("{} or {}", given[0], PICTURES[1])
    check(tiny, tiny.prompt("{} or {}", *PICTURES[:2]), generate(llm, [mixed])[0])
    assert len(seen) == 1
    part: Any = {key: saved(value) for key, value in given[0].items()}
    loaded = llm.llm_engine.input_processor.pictures.process(GivenImages((part,), (None,), {}))
    assert torch.equal(loaded[0].values["image_embeds"], given[0]["image_embeds"])


def saved(tensor: torch.Tensor) -> str:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.fixture(scope="module")
def taking_rows(qwen: Tiny) -> LLM:
    return qwen.llm(enable_mm_embeds=True)


GRID = torch.tensor([[1, 4, 4]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image_embeds": torch.zeros(4, 95), "image_grid_thw": GRID}, "rows of 96 values.*got .4, 95."),
        ({"image_embeds": torch.zeros(4, 96)}, "needs image_grid_thw: the model's processor says image_grid_thw"),
        ({"image_embeds": torch.zeros(5, 96), "image_grid_thw": GRID}, "has 5 rows.* puts 4 tokens"),
        ({"image_embeds": torch.zeros(4, 96), "image_grid_thw": GRID * 1000}, "4 rows, too few for a picture"),
        ({"image_embeds": torch.zeros(4, 96), "image_grid_thw": -GRID}, "image_grid_thw must be integers from 0 on"),
        ({"image_embeds": torch.zeros(4, 96), "image_grid_thw": GRID, "size": GRID}, "an unknown field 'size'"),
        ({"image_embeds": torch.zeros(4, 96), "image_grid_thw": GRID[:, :2]}, "have the shape .1, 3., got .1, 2."),
        ({"image_embeds": torch.full((4, 96), torch.nan), "image_grid_thw": GRID}, "not finite"),
        ({"image_embeds": torch.zeros(4, 96).int(), "image_grid_thw": GRID}, "of floats, got torch.int32"),
        ({"image_embeds": "AAAA", "image_grid_thw": GRID}, "no zip archive"),
        ({"image_embeds": saved(torch.zeros(1 << 20)), "image_grid_thw": GRID}, "letters of base64"),
        ({"image_embeds": torch.zeros(5, 96), "image_grid_thw": GRID.repeat(2, 1)}, "image_grid_thw must be integers"),
        ({"image_grid_thw": GRID}, "image_embeds is required"),
        ({"image_embeds": torch.zeros(3, 96), "image_grid_thw": torch.tensor([[1, 3, 4]])}, "is no size of a picture"),
        ({"image_embeds": torch.zeros(4, 96), "image_grid_thw": torch.tensor([[1, 4, 4, 1]])}, "have the shape .1, 3."),
        ({"image_embeds": torch.zeros(4, 96), "image_grid_thw": GRID * 3}, "4 rows, too few for a picture"),
        ({"image_embeds": saved(torch.zeros(1).expand(4, 96)), "image_grid_thw": GRID}, "save tensor.contiguous"),
        ({"image_embeds": torch.zeros(4, 96, device="meta"), "image_grid_thw": GRID}, "dense tensor .* on meta"),
    ],
)  # fmt: skip
def test_rows_that_are_refused(qwen: Tiny, taking_rows: LLM, given: Any, message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        generate(taking_rows, [qwen.prompt("{}", given)])
    generate(taking_rows, ["fine"])


def test_rows_of_pictures_that_differ_in_size_come_with_it(tmp_path: Path) -> None:
    tiny = make_tiny("pixtral", tmp_path)
    llm = tiny.llm(enable_mm_embeds=True)
    (made,) = llm.llm_engine.input_processor.pictures.process(GivenImages((draw(64, 24, 2),), (None,), {}))
    given = {"image_embeds": picture_guests(llm)[1].tower.encode(made.values)}
    with pytest.raises(VLLMValidationError, match="needs what the model's processor says of the .* image_sizes"):
        generate(llm, [tiny.prompt("{}", given)])
    given["image_sizes"] = made.values["image_sizes"]
    check(tiny, tiny.prompt("{}", draw(64, 24, 2)), generate(llm, [tiny.prompt("{}", given)])[0])


def test_rows_in_conversations(qwen: Tiny, taking_rows: LLM) -> None:
    given = rows_of(qwen, PICTURES[0])
    encoded = {key: saved(value) for key, value in given.items()}
    template = (
        "{% for part in messages[0].content %}{% if part.type == 'image' %}" + FAMILIES[qwen.name].placeholder
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}"
    )  # fmt: skip
    for value in (given, encoded):
        parts = [{"type": "image_embeds", "image_embeds": value}, {"type": "text", "text": " is"}]
        messages = [{"role": "user", "content": parts}]
        (output,) = taking_rows.chat(messages, reading(), chat_template=template, use_tqdm=False)
        check(qwen, qwen.prompt("{} is", PICTURES[0]), output)
        prompts = taking_rows.preprocess_chat(messages, chat_template=template)
        check(qwen, qwen.prompt("{} is", PICTURES[0]), generate(taking_rows, prompts)[0])
    part = {"type": "image_embeds", "image_embeds": {**encoded, "image_grid_thw": "x"}}
    with pytest.raises(VLLMValidationError, match="image_embeds: image_grid_thw is not base64"):
        taking_rows.chat([{"role": "user", "content": [part]}], reading(), chat_template=template, use_tqdm=False)


def test_options_of_a_processor_that_numbers_pictures(tmp_path: Path) -> None:
    tiny = make_tiny("minicpmv4_6", tmp_path)
    llm = tiny.llm()
    prompt = tiny.prompt("{}{}", *PICTURES[:2])
    bare = {**prompt, "mm_processor_kwargs": {"use_image_id": False}}
    first, second = (out.prompt_token_ids for out in generate(llm, [prompt, bare]))
    begin, end, *numbers = llm.get_tokenizer().encode("<image_id></image_id>01", add_special_tokens=False)
    assert [first[place + 1] for place, token in enumerate(first) if token == begin] == numbers
    assert second == [token for token in first if token not in (begin, end, *numbers)]
    other = {**prompt, "mm_processor_kwargs": {"downsample_mode": "4x"}}
    with pytest.raises(VLLMValidationError, match="downsample_mode is the tower's, too, and '16x' there"):
        generate(llm, [other])


def test_rows_are_refused_unless_they_are_asked_for(limited: LLM, llava: Tiny, tmp_path: Path) -> None:
    given = {"image_embeds": torch.zeros(16, 32)}
    with pytest.raises(
        VLLMValidationError, match="multi_modal_data: image_embeds are not taken.*enable_mm_embeds=True"
    ):
        generate(limited, [llava.prompt("{}", given)])
    with pytest.raises(ValueError, match="enable_mm_embeds=True is for a model that reads pictures"):
        llava.llm(enable_mm_embeds=True, language_model_only=True)


def test_pictures_are_processed_side_by_side(llava: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = llava.llm().llm_engine.input_processor.pictures
    both = threading.Barrier(2, timeout=60)
    process = pictures._processor._process_images

    def met(*args: Any, **kwargs: Any) -> Any:
        both.wait()  # breaks where only one is let in at a time
        return process(*args, **kwargs)

    monkeypatch.setattr(pictures._processor, "_process_images", met)
    given = [GivenImages((draw(40, 30, seed),), (None,), {}) for seed in (31, 32)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(pictures.process, given)
    assert first[0].digest != second[0].digest
    assert pictures._num_kept_bytes == first[0].num_bytes + second[0].num_bytes


def test_towers_load_in_a_pass_over_their_tensors(qwen: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    state_dict = torch.nn.Module.state_dict

    def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(kwargs.get("prefix", ""))
        return state_dict(module, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "state_dict", counted)
    qwen.llm()
    assert 0 < counts.count("") < 10


@pytest.mark.parametrize("name", ["qwen3_vl", "smolvlm", "llava"])
def test_towers_run_on_our_operations(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if pack_linear(torch.ones(2, 2), None).layout == "plain":
        pytest.skip("the C++ kernels are not built")
    tiny = make_tiny(name, tmp_path)
    llm = tiny.llm(dtype="bfloat16")

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("PyTorch's bfloat16 products are many times slower on most CPUs")

    for place, function in ((F, "linear"), (F, "scaled_dot_product_attention"), (F, "conv2d"), (F, "conv3d")):
        monkeypatch.setattr(place, function, never)
    (output,) = generate(llm, [tiny.prompt("look {} here", PICTURES[0])])
    assert len(output.outputs[0].token_ids) == 4
