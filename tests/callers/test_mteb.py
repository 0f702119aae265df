"""mteb's vLLM wrappers: what sentence-transformers gives for the same models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from minilm import extract_minilm

mteb = pytest.importorskip("mteb")

PAIRS = [
    ("The cat sits on the mat.", "A kitten is on a rug.", 4.0),
    ("The cat sits on the mat.", "Stocks fell on Monday.", 0.5),
    ("Prices rose again.", "It became more expensive.", 4.5),
    ("He plays the violin.", "A bus stops here.", 0.0),
    ("The bus is late.", "We wait for the bus.", 3.0),
]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract_minilm(tmp_path_factory.mktemp("minilm"))


def toy_task() -> Any:
    from datasets import Dataset, DatasetDict
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class ToySTS(AbsTaskSTS):
        min_score, max_score = 0, 5
        metadata = TaskMetadata(
            name="ToySTS",
            description="Pairs of sentences.",
            reference=None,
            dataset={"path": "toy", "revision": "1"},
            type="STS",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
            date=None,
            domains=None,
            task_subtypes=None,
            license=None,
            annotations_creators=None,
            dialect=None,
            sample_creation=None,
            bibtex_citation=None,
        )

        def load_data(self, **_: Any) -> None:
            first, second, score = zip(*PAIRS, strict=True)
            own = {"sentence1": list(first), "sentence2": list(second), "score": list(score)}
            self.dataset = DatasetDict({"test": Dataset.from_dict(own)})
            self.data_loaded = True

    return ToySTS()


def score_of(model: Any) -> float:
    result = mteb.evaluate(model, toy_task(), cache=None, overwrite_strategy="always")
    return float(result.task_results[0].scores["test"][0]["cosine_spearman"])


def test_encoder(minilm: Path) -> None:
    from mteb.models.vllm_wrapper import VllmEncoderWrapper
    from sentence_transformers import SentenceTransformer

    wrapper = VllmEncoderWrapper(str(minilm), dtype="float32", max_model_len=64)
    try:
        assert score_of(wrapper) == pytest.approx(score_of(SentenceTransformer(str(minilm), device="cpu")), abs=1e-6)
    finally:
        wrapper.cleanup()


def test_cross_encoder(tmp_path: Path, minilm: Path) -> None:
    import torch
    import transformers
    from mteb.models.vllm_wrapper import VllmCrossEncoderWrapper
    from sentence_transformers import CrossEncoder

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.BertConfig(**sizes, max_position_embeddings=64, num_labels=1, initializer_range=0.5)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path)
    firsts, seconds, _ = zip(*PAIRS, strict=True)
    wrapper = VllmCrossEncoderWrapper(str(tmp_path), dtype="float32")
    try:
        batches: list[Any] = [[{"text": list(texts)}] for texts in (firsts, seconds)]
        found = wrapper.predict(*batches, task_metadata=toy_task().metadata, hf_split="test", hf_subset="default")
    finally:
        wrapper.cleanup()
    reference = CrossEncoder(str(tmp_path), device="cpu").predict(list(zip(firsts, seconds, strict=True)))
    assert found.tolist() == pytest.approx(reference.tolist(), abs=1e-5)
