"""Readings of prompts with videos, by the engine and by transformers, in a process that has torchvision or its stub.

`python video_readings.py FOLDER FAMILY ...` writes a JSON object: for each family what differs most, and more.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import torchvision_stub

if __name__ == "__main__":
    torchvision_stub.install()
    torchvision_stub.install_number_words()

import base64
import io
import json
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tiny_vision import FAMILIES, Reference, draw, make_vision_model

from vllm import LLM, SamplingParams
from vllm.cli.main import main
from vllm.decisions.params import DecisionParams
from vllm.scoring import run as score_run

IDS = [5, 17, 64, 100]
# The processor of a family's videos, and the options that its picture processor has, too.
PROCESSORS = {
    "qwen2_vl": ("Qwen2VLVideoProcessor", {}),
    "qwen2_5_vl": ("Qwen2VLVideoProcessor", {}),
    "qwen3_vl": ("Qwen3VLVideoProcessor", {}),
    "qwen3_vl_moe": ("Qwen3VLVideoProcessor", {}),
    "qwen3_5": ("Qwen3VLVideoProcessor", {}),
    "qwen3_5_moe": ("Qwen3VLVideoProcessor", {}),
    "glm4v": ("Glm4vVideoProcessor", {}),
    "glm4v_moe": ("Glm4vVideoProcessor", {}),
    "glm46v": ("Glm46VVideoProcessor", {}),
    "internvl": ("InternVLVideoProcessor", {"size": {"height": 28, "width": 28}}),
    "llava_onevision": ("LlavaOnevisionVideoProcessor", {"size": {"height": 28, "width": 28}}),
    "smolvlm": (
        "SmolVLMVideoProcessor",
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28},
         "video_sampling": {"max_frames": 8, "fps": 1, "video_size": {"longest_edge": 56}}},
    ),
}  # fmt: skip


def clip(count: int, seed: int, width: int = 32, height: int = 24) -> list[Any]:
    """Frames that differ."""
    return [draw(width, height, seed + index) for index in range(count)]


def prompts(name: str) -> list[tuple[str, list[Any], list[tuple[list[Any], dict[str, Any]]]]]:
    """Texts, pictures, and videos with their metadata."""
    picture, word = FAMILIES[name].placeholder, word_of(name)
    one = (clip(6, 1), {"fps": 3.0, "do_sample_frames": False})
    # Where videos have no grids, transformers wants as many frames of each.
    count = 6 if PROCESSORS[name][1] else 5
    said = {"fps": 1.0, "frames_indices": list(range(0, 2 * count, 2)), "total_num_frames": 12, "duration": 12.0}
    other = (clip(count, 40, 40, 30), said)
    found: list[Any] = [(f"look {word} here", [], [one]), (f"{word} and {word}: which", [], [one, other])]
    if not name.startswith("glm"):  # transformers' asks how many frames a second has
        found.append((f"of many {word}", [], [(clip(12, 20), {})]))
    if name not in ("glm4v", "glm4v_moe", "glm46v", "smolvlm"):  # transformers' fail on both in a prompt
        found.append((f"{picture} beside {word} and {picture}", [draw(40, 30, 7), draw(24, 24, 8)], [other]))
    return found


def measured(name: str, folder: Path) -> dict[str, Any]:
    """The differences between the engine's readings of a family's tiny model and transformers'."""
    family = FAMILIES[name]
    model, tokenizer = make_vision_model(name, folder)
    kind, options = PROCESSORS[name]
    made = getattr(transformers, kind)(**(options or family.image_processor[1]))
    made.save_pretrained(folder)
    reference = Reference(model, tokenizer, name)
    reference._processor.video_processor = made
    llm = LLM(str(folder), dtype="float32", max_model_len=512, max_num_batched_tokens=48, max_logprobs=-1)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprob_token_ids=IDS, prompt_logprobs=0)
    cases = prompts(name)
    given = [
        {"prompt": text, "multi_modal_data": {"image": pictures, "video": videos}} for text, pictures, videos in cases
    ]
    worst, std = 0.0, 1.0
    for _ in range(2):
        for case, output in zip(cases, llm.generate(given, params, use_tqdm=False), strict=True):
            ids, values = processed(reference, *case)
            if ids != list(output.prompt_token_ids):
                return {"ids": ids, "own": list(output.prompt_token_ids)}
            tokens = list(output.outputs[0].token_ids)
            want = reference.logprobs(ids + tokens, values | positions(reference, ids, tokens, values))
            std = min(std, float(want.std()))
            rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            for row, entries in zip(want[len(want) - 1 - len(rows) :], rows, strict=False):
                worst = max(worst, *(abs(entry.logprob - float(row[token])) for token, entry in entries.items()))
    chat = chatted(llm, word_of(name))
    return {"worst": worst, "std": std, "chat": chat, "doors": at_doors(llm, folder) if name == "qwen3_vl" else []}


def word_of(name: str) -> str:
    """The word that stands for a video in a prompt of the family."""
    picture = FAMILIES[name].placeholder
    return picture.replace("image", "video") if "image" in picture else "<video>"


def chatted(llm: LLM, word: str) -> list[Any]:
    """Whether readings are those of the same frames in a prompt: where a video has a name, where it is known by it, and
    for two forms of it in conversations, whose template writes videos, or reads texts alone."""
    form, given = shown()
    part = "{% if p.type == 'video' %}" + word + "{% else %}{{ p.text }}{% endif %}"
    template = "{% for m in messages %}{% for p in m.content %}" + part + "{% endfor %}{% endfor %}:"
    texts = "{% for m in messages %}{{ m.content }}{% endfor %}:"
    forms: list[dict[str, Any]] = [
        form,
        {"type": "video", "video": given},
    ]
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=2)
    prompt = {"prompt": f"{word}what:", "multi_modal_data": {"video": given}}
    named = {**prompt, "multi_modal_uuids": {"video": ["mine"]}}
    known = {**named, "multi_modal_data": None}
    first, *others = (llm.generate(each, params, use_tqdm=False)[0] for each in (prompt, named, known))
    found = [each.outputs[0].logprobs == first.outputs[0].logprobs for each in others]
    own_word = llm.llm_engine.input_processor.read_media.words["video"]
    for chat_template, own in ((template, word), (texts, f"{own_word}\n")):
        prompt = {"prompt": f"{own}what:", "multi_modal_data": {"video": given}}
        (want,) = llm.generate(prompt, params, use_tqdm=False)
        for form in forms:
            messages = [{"role": "user", "content": [form, {"type": "text", "text": "what"}]}]
            (output,) = llm.chat(messages, params, chat_template=chat_template, use_tqdm=False)
            is_same = output.prompt_token_ids == want.prompt_token_ids
            found.append(is_same and output.outputs[0].logprobs == want.outputs[0].logprobs)
    return found


def shown() -> tuple[dict[str, Any], tuple[list[Any], dict[str, Any]]]:
    """A video as a part of a message, and as a prompt has it."""
    files = []
    for frame in clip(4, 3):
        file = io.BytesIO()
        frame.save(file, "JPEG")
        files.append(file.getvalue())
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(file).decode() for file in files)
    frames = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    said = {"fps": 2.0, "do_sample_frames": False, "duration": 2.0}
    return {"type": "video_url", "video_url": {"url": url}}, (frames, said)


def at_doors(llm: LLM, folder: Path) -> list[Any]:
    """Whether a decision, a pair and a file's row read a video beside a picture as a prompt with both does."""
    (form, given), image = shown(), draw(40, 30, 7)
    words = llm.llm_engine.input_processor.read_media.words
    media = {"image": image, "video": given}
    parts = [form, {"type": "text", "text": "and "}, {"type": "image_pil", "image_pil": image}]

    def labels(prompt: dict[str, Any], names: list[Any]) -> list[float]:
        (scores,) = llm.score_labels([{**prompt, "multi_modal_data": media}], names, use_tqdm=False)
        return [float(each) for each in scores.logprobs]

    pair = f"q{words['video']}and {words['image']}"
    (score,) = llm.score("q", {"content": parts}, chat_template="{{ query }}{{ document }}", use_tqdm=False)
    yes, no = np.exp(labels({"prompt": pair}, ["yes", "no"]))
    found = [bool(np.isclose(score.outputs.score, yes / (yes + no), atol=1e-5))]

    question = {"type": "choice", "instructions": "which?", "choices": [{"value": "a"}, {"value": "b"}]}
    ask = [{"role": "user", "content": [form, {"type": "input_text", "text": "and"}, parts[2]]}]
    plan = llm.decision_plan(ask, [question], DecisionParams())
    requests, (decision,) = plan.requests(), llm.decide_plans([plan], use_tqdm=False)
    ids = list(requests[0][1].logprob_token_ids)
    odds = np.exp(labels({"prompt_token_ids": requests[0][0].token_ids}, ids))
    own = [choice.probability for choice in decision.answers[0].probabilities]
    found.append(bool(np.allclose(own, odds / odds.sum(), atol=1e-5)))

    file = io.BytesIO()
    image.save(file, "PNG")
    row = {"text": "what", "film": form["video_url"]["url"], "image": base64.b64encode(file.getvalue()).decode()}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    score_run.load = lambda args: llm
    flags = ["--labels", "ab", "c", "--template", "see {image}: {film}{text}", "--image-field", "image"]
    flags += ["--video-field", "film", "--no-picture", "--quiet", "--output", str(folder / "out.jsonl")]
    found.append(main(["score", str(folder / "rows.jsonl"), *flags]) == 0)
    scored = json.loads((folder / "out.jsonl").read_text())
    want = labels({"prompt": f"see {words['image']}: {words['video']}what"}, ["ab", "c"])
    found.append(bool(np.allclose(list(scored["logprobs"].values()), want, atol=1e-5)))
    return [*found, "film" not in scored and "image" not in scored]


def positions(reference: Reference, ids: list[int], tokens: list[int], values: dict[str, Any]) -> dict[str, Any]:
    """transformers' positions, which it generates tokens at: after a video of Qwen2.5-VL's they are not those that it
    gives to the same tokens of a longer prompt."""
    base = reference.model.base_model
    if not hasattr(base, "get_rope_index"):
        return {}
    known = {"mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts"} & values.keys()
    own, delta = base.get_rope_index(torch.tensor([ids]), **{name: values[name] for name in known})
    after = torch.arange(len(ids), len(ids) + len(tokens)) + delta
    return {"position_ids": torch.cat([own, after.expand(3, 1, -1)], dim=2)}


@torch.no_grad()
def processed(reference: Reference, text: str, pictures: list[Any], videos: list[Any]) -> tuple[list[int], Any]:
    """As transformers' processor has them. Frames of which nothing is said are chosen as it does by itself."""
    metadata = []
    options = {"do_sample_frames": False} if any(said for _, said in videos) else {}
    for frames, said in videos:
        own = {key: value for key, value in said.items() if key != "do_sample_frames"}
        usual = {"total_num_frames": len(frames), "frames_indices": list(range(len(frames)))}
        metadata.append(usual | own | {"height": frames[0].height, "width": frames[0].width})
    data = reference._processor(
        text=[text],
        images=pictures or None,
        videos=[np.stack([np.asarray(frame) for frame in frames]) for frames, _ in videos],
        video_metadata=metadata,
        return_tensors="pt",
        **options,
    )
    values = {key: value for key, value in data.items() if key in reference._known}
    ids = values.pop("input_ids")[0].tolist()
    return ids, {key: value for key, value in values.items() if key not in ("attention_mask", "labels")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        found[name] = measured(name, folder)
    print(json.dumps(found))
