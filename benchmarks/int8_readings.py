"""Effect of `quantization="int8"` on readings, with that of bfloat16 for scale.

    python benchmarks/int8_readings.py                       # the embedded model, 200 prompts
    python benchmarks/int8_readings.py --model FOLDER

Every prompt reads the logprobs of a few labels. A JSON line a pair of engines gives the median, the 99th percentile and
the maximum of |difference|, and the share of prompts with the same likeliest label. A rounded weight shifts the few
labels of all prompts alike, so that these vary with the choice of labels; "vocabulary_*" are of every 49th token. The
last line has all of them.
"""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from common import make_parser

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

# Name of an engine -> its arguments; pairs compared: (name, against).
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8 float32": {"dtype": "float32", "quantization": "int8"},
}
PAIRS = (("bfloat16", "float32"), ("int8", "bfloat16"), ("int8", "float32"), ("int8 float32", "float32"))


def main() -> None:
    """Read with each engine, compare."""
    parser = make_parser("What int8 does to readings, beside what bfloat16 does.")
    parser.add_argument("--prompts", type=int, default=200, help="default: %(default)s")
    args = parser.parse_args()
    if not 1 <= args.prompts <= 10000:
        parser.error(f"--prompts must be in [1, 10000], got {args.prompts}")
    prompts = make_prompts(args.prompts)
    readings = {name: _read(args.model, prompts, fields) for name, fields in ENGINES.items()}
    results = [_compare(name, against, readings) for name, against in PAIRS]
    for result in results:
        print(json.dumps(result))
    print(json.dumps({"model": Path(args.model).name if args.model else "embedded", "results": results}))


def make_prompts(count: int) -> list[str]:
    """Distinct texts of three sentences in a frame that asks for a label, the same in every run."""
    rng = random.Random(0)
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        sentences = [f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_QUALITIES)}." for _ in range(2)]
        prompts[rng.choice(_FRAMES).format(" ".join([*sentences, rng.choice(_ENDINGS)]))] = None
    return list(prompts)


def _read(model: str | None, prompts: list[str], fields: dict[str, Any]) -> np.ndarray:
    """float32 [prompts, labels + others]: logprobs of the labels' first tokens, then of every 49th token."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, max_logprob_token_ids=-1, **fields)
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.encode(label, add_special_tokens=False)[0] for label in LABELS]
    ids += range(0, llm.llm_engine.model_config.vocab_size, 49)
    params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=ids)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    readings = np.array([output.outputs[0].logprobs.select(ids).logprobs[0] for output in outputs], np.float32)
    del llm
    gc.collect()
    return readings


def _compare(name: str, against: str, readings: dict[str, np.ndarray]) -> dict[str, Any]:
    (one, one_all), (other, other_all) = (np.split(readings[each], [len(LABELS)], axis=1) for each in (name, against))
    difference, everywhere = np.abs(one - other), np.abs(one_all - other_all)
    figures = {
        "median": np.median(difference),
        "p99": np.quantile(difference, 0.99),
        "max": difference.max(),
        "vocabulary_median": np.median(everywhere),
        "vocabulary_p99": np.quantile(everywhere, 0.99),
        "same_label": (one.argmax(1) == other.argmax(1)).mean(),
    }
    rounded = {key: round(float(value), 4) for key, value in figures.items()}
    return {"engine": name, "against": against, **rounded, "prompts": len(one), "labels": len(LABELS)}


if __name__ == "__main__":
    main()
