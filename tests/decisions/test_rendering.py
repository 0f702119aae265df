"""Prompts and labels, for tokenizers and templates of several kinds."""

from __future__ import annotations

import pytest
import tokenizers as tokenizers_library
from decision_models import CHATML, STRICT, make_decision_model

from vllm.config.checkpoint.config import parse_hf_config
from vllm.decisions.conversation import parse_input
from vllm.decisions.labels import LabelSpeller
from vllm.decisions.prompts import EXAMPLES, answers_in_words, question_text
from vllm.decisions.questions import parse_questions
from vllm.decisions.render import make_frame
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers.tokenizer import Tokenizer, get_tokenizer

DROPPING = "{% for m in messages %}{% if m.role == 'user' %}<s>{{ m.content }}{% endif %}{% endfor %}</s>"
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}</s><think>\n"
CONVERSATION = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    made = {}
    for kind in ("bytes", "metaspace"):
        make_decision_model(kind, folder := tmp_path_factory.mktemp(kind))
        made[kind] = get_tokenizer(folder)
    return made


def frame_of(tokenizer, input, template, **kwargs):
    return make_frame(parse_input(input), "Q?\nA. b", tokenizer, template, kwargs)


def test_a_template_that_takes_every_role(tokenizers):
    frame = frame_of(tokenizers["bytes"], CONVERSATION, CHATML)
    assert frame.head == "<|system|>\nBe brief.</s>\n<|user|>\nHello</s>\n<|assistant|>\nHi</s>\n<|user|>\n"
    assert frame.tail.startswith("</s>\n<|assistant|>\n<think>\n\n</think>\n\n") and frame.has_template


def test_thinking_is_off_unless_it_is_asked_for(tokenizers):
    tokenizer = tokenizers["bytes"]
    assert "<think>" in frame_of(tokenizer, "a", CHATML).tail
    assert "<think>" not in frame_of(tokenizer, "a", CHATML, enable_thinking=True).tail
    # A template that always begins a thought.
    assert "<think>\n\n</think>\n\n" in frame_of(tokenizer, "a", THINKING).tail
    assert "</think>" not in frame_of(tokenizer, "a", THINKING, enable_thinking=True).tail


def test_a_role_that_a_template_refuses_or_drops_is_not_lost(tokenizers):
    for template in (STRICT, DROPPING):
        frame = frame_of(tokenizers["bytes"], CONVERSATION, template)
        assert all(text in frame.head for text in ("Be brief.", "Hello", "Hi"))


def test_a_template_may_change_white_space_or_take_parts_only(tokenizers):
    parts = "{% for m in messages %}{% for part in m.content %}<s>{{ part.text }}{% endfor %}{% endfor %}</s>"
    squeezing = "{% for m in messages %}<s>{{ m.content.split() | join(' ') }}{% endfor %}</s>"
    for template, head in ((parts, "<s> a \n b \n\n"), (squeezing, "<s>a b ")):
        assert frame_of(tokenizers["bytes"], " a \n b ", template).head == head


def test_an_input_may_hold_what_stands_for_the_question(tokenizers):
    assert frame_of(tokenizers["bytes"], "QUESTIONxPLACExHERE", CHATML).head == "<|user|>\nQUESTIONxPLACExHERE\n\n"


def test_labels_are_of_tokens_that_the_tokenizer_knows(tokenizers):
    speller = LabelSpeller(tokenizers["metaspace"], " [/INST]")
    choices = [{"value": "caf\u00e9"}, {"value": "tea"}]
    (question,) = parse_questions({"type": "choice", "instructions": "", "choices": choices})
    with pytest.raises(VLLMValidationError, match="no tokens for 'caf\u00e9'"):
        speller.value_labels(question, "questions[0]")
    vocab = {token: index for index, token in enumerate(["<unk>", "1", "2", "3", "a", "b", "A", "B"])}
    words = tokenizers_library.Tokenizer(tokenizers_library.models.WordLevel(vocab, "<unk>"))
    words.add_special_tokens(["<unk>"])
    small = Tokenizer(words, {"unk_token": "<unk>"}, None)
    assert [label.text for label in spelled(small, "", "choice", 3)] == ["1", "2", "3"]
    with pytest.raises(VLLMValidationError, match="cannot tell 4 labels apart"):
        spelled(small, "", "choice", 4)


def test_a_template_that_cannot_ask_is_refused(tokenizers):
    for template, says in (("nothing", "as it is"), ("{{ raise_exception('never') }}", "never")):
        with pytest.raises(VLLMValidationError, match=says):
            frame_of(tokenizers["bytes"], "a", template)
    with pytest.raises(VLLMValidationError, match="chat_template_kwargs"):
        frame_of(tokenizers["bytes"], "a", CHATML, tokenize=True)


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
@pytest.mark.parametrize("template", [None, CHATML, STRICT])
@pytest.mark.parametrize("input", ["the stop\n", "the stop in the thin " * 9])
def test_tokens_are_those_of_the_whole_text(tokenizers, monkeypatch, kind, template, input):
    tokenizer = tokenizers[kind]
    frame = frame_of(tokenizer, input, template)
    questions = ["Which?\nA. the", "the other"]
    whole = [tokenizer.encode(frame.head + each + frame.tail, add_special_tokens=False) for each in questions]
    texts = []
    encode_batch = Tokenizer.encode_batch
    monkeypatch.setattr(
        Tokenizer, "encode_batch", lambda self, own, **how: texts.extend(own) or encode_batch(self, own, **how)
    )
    assert frame.encode(tokenizer, questions) == whole
    # A long input is encoded once, though a tokenizer that puts a space before every text joins it to the question.
    assert len(texts) == 2 and max(map(len, texts)) < 150


def spelled(tokenizer, tail, kind, count=2):
    choices = [{"value": f"v{index}"} for index in range(count)]
    options = {"choice": {"choices": choices}, "score": {"levels": [{"label": "a"}] * count}}.get(kind, {})
    (question,) = parse_questions({"type": kind, "instructions": "", **options})
    return LabelSpeller(tokenizer, tail).labels_for(question)


def test_values_are_read_after_a_cue(tokenizers):
    for template in (None, CHATML):
        frame = make_frame(parse_input("a"), "Q?", tokenizers["bytes"], template, None, "Label:")
        assert frame.tail.endswith("Label:") and "Answer:" not in frame.tail
        (label, _) = LabelSpeller(tokenizers["bytes"], frame.tail).value_labels(
            parse_questions({"type": "predicate", "instructions": ""})[0], ""
        )
        assert tokenizers["bytes"].decode(label.token_ids) == " true"


@pytest.mark.parametrize("template", [None, CHATML, STRICT])
def test_examples_stand_between_the_system_and_the_input(tokenizers, template):
    def head_of(input):
        return make_frame(parse_input(input), "Q?", tokenizers["bytes"], template, None, "Label:", True).head

    text, examples = head_of("Hello"), [text for text, _, _ in EXAMPLES]
    places = [text.index(each) for each in [*examples, "Text: Hello"]]
    assert places == sorted(places) and text.count("Label: ") == len(examples)
    assert [word in text for *_, word in EXAMPLES] == [True] * len(examples)
    # All inputs share them, which is what makes them cheap.
    assert head_of("Bye")[: places[-1]] == text[: places[-1]]
    assert all(each in head_of("") for each in examples)
    if template == CHATML:
        text = head_of(CONVERSATION)
        places = [text.index(each) for each in ["Be brief.", *examples, "Hello", "Hi"]]
        assert places == sorted(places) and "Text: Hello" not in text


def test_options_are_listed_for_small_models_only_where_they_say_more_than_their_texts():
    def asked(instructions, **described):
        choices = [{"value": "new"}, {"value": "old", **described}]
        (question,) = parse_questions({"type": "choice", "instructions": instructions, "choices": choices})
        return [question_text(question, (), (0, 1), in_words) for in_words in (False, True)]

    assert asked("Which?") == ["Which?\n(new, old)", "Which?"]
    assert asked("") == ["(new, old)"] * 2
    assert asked("Which?", description="worn") == ["Which?\n- new\n- old (worn)"] * 2
    (predicate,) = parse_questions({"type": "predicate", "instructions": "Is it?"})
    assert question_text(predicate, ("yes", "no"), (0, 1), True) == "Is it? Yes or no?"
    assert question_text(predicate, (), (1, 0), True) == "Is it? False or true?"


def test_which_models_answer_in_words():
    tiny, smol, qwen = (
        {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocab}
        for hidden, layers, heads, vocab in ((64, 2, 4, 300), (960, 32, 15, 49152), (896, 24, 14, 151936))
    )
    sizes = {
        "tiny": tiny,
        "smollm2-360m": smol | {"num_key_value_heads": 5, "intermediate_size": 2560, "tie_word_embeddings": True},
        "qwen2.5-0.5b": qwen | {"num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True},
        "experts": smol | {"num_local_experts": 8, "tie_word_embeddings": True},
    }
    counts = {name: parse_hf_config(raw, {}).num_weights for name, raw in sizes.items()}
    # Their published sizes, without norms and biases.
    assert counts["smollm2-360m"] == pytest.approx(362e6, rel=0.01)
    assert counts["qwen2.5-0.5b"] == pytest.approx(494e6, rel=0.01)
    assert counts["experts"] > 2e9
    assert [name for name, count in counts.items() if answers_in_words(count)] == ["smollm2-360m"]


def test_labels_of_one_token_are_taken_where_there_are_some(tokenizers):
    labels = spelled(tokenizers["metaspace"], " [/INST]", "choice", 3)
    assert [label.text for label in labels] == ["A", "B", "C"]
    assert all(len(label.token_ids) == 1 for label in labels)
    # Here " Z" is two tokens, and a label is never refused for that.
    assert [len(label.token_ids) for label in spelled(tokenizers["metaspace"], "x:", "choice", 26)][-1] == 2


@pytest.mark.parametrize(
    ("kind", "count"), [("predicate", 2), ("choice", 2), ("choice", 27), ("choice", 255), ("score", 10)]
)
def test_no_label_begins_another(tokenizers, kind, count):
    for tokenizer in tokenizers.values():
        for tail in ("\nAnswer:", "</s>\n"):
            labels = spelled(tokenizer, tail, kind, count)
            ids = [tuple(label.token_ids) for label in labels]
            assert len(set(ids)) == count and all(ids)
            assert not any(a != b and b[: len(a)] == a for a in ids for b in ids)
