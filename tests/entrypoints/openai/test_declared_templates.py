"""CrossEncoder's folders of sentence-transformers that declare a chat template for pairs: the score of their prompt by
transformers' model, offline and over HTTP."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from asgi import AppThread, make_engine
from minilm import extract_minilm

from vllm import LLM
from vllm.entrypoints.score_templates import TEMPLATES, ChatScoreTemplate, PairPrompts
from vllm.exceptions import VLLMValidationError
from vllm.transformers_utils.sentence_transformers import PairMessages

QUERY = "Where does the cat sit?"
DOCUMENTS = ["The cat sits on the mat.", "Stocks fell.", "A kitten is on a rug, far from all others."]
TEMPLATE = """{%- for message in messages if message.role == "system" %}
{{ message.content if message.content is string else message.content[0].text }} {% endfor -%}
{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}
{%- set document = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}
query: {{ query if query is string else query[0].text }}
document: {{ document if document is string else document[0].text }}
{% if add_generation_prompt %}
{{ instruction or "" }} answer:
{% endif %}"""
YES, NO = 2748, 2053
KINDS = {
    "classifier": (transformers.Qwen3ForSequenceClassification, "sequence-classification", {"num_labels": 1}),
    "generator": (transformers.Qwen3ForCausalLM, "text-generation", {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module", params=KINDS)
def declared(request, tmp_path_factory):
    """Kind, folder, and transformers' model and tokenizer."""
    model_class, task, fields = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 30522, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "pad_token_id": 0}
    torch.manual_seed(0)
    model = model_class(transformers.Qwen3Config(**sizes, **heads, **fields, initializer_range=0.5)).eval()
    model.save_pretrained(folder)
    own = transformers.AutoTokenizer.from_pretrained(extract_minilm(tmp_path_factory.mktemp("minilm")))
    # It puts special tokens around texts, which a chat template's are not to have.
    names = {name: getattr(own, name) for name in ("cls_token", "sep_token", "pad_token", "unk_token")}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own.backend_tokenizer, **names)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    generates = request.param == "generator"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
    ]
    if generates:
        kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
        modules.append({"idx": 1, "name": "1", "path": "1_LogitScore", "type": kind})
        (folder / "1_LogitScore").mkdir()
        (folder / "1_LogitScore/config.json").write_text(json.dumps({"true_token_id": YES, "false_token_id": NO}))
    (folder / "modules.json").write_text(json.dumps(modules))
    output = {"method": "forward", "method_output_name": "logits"}
    settings = {
        "transformer_task": task,
        "modality_config": {"text": output, "message": {**output, "format": "structured" if generates else "flat"}},
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True, "restore_suffix": True}},
    }
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    prompts = {"prompts": {"p": "judge"}, "default_prompt_name": "p"} if generates else {}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder", **prompts}))
    return request.param, folder, model, tokenizer


@torch.no_grad()
def expected(declared, instruction=None, documents=DOCUMENTS):
    kind, _, model, tokenizer = declared
    scores = []
    for document in documents:
        messages = [{"role": "query", "content": QUERY}, {"role": "document", "content": document}]
        if kind == "generator":
            # A caller's instruction is a prompt of sentence-transformers: it replaces the default one.
            messages.insert(0, {"role": "system", "content": instruction or "judge"})
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, instruction=instruction
        )
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        logits = model(torch.tensor([ids])).logits
        scores.append(logits[0, 0] if kind == "classifier" else logits[0, -1, YES] - logits[0, -1, NO])
    return torch.stack(scores).flatten().sigmoid().tolist()


def test_scores(declared):
    _, folder, *_ = declared
    want = expected(declared)
    assert max(want) - min(want) > 0.01
    llm = LLM(str(folder), dtype="float32")
    got = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    assert got == pytest.approx(want, abs=1e-5)
    other = llm.score(QUERY, DOCUMENTS, chat_template="plain", use_tqdm=False)
    assert [each.outputs.score for each in other] != pytest.approx(want, abs=1e-3)


def test_over_http(declared):
    _, folder, *_ = declared
    with AppThread(make_engine(folder, dtype="float32"), served_model_name=["tiny"]) as server:
        for fields in ({}, {"instruction": "which place"}):
            answer = server.post("/score", text_1=QUERY, text_2=DOCUMENTS, **fields)
            found = [each["score"] for each in answer["data"]]
            assert found == pytest.approx(expected(declared, fields.get("instruction")), abs=1e-5)
            # What spells a special token is text.
            spelt = [f"{DOCUMENTS[0]} [SEP] a", DOCUMENTS[1]]
            answer = server.post("/score", text_1=QUERY, text_2=spelt, **fields)
            found = [each["score"] for each in answer["data"]]
            assert found == pytest.approx(expected(declared, fields.get("instruction"), spelt), abs=1e-5)
        answer = server.post("/rerank", query=QUERY, documents=DOCUMENTS)
        found = {each["index"]: each["relevance_score"] for each in answer["results"]}
        assert [found[index] for index in range(3)] == pytest.approx(expected(declared), abs=1e-5)


def test_instructions_of_templates_without_the_variable(declared):
    """They are the system message, and refused where there is none."""
    tokenizer, source = declared[3], TEMPLATE.replace('{{ instruction or "" }}', "")
    prompted = ChatScoreTemplate(tokenizer, PairMessages(source, {}, False, "judge", ()))
    PairPrompts(prompted, tokenizer, 100, instruction="which place")
    assert "which place" in prompted.render("q", "d", "which place") and "judge" in prompted.render("q", "d")
    for template in (ChatScoreTemplate(tokenizer, PairMessages(source, {}, False, "", ())), TEMPLATES["plain"]):
        with pytest.raises(VLLMValidationError, match="instruction needs .* ignores 'which place'"):
            PairPrompts(template, tokenizer, 100, instruction="which place")


def test_a_score_that_is_one_logit(declared):
    kind, folder, *_ = declared
    if kind == "classifier":
        return
    path = folder / "1_LogitScore/config.json"
    before = path.read_text()
    path.write_text(json.dumps({"true_token_id": YES, "false_token_id": None}))
    llm = LLM(str(folder), dtype="float32")
    with pytest.raises(VLLMValidationError, match="LogitScore without false_token_id .*: name a score template"):
        llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    path.write_text(before)
