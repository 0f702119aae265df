"""lm-evaluation-harness: what it finds through our engine, in its process and over the server, is what it finds through
transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer

from vllm.loader import resolve_model

lm_eval = pytest.importorskip("lm_eval")
yaml = pytest.importorskip("yaml")

TOLERANCE = 1e-3
"""The tolerance of a text's logprob, in nats: float32 sums in another order, over some tokens."""

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
NAMES = ["quiz", "prose", "count"]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The embedded model's, as transformers and the engine read it: without GGUF's blocks."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_GGUF_DEQUANTIZE", "1")
        return Path(resolve_model(None, "float32").path)


@pytest.fixture(scope="module")
def server(server_environment: dict[str, str]) -> Iterator[LiveServer]:
    with LiveServer(None, "--dtype", "float32", "--served-model-name", "m", env=server_environment) as server:
        yield server


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Any:
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
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def in_process(folder: Path) -> Any:
    """Its `--model vllm`."""
    return lm_eval.api.registry.get_model("vllm").create_from_arg_string(
        f"pretrained={folder},dtype=float32,max_model_len=512", {"batch_size": "auto"}
    )


@pytest.fixture(scope="module")
def transformers(folder: Path) -> Any:
    """Its `--model hf`."""
    return lm_eval.api.registry.get_model("hf").create_from_arg_string(
        f"pretrained={folder},dtype=float32,max_length=512", {"batch_size": 8, "device": "cpu"}
    )


def evaluate(tasks: Any, model: Any, names: list[str], **options: Any) -> dict[str, Any]:
    return lm_eval.simple_evaluate(model=model, tasks=names, task_manager=tasks, bootstrap_iters=0, **options)


@pytest.fixture(scope="module")
def expected(tasks: Any, transformers: Any) -> dict[str, Any]:
    return evaluate(tasks, transformers, NAMES)


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Every answer, and the results made of them."""
    for name in NAMES:
        for sample, wanted in zip(found["samples"][name], expected["samples"][name], strict=True):
            for (got,), (want,) in zip(sample["resps"], wanted["resps"], strict=True):
                if isinstance(want, str):
                    assert got == want
                    continue
                logprob, *is_greedy = want if isinstance(want, (list, tuple)) else (want,)
                own, *own_greedy = got if isinstance(got, (list, tuple)) else (got,)
                assert own == pytest.approx(logprob, abs=TOLERANCE)
                assert own_greedy == is_greedy
    for name, metric in (("quiz", "acc"), ("prose", "byte_perplexity"), ("count", "exact_match")):
        values = [each["results"][name][f"{metric},none"] for each in (found, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-4)
    assert expected["results"]["quiz"]["acc,none"] > 1 / 3, "no better than chance"
    assert expected["results"]["count"]["exact_match,none"] == 1


def test_in_process(tasks: Any, in_process: Any, expected: dict[str, Any]) -> None:
    check(evaluate(tasks, in_process, NAMES), expected)


def test_chat_template(tasks: Any, in_process: Any, transformers: Any) -> None:
    options = {"apply_chat_template": True, "system_instruction": "Continue."}
    found, wanted = (evaluate(tasks, model, ["count"], **options) for model in (in_process, transformers))
    assert found["samples"]["count"][0]["resps"] == wanted["samples"]["count"][0]["resps"]
    assert found["samples"]["count"][0]["arguments"][0][0] == wanted["samples"]["count"][0]["arguments"][0][0]


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 8}, {"num_concurrent": 4, "tokenized_requests": False, "tokenizer_backend": "huggingface"}],
    ids=["ids by the server's tokenizer, eight prompts a request", "texts, four requests at once"],
)
def test_local_completions(
    server: LiveServer, folder: Path, tasks: Any, expected: dict[str, Any], options: dict[str, Any]
) -> None:
    if "tokenizer_backend" in options:
        options = {**options, "tokenizer": str(folder)}
    arguments = {"model": "m", "base_url": f"{server.url}/v1/completions", **options}
    check(evaluate(tasks, "local-completions", NAMES, model_args=arguments), expected)
