"""CrossEncoder's folders of sentence-transformers that declare a chat template for pairs: the score of their prompt by
transformers' model, offline and over HTTP."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from minilm import extract_minilm

from vllm import LLM
from vllm.config.checkpoint.sentence_transformers import PairMessages
from vllm.exceptions import VLLMValidationError
from vllm.pooling.score_templates import TEMPLATES, ChatScoreTemplate, PairPrompts

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
def logits_of_answers(declared, query, documents):
    """Logits of a generating model's two answers, [documents, 2]."""
    _, _, model, tokenizer = declared
    rows = []
    for document in documents:
        messages = [{"role": role, "content": text} for role, text in (("query", query), ("document", document))]
        messages.insert(0, {"role": "system", "content": "judge"})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        rows.append(model(torch.tensor([ids])).logits[0, -1, [YES, NO]])
    return torch.stack(rows)


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


def test_over_http(serve, declared):
    _, folder, *_ = declared
    server = serve({}, folder)
    for fields in ({}, {"instruction": "which place"}):
        answer = server.post("/score", text_1=QUERY, text_2=DOCUMENTS, **fields)
        found = [each["score"] for each in answer["data"]]
        assert found == pytest.approx(expected(declared, fields.get("instruction")), abs=1e-5)
        # Words that spell a special token are text.
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


@pytest.mark.parametrize(("has_other", "activation"), [(False, "Sigmoid"), (False, "Identity"), (True, "Identity")])
def test_scores_that_are_logits(serve, declared, has_other, activation, tmp_path):
    kind, source, *_ = declared
    if kind == "classifier":
        return
    folder = shutil.copytree(source, tmp_path / "folder")
    other = NO if has_other else None
    (folder / "1_LogitScore/config.json").write_text(json.dumps({"true_token_id": YES, "false_token_id": other}))
    path = folder / "config_sentence_transformers.json"
    own = json.loads(path.read_text()) | {"activation_fn": f"torch.nn.modules.{activation}"}
    path.write_text(json.dumps(own))
    want = logits_of_answers(declared, QUERY, DOCUMENTS)
    want = want[:, 0] - want[:, 1] if has_other else want[:, 0]
    logits, scores = want.tolist(), (want if activation == "Identity" else want.sigmoid()).tolist()
    llm = LLM(str(folder), dtype="float32")
    got = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    assert got == pytest.approx(scores, abs=1e-4)
    server = serve({}, folder)
    for fields, expected in (({}, scores), ({"use_activation": False}, logits)):
        answer = server.post("/score", text_1=QUERY, text_2=DOCUMENTS, **fields)
        assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-4)
    answer = server.post("/rerank", query=QUERY, documents=DOCUMENTS[:1], return_readings=True)
    answers = answer["results"][0]["readings"]["answers"]
    assert len(answers) == 1 + has_other and answers[0]["logit"] == pytest.approx(
        logits_of_answers(declared, QUERY, DOCUMENTS[:1])[0, 0].item(), abs=1e-4
    )


def test_prompts_are_as_long_as_the_folder_says(declared, tmp_path):
    folder = shutil.copytree(declared[1], tmp_path / "folder")
    path = folder / "sentence_bert_config.json"
    settings = json.loads(path.read_text())
    settings["processing_kwargs"]["chat_template"]["max_length"] = 32
    path.write_text(json.dumps(settings))
    llm = LLM(str(folder), dtype="float32")
    assert llm.model_config.max_model_len == 32
    with pytest.raises(VLLMValidationError, match="truncate_prompt_tokens"):
        llm.score(QUERY, "a b c d e " * 8, use_tqdm=False)
    settings["processing_kwargs"]["text"] = {"max_length": 99, "add_special_tokens": False}
    path.write_text(json.dumps(settings))
    llm = LLM(str(folder), dtype="float32", max_model_len=64) if declared[0] == "generator" else None
    problem = "sentence_bert_config.json: add_special_tokens=False in text of processing_kwargs is not supported"
    with pytest.raises(ValueError, match=problem):
        LLM(str(folder), dtype="float32") if llm is None else llm.score(QUERY, DOCUMENTS, use_tqdm=False)
