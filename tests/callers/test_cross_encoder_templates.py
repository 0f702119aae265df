"""CrossEncoder's folders with a chat template for pairs, as sentence-transformers writes them: its scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from minilm import extract_minilm

from vllm import LLM

QUERY = "Where is the cat?"
DOCUMENTS = ["The cat sits on the mat.", "Stocks fell on Monday.", "A kitten is on a rug."]
TEMPLATE = (
    '{% for m in messages %}{{ m["role"] }} : {{ m["content"] if m["content"] is string else m["content"][0].text }}\n'
    "{% endfor %}{% if add_generation_prompt %}answer :{% endif %}"
)


@pytest.mark.parametrize("task", ["sequence-classification", "text-generation"])
def test_scores(tmp_path: Path, task: str) -> None:
    pytest.importorskip("sentence_transformers", minversion="5.4")
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules.transformer import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 30522, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "num_labels": 1}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**sizes, **heads, initializer_range=0.5, tie_word_embeddings=True)
    generates = task == "text-generation"
    kind = transformers.Qwen3ForCausalLM if generates else transformers.Qwen3ForSequenceClassification
    kind(config).save_pretrained(tmp_path / "model")
    own = transformers.AutoTokenizer.from_pretrained(extract_minilm(tmp_path / "minilm"))
    names = {name: getattr(own, name) for name in ("cls_token", "sep_token", "pad_token", "unk_token")}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own.backend_tokenizer, **names)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    options = {"chat_template": {"add_generation_prompt": True}}
    module = Transformer(str(tmp_path / "model"), transformer_task=task, processing_kwargs=options)
    encoder = CrossEncoder(modules=[module, *([LogitScore(2748, 2053)] if generates else [])], device="cpu")
    encoder.save_pretrained(str(tmp_path / "encoder"))
    expected = CrossEncoder(str(tmp_path / "encoder"), device="cpu").predict([(QUERY, each) for each in DOCUMENTS])
    outputs = LLM(str(tmp_path / "encoder"), dtype="float32").score(QUERY, DOCUMENTS, use_tqdm=False)
    assert [output.outputs.score for output in outputs] == pytest.approx(expected.tolist(), abs=1e-5)
