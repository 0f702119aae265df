"""Effect of quantised weights and of 8-bit activations on readings, with that of bfloat16 for scale.

    python benchmarks/quantized_readings.py                       # the embedded model, 200 prompts
    python benchmarks/quantized_readings.py --model FILE.gguf --engines float32,bfloat16,gguf
    python benchmarks/quantized_readings.py --model FOLDER --formats all   # unquantised; rounded to each format

Every prompt reads the logprobs of a few labels. A JSON line a pair of engines gives |difference| of the logprobs (mean,
median, 99th percentile, maximum), the share of the labels whose rank in the vocabulary is another, and the share of
prompts with the same likeliest label. A rounded weight shifts the few labels of all prompts alike, so that these vary
with the choice of labels; "vocabulary_*" are of every 49th token. The last line has all of them.
"""

from __future__ import annotations

import gc
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import make_parser, some_of
from rounded_checkpoints import FORMATS, make_checkpoint

LABELS = (" positive", " negative", " neutral", " yes", " no", " good")
_SUBJECTS = ("The soup", "Our guide", "This phone", "The second act", "Her latest novel", "The hotel room")
_SUBJECTS += ("The support team", "That old bicycle", "The update", "My new jacket")
_VERBS = ("was", "turned out", "seemed", "proved to be", "has been", "felt")
_QUALITIES = ("better than I had hoped", "slow and rather noisy", "a pleasant surprise", "worse every day")
_QUALITIES += ("exactly as described", "far too expensive for what it is", "broken when it arrived")
_QUALITIES += ("warm, quick and friendly", "dull from start to finish", "good in parts, weak in others")
_ENDINGS = ("I would do it again.", "I asked for my money back.", "My sister disagrees.", "We left early.")
_ENDINGS += ("The price was fair, though.", "It still makes me smile.", "Nobody answered my letters.")
_FRAMES = (
    "Review: {}\nIs this review positive or negative? It is",
    "{}\nDid the writer like it, yes or no? Answer:",
    "Read the text.\n\n{}\n\nThe mood of the text is",
    "Classify as positive, negative or neutral.\nText: {}\nClass:",
)

# Name of an engine -> its arguments; pairs compared: (name, against). Weights of "gguf" engines are the file's own
# blocks; the others de-quantise them, and may round them anew.
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "plain": True},
    "bfloat16": {"dtype": "bfloat16", "plain": True},
    "gguf float32": {"dtype": "float32", "quantization": "gguf"},
    "gguf": {"dtype": "bfloat16", "quantization": "gguf"},
    "gguf with int8 activations": {"dtype": "bfloat16", "quantization": "gguf", "int8_activations": True},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8 float32": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int4 with int8 activations": {"dtype": "bfloat16", "quantization": "int4", "int8_activations": True},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "fp8 KV cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "plain": True},
    "fp8_e5m2 KV cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2", "plain": True},
}
PAIRS = (*((name, "float32") for name in ENGINES if name != "float32"), ("int8", "bfloat16"))


def main() -> None:
    """Read with each engine, compare."""
    parser = make_parser("What quantised weights do to readings, beside what bfloat16 does.")
    parser.add_argument("--engines", type=some_of(ENGINES, "engine"), default=list(ENGINES), help="default: all")
    parser.add_argument(
        "--formats",
        type=lambda text: list(FORMATS) if text == "all" else some_of(FORMATS, "format")(text),
        help=f"--model, a folder, with its weights rounded to each, in bfloat16: all, or some of {','.join(FORMATS)}",
    )
    parser.add_argument("--prompts", type=int, default=200, help="default: %(default)s")
    args = parser.parse_args()
    if args.formats and not (args.model and (Path(args.model) / "model.safetensors").is_file()):
        parser.error("--formats needs --model, a folder with a model.safetensors")
    if not 1 <= args.prompts <= 10000:
        parser.error(f"--prompts must be in [1, 10000], got {args.prompts}")
    prompts = make_prompts(args.prompts)
    if args.formats:
        _compare_formats(args.model, args.formats, prompts)
        return
    readings = {name: _read(args.model, prompts, **ENGINES[name]) for name in args.engines}
    results = [_compare(name, against, readings) for name, against in PAIRS if {name, against} <= readings.keys()]
    for result in results:
        print(json.dumps(result))
    print(json.dumps({"model": Path(args.model).name if args.model else "embedded", "results": results}))


def _compare_formats(model: str, formats: list[str], prompts: list[str]) -> None:
    """Print each comparison as soon as it is made."""
    readings = {"float32": _read(model, prompts, dtype="float32"), "bfloat16": _read(model, prompts, dtype="bfloat16")}
    results = [_compare("bfloat16", "float32", readings)]
    print(json.dumps(results[0]), flush=True)
    for name in formats:
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(Path(model), name, Path(folder, name))
            own = _read(str(Path(folder, name)), prompts, dtype="bfloat16")
        results.append(_compare(name, "float32", readings | {name: own}))
        print(json.dumps(results[-1]), flush=True)
    print(json.dumps({"model": Path(model).name, "results": results}))


def make_prompts(count: int) -> list[str]:
    """Distinct texts of three sentences in a frame that asks for a label, the same in every run."""
    rng = random.Random(0)
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        sentences = [f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_QUALITIES)}." for _ in range(2)]
        prompts[rng.choice(_FRAMES).format(" ".join([*sentences, rng.choice(_ENDINGS)]))] = None
    return list(prompts)


def _read(
    model: str | None, prompts: list[str], int8_activations: bool = False, plain: bool = False, **fields: Any
) -> np.ndarray:
    """float32 [2, prompts, labels + others]: logprobs, and ranks, of the labels' first tokens and every 49th token."""
    from vllm import LLM, SamplingParams

    os.environ["VLLM_CPU_INT8_ACTIVATIONS"] = str(int(int8_activations))
    os.environ["VLLM_GGUF_DEQUANTIZE"] = str(int(plain))
    llm = LLM(model, max_logprob_token_ids=-1, **fields)
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.encode(label, add_special_tokens=False)[0] for label in LABELS]
    ids += range(0, llm.llm_engine.model_config.vocab_size, 49)
    params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=ids)
    read = [output.outputs[0].logprobs.select(ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    readings = np.array([[each.logprobs[0] for each in read], [each.ranks[0] for each in read]], np.float32)
    del llm
    gc.collect()
    return readings


def _compare(name: str, against: str, readings: dict[str, np.ndarray]) -> dict[str, Any]:
    (one, ranks), (other, other_ranks) = readings[name], readings[against]
    difference = np.abs(one - other)
    labels, everywhere = np.split(difference, [len(LABELS)], axis=1)
    own, others = one[:, : len(LABELS)], other[:, : len(LABELS)]
    figures = {
        "mean": labels.mean(),
        "median": np.median(labels),
        "p99": np.quantile(labels, 0.99),
        "max": labels.max(),
        "rank_changes": (ranks != other_ranks)[:, : len(LABELS)].mean(),
        "vocabulary_mean": everywhere.mean(),
        "vocabulary_median": np.median(everywhere),
        "vocabulary_p99": np.quantile(everywhere, 0.99),
        "vocabulary_max": everywhere.max(),
        "same_label": (own.argmax(1) == others.argmax(1)).mean(),
    }
    rounded = {key: round(float(value), 4) for key, value in figures.items()}
    return {"engine": name, "against": against, **rounded, "prompts": len(one), "labels": len(LABELS)}


if __name__ == "__main__":
    main()
