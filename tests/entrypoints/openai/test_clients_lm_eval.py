"""lm-evaluation-harness, `local-completions`, against a live server: its scores are those of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval
import pytest
import torch
import yaml
from live_server import LiveServer
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm.model_executor.model_loader import resolve_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 2e-3
"""Of a continuation's logprob, in nats: float32 sums in another order, over some tokens."""

QUESTIONS = [
    ("Question: What is the capital of France?\nAnswer:", ["Paris", "London", "Rome", "Madrid"], 0),
    ("Question: What is the capital of Japan?\nAnswer:", ["Seoul", "Beijing", "Tokyo", "Bangkok"], 2),
    ("Question: Which animal barks?\nAnswer:", ["a cat", "a dog", "a cow", "a duck"], 1),
    ("Question: How many legs does a spider have?\nAnswer:", ["four", "six", "eight", "ten"], 2),
    ("Question: What do bees make?\nAnswer:", ["milk", "honey", "wine", "bread"], 1),
    ("Question: Which planet is the largest?\nAnswer:", ["Mars", "Venus", "Earth", "Jupiter"], 3),
    ("Question: What is frozen water called?\nAnswer:", ["steam", "ice", "sand", "oil"], 1),
    ("Question: Who wrote Hamlet?\nAnswer:", ["Shakespeare", "Dante", "Goethe", "Cervantes"], 0),
    ("Question: What colour is the sky on a clear day?\nAnswer:", ["green", "red", "blue", "black"], 2),
    ("Question: What is 2 + 2?\nAnswer:", ["three", "four", "five", "six"], 1),
    ("Question: Which ocean is the deepest?\nAnswer:", ["the Arctic", "the Indian", "the Atlantic", "the Pacific"], 3),
    ("Question: What gas do plants take in?\nAnswer:", ["oxygen", "carbon dioxide", "helium", "neon"], 1),
    ("Question: Which metal is liquid at room temperature?\nAnswer:", ["iron", "gold", "mercury", "tin"], 2),
    ("Question: What do you use to write on paper?\nAnswer:", ["a spoon", "a shoe", "a pen", "a pillow"], 2),
    ("Question: Which season is the coldest?\nAnswer:", ["winter", "summer", "spring", "autumn"], 0),
    ("Question: Where do fish live?\nAnswer:", ["in trees", "in the sky", "in sand", "in water"], 3),
    ("Frage: Was trinkt man zum Frühstück? ☕\nAntwort:", ["Kaffee", "Öl", "Tinte 🖋", "Sand"], 0),
    ("问题:中国的首都是哪里?\n答案:", ["北京", "东京", "巴黎", "伦敦"], 0),
    ("Question: How many days are in a week?\nAnswer:", ["five", "six", "seven", "eight"], 2),
    ("Question: What is the opposite of hot?\nAnswer:", ["warm", "cold", "dry", "fast"], 1),
]
TEXTS = [
    "Once upon a time there was a little girl who lived in a small house near the forest.",
    "The quick brown fox 🦊 jumps over the lazy dog.\n\n敏捷的棕色狐狸跳过了懒狗。",
    "def add(a, b):\n    return a + b\n",
]


class Score(NamedTuple):
    """Of a continuation: the sum of its tokens' logprobs, and whether each token is the likeliest."""

    logprob: float
    is_greedy: bool


class Reference(NamedTuple):
    """The weights that are served, by transformers, with their tokenizer."""

    folder: Path
    model: Any
    tokenizer: Any

    @torch.no_grad()
    def scores(self, texts: list[list[int]], start: int) -> list[Score]:
        """Of each text's tokens from `start` on."""
        # What stands after a text does not change its logits.
        longest = max(map(len, texts))
        logits = self.model(torch.tensor([ids + [0] * (longest - len(ids)) for ids in texts])).logits
        result = []
        for ids, row in zip(texts, logits.double().log_softmax(-1), strict=True):
            wanted = torch.tensor(ids[start:])
            row = row[start - 1 : len(ids) - 1]
            own = row.gather(1, wanted[:, None])
            result.append(Score(float(own.sum()), bool((row.argmax(-1) == wanted).all())))
        return result


@pytest.fixture(scope="module")
def reference() -> Reference:
    folder = Path(resolve_model(None, "float32").path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Reference(folder, model, AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def choice_scores(reference: Reference) -> list[list[Score]]:
    """Of each question's choices."""
    encode = reference.tokenizer.encode
    return [
        reference.scores([encode(f"{text} {choice}") for choice in choices], len(encode(text)))
        for text, choices, _ in QUESTIONS
    ]


@pytest.fixture(scope="module")
def text_scores(reference: Reference) -> list[Score]:
    """Of each text as a whole."""
    tokenizer = reference.tokenizer
    return [reference.scores([[tokenizer.bos_token_id, *tokenizer.encode(text)]], 1)[0] for text in TEXTS]


@pytest.fixture(scope="module")
def float32_server() -> Iterator[LiveServer]:
    with LiveServer(None, "--dtype", "float32", "--served-model-name", "m", env={"OMP_NUM_THREADS": "1"}) as server:
        yield server


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """Three tasks in a folder, with their data."""
    folder = tmp_path_factory.mktemp("tasks")
    rows: dict[str, list[dict[str, Any]]] = {
        "quiz": [{"text": text, "choices": choices, "answer": answer} for text, choices, answer in QUESTIONS],
        "prose": [{"text": text} for text in TEXTS],
        "count": [{"text": "1 2 3 4 5 6 7 8", "answer": " 9 10 11 12"}],
    }
    own: dict[str, dict[str, Any]] = {
        "quiz": {
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}],
        },
        "prose": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "byte_perplexity"}],
        },
        "count": {
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": [" 13", "\n\n"], "max_gen_toks": 32, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, fields in own.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
            "test_split": "test",
            "doc_to_text": "{{text}}",
            **fields,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 8}, {"num_concurrent": 4, "tokenized_requests": False, "tokenizer_backend": "huggingface"}],
    ids=["ids by the server's tokenizer, eight prompts a request", "texts, four requests at once"],
)
def test_scores_are_those_of_transformers(
    float32_server: LiveServer,
    reference: Reference,
    tasks: TaskManager,
    choice_scores: list[list[Score]],
    text_scores: list[Score],
    options: dict[str, Any],
) -> None:
    if "tokenizer_backend" in options:
        options = {**options, "tokenizer": str(reference.folder)}
    evaluation = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "m",
            "base_url": f"{float32_server.url}/v1/completions",
            **options,
        },
        tasks=["quiz", "prose", "count"],
        task_manager=tasks,
        bootstrap_iters=0,
    )
    results, samples = evaluation["results"], evaluation["samples"]

    num_right = 0
    for (_, _, answer), expected, sample in zip(QUESTIONS, choice_scores, samples["quiz"], strict=True):
        for score, (got,) in zip(expected, sample["resps"], strict=True):
            assert got[0] == pytest.approx(score.logprob, abs=TOLERANCE)
            assert got[1] == score.is_greedy
        num_right += max(range(len(expected)), key=lambda i: expected[i].logprob) == answer
    assert results["quiz"]["acc,none"] == pytest.approx(num_right / len(QUESTIONS))
    assert num_right > len(QUESTIONS) / 3, "no better than chance"

    for score, sample in zip(text_scores, samples["prose"], strict=True):
        assert sample["resps"][0][0] == pytest.approx(score.logprob, abs=TOLERANCE)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    perplexity = math.exp(-sum(score.logprob for score in text_scores) / num_bytes)
    assert results["prose"]["byte_perplexity,none"] == pytest.approx(perplexity, rel=1e-4)

    assert results["count"]["exact_match,none"] == 1
