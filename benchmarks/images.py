"""Pictures scored against its peers: distinct ones, several questions about one, and what reading them costs texts.

    python benchmarks/images.py                       # all rows, random models of two shapes
    python benchmarks/images.py --shapes smolvlm --pictures 8 --peer-pictures 2
    python benchmarks/images.py --shapes qwen3_vl --parts joined
    python benchmarks/images.py --upstream PYTHON     # an interpreter that has upstream's vllm, and a torchvision

- score: pictures of 448 x 448 a second, each in a prompt of its own, the logprobs of 2 ids after it. Processing of the
  pictures is in it. transformers scores them one by one, its fastest order on a CPU, in bfloat16 and in float32.
- questions: 8 questions about one picture that neither has seen; transformers runs one batch.
- texts: prompts without pictures, by the model and by its text decoder alone (language_model_only), in alternating
  rounds: the share of the decoder's rate, by the clock and by the processor's time.
- joined: the processor's time of small pictures in single runs of the tower by that in shared ones, by the patches of a
  picture (Qwen3-VL's shape).
- memory: what a process has at its peak beside what it had when the model was loaded, in MiB.

The models have the widths of SmolVLM-256M and Qwen3-VL-2B and fewer layers (`--tower-layers`, `--text-layers`),
bfloat16 weights and a vocabulary of 32,768. Each engine has a process of its own. Prints a line of JSON a shape.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, add_counts, make_parser, print_result, say, seconds_of, some_of, use_all_cores

sys.path[:0] = [str(ROOT / "tests" / each) for each in ("support", "models")]

_EDGE = 448
_IDS = [65, 66]
_QUESTIONS = [
    f"Is there {thing} in it? Answer yes or no:" for thing in "a cat|a dog|text|sky|a car|snow|a face|red".split("|")
]
_SHAPES = {"smolvlm": "<image>", "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>"}
"""The text of a picture in a prompt, by shape."""
_PARTS = ("ours", "upstream", "transformers_bfloat16", "transformers_float32", "texts", "joined")


def make_model(shape: str, folder: Path, tower_layers: int, text_layers: int) -> None:
    """A random model of a shape with few layers."""
    import torch
    import transformers
    from tiny_vision import FAMILIES, make_tokenizer

    family = FAMILIES[shape]
    tokenizer = make_tokenizer(folder, family.tokens, family.tokenizer)
    text, vision, images, processor = _options(shape, tower_layers, text_layers)
    whole = {
        key: tokenizer.convert_tokens_to_ids(value[3:]) if isinstance(value, str) else value
        for key, value in family.whole.items()
    }
    if shape == "smolvlm":
        whole["scale_factor"] = 4
    usual = {"vocab_size": 32768, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.CONFIG_MAPPING[family.model_type](
        text_config=usual | text, vision_config=vision, tie_word_embeddings=False, **whole
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    kind = family.image_processor[0]
    getattr(transformers, kind + "Pil")(**images).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(processor))
    # Upstream builds this part, too.
    videos = images | {"video_processor_type": processor["processor_class"].replace("Processor", "VideoProcessor")}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))


def _options(shape: str, tower_layers: int, text_layers: int) -> tuple[dict[str, Any], ...]:
    """The text decoder's, the tower's, the picture processor's and the processor's."""
    if shape == "smolvlm":
        text = {
            "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": text_layers,
            "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        }  # fmt: skip
        vision = {
            "model_type": "smolvlm_vision", "hidden_size": 768, "intermediate_size": 3072, "image_size": 512,
            "num_hidden_layers": tower_layers, "num_attention_heads": 12, "patch_size": 16,
        }  # fmt: skip
        images = {"size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 512}}
        return text, vision, images, {"processor_class": "SmolVLMProcessor", "image_seq_len": 64}
    text = {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": text_layers, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    }  # fmt: skip
    vision = {
        "depth": tower_layers, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "patch_size": 16,
        "out_hidden_size": 2048, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": list(range(min(3, tower_layers))),
    }  # fmt: skip
    images = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    return text, vision, images, {"processor_class": "Qwen3VLProcessor"}


def make_pictures(folder: Path, count: int) -> None:
    """Distinct pictures, as files: not every peer's environment can draw them."""
    from tiny_vision import draw

    for seed in range(count):
        draw(_EDGE, _EDGE, seed).save(folder / f"{seed}.png")


def read_pictures(folder: Path, count: int) -> list[Any]:
    """The first ones of `make_pictures`."""
    from PIL import Image

    return [Image.open(folder / f"{seed}.png").convert("RGB") for seed in range(count)]


def memory_mib() -> int:
    """The process' peak so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def measure(engine: Any, folder: Path, placeholder: str, num_pictures: int, repeats: int) -> dict[str, Any]:
    """An engine's rows: `engine.score(prompts, pictures)` reads the ids after each prompt."""
    pictures = read_pictures(folder, num_pictures + repeats + 1)
    engine.score([f"{placeholder} {_QUESTIONS[0]}"], pictures[-1:])
    loaded = memory_mib()
    prompts = [f"{placeholder} {_QUESTIONS[0]}"] * num_pictures
    seconds = seconds_of(lambda: engine.score(prompts, pictures[:num_pictures]))
    peak = memory_mib()
    asked = [f"{placeholder} {question}" for question in _QUESTIONS]
    questions = [
        seconds_of(lambda picture=picture: engine.score(asked, [picture] * len(asked), together=True))
        for picture in pictures[num_pictures : num_pictures + repeats]
    ]
    return {
        "pictures_per_second": num_pictures / seconds,
        "questions_seconds": statistics.median(questions),
        "peak_mib": peak - loaded,
    }


class Vllm:
    """This package, or upstream's, which has the same names."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(str(folder), dtype="bfloat16", max_model_len=2048, **fields)
        self._params = SamplingParams(max_tokens=1, logprob_token_ids=_IDS)

    def score(self, prompts: list[str], pictures: list[Any], together: bool = False) -> None:
        given = [
            {"prompt": prompt, "multi_modal_data": {"image": picture}}
            for prompt, picture in zip(prompts, pictures, strict=True)
        ]
        self.llm.generate(given, self._params, use_tqdm=False)

    def score_texts(self, prompts: list[str]) -> None:
        """As `score`, without pictures."""
        self.llm.generate(prompts, self._params, use_tqdm=False)


class Transformers:
    """transformers' model and processor."""

    def __init__(self, folder: Path, shape: str, dtype: str) -> None:
        import torch
        import transformers
        from tiny_vision import FAMILIES, make_processor

        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        kind = FAMILIES[shape].image_processor[0]
        images = getattr(transformers, kind + "Pil").from_pretrained(folder)
        own = json.loads((folder / "processor_config.json").read_text())
        self._processor = make_processor(images, tokenizer, own)
        self._model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        ).eval()
        self._torch = torch

    def score(self, prompts: list[str], pictures: list[Any], together: bool = False) -> None:
        size = len(prompts) if together else 1
        for start in range(0, len(prompts), size):
            batch = slice(start, start + size)
            images = [[picture] for picture in pictures[batch]]
            data = self._processor(text=prompts[batch], images=images, return_tensors="pt", padding=True)
            with self._torch.inference_mode():
                logits = self._model(**data, logits_to_keep=1, use_cache=False).logits[:, -1].float()
            logits[:, _IDS] - logits.logsumexp(-1, keepdim=True)


def measure_texts(folder: Path, rounds: int) -> dict[str, float]:
    """The share of the text decoder's rate that the whole model has."""
    prompts = [f"{number} {question} {question}" for number in range(4) for question in _QUESTIONS]
    engines = {"whole": Vllm(folder), "text": Vllm(folder, language_model_only=True)}
    clock: dict[str, list[float]] = {name: [] for name in engines}
    spent: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        texts = [f"{number} {prompt}" for prompt in prompts]
        for name in list(engines) if number % 2 else list(engines)[::-1]:
            before = time.process_time()
            seconds = seconds_of(lambda name=name, texts=texts: engines[name].score_texts(texts))
            if number:
                clock[name].append(seconds)
                spent[name].append(time.process_time() - before)
    shares = {
        "by_clock": statistics.median(a / b for a, b in zip(clock["text"], clock["whole"], strict=True)),
        "by_processor_time": statistics.median(a / b for a, b in zip(spent["text"], spent["whole"], strict=True)),
    }
    return shares


def measure_joined(folder: Path, rounds: int) -> dict[int, float]:
    """See `joined` above."""
    from tiny_vision import draw

    from vllm.inputs.images import GivenImages
    from vllm.v1.features.images.runner import PictureRows

    sizes = {"shortest_edge": 1024, "longest_edge": 1 << 24}
    engine = Vllm(folder, mm_processor_kwargs={"size": sizes}).llm.llm_engine
    tower = engine.engine_core.executor.worker.model_runner.guest(PictureRows).tower
    found = {}
    for edge in (64, 128, 192, 256, _EDGE):
        count = max(4, 128 * 1024 // edge**2)
        given = GivenImages(tuple(draw(edge, edge, seed) for seed in range(count)), (None,) * count, {})
        pictures = [each.values for each in engine.input_processor.pictures.process(given)]
        shares = []
        for _ in range(rounds):
            start = time.process_time()
            for values in pictures:
                tower.encode(values)
            middle = time.process_time()
            for run in tower.runs(pictures):
                tower.encode_together([pictures[number] for number in run])
            shares.append((middle - start) / (time.process_time() - middle))
        found[len(pictures[0]["pixel_values"])] = statistics.median(shares)
    return found


def be_upstream() -> None:
    """Let `import vllm` find upstream's, with the settings that it is fastest with here."""
    # Libraries try to import a module `kernels`, which must not be the script beside this one.
    sys.path[:] = [each for each in sys.path if Path(each).resolve() not in (ROOT, Path(__file__).resolve().parent)]
    os.chdir(tempfile.gettempdir())
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    usual = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for name, value in {**usual, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}.items():
        os.environ.setdefault(name, value)


def run_part(part: str, folder: Path, shape: str, options: argparse.Namespace) -> dict[Any, Any]:
    """One engine's figures, in a process of its own."""
    if part == "texts":
        return measure_texts(folder, options.rounds)
    if part == "joined":
        return measure_joined(folder, options.rounds)
    if part == "ours":
        return measure(Vllm(folder), folder, _SHAPES[shape], options.pictures, 3)
    if part == "upstream":
        be_upstream()
        limits = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "enforce_eager": True}
        return measure(Vllm(folder, **limits), folder, _SHAPES[shape], options.upstream_pictures, 3)
    engine = Transformers(folder, shape, part.removeprefix("transformers_"))
    return measure(engine, folder, _SHAPES[shape], options.peer_pictures, 1)


def main() -> None:
    """Run the rows."""
    parser = make_parser(__doc__ or "", model=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shapes", type=some_of(_SHAPES, "shape"), default=list(_SHAPES), help="default: all")
    parser.add_argument("--parts", type=some_of(_PARTS, "part"), default=list(_PARTS), help="default: all")
    add_counts(
        parser, pictures=(64, "of ours"), upstream_pictures=(64, "of upstream's"),
        peer_pictures=(6, "of transformers'"), rounds=(9, "of texts"),
        tower_layers=(3, ""), text_layers=(4, ""),
    )  # fmt: skip
    parser.add_argument("--upstream", help="an interpreter that has upstream's; default: it is left out")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    use_all_cores()
    if options.part:
        print(json.dumps(run_part(options.part, options.folder, options.shapes[0], options)), flush=True)
        return
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            make_model(shape, folder, options.tower_layers, options.text_layers)
            make_pictures(folder, max(options.pictures, options.upstream_pictures, options.peer_pictures) + 4)
            figures: dict[str, Any] = {}
            left_out = {
                part
                for part, is_there in (("joined", shape == "qwen3_vl"), ("upstream", options.upstream))
                if not is_there
            }
            for part in [each for each in options.parts if each not in left_out]:
                own = ["--part", part, "--folder", place, "--shapes", shape]
                interpreter, env = sys.executable, dict(os.environ)
                if part == "upstream":
                    interpreter = options.upstream
                    env.pop("PYTHONPATH", None)
                command = [interpreter, __file__, *sys.argv[1:], *own]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
                figures[part] = json.loads(done.stdout.splitlines()[-1])
                say(f"{shape} {part}: {figures[part]}")
        ours = figures.get("ours")
        times = {
            peer: {
                "score": ours["pictures_per_second"] / own["pictures_per_second"],
                "questions": own["questions_seconds"] / ours["questions_seconds"],
            }
            for peer, own in figures.items()
            if ours is not None and peer.startswith(("transformers", "upstream"))
        }
        print_result(shape=shape, layers=[options.tower_layers, options.text_layers], **figures, times=times)


if __name__ == "__main__":
    main()
