"""Tiny random models whose tokenizers and chat templates differ, and random decisions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import tokenizers
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model
from tokenizers import decoders, models, pre_tokenizers

CONTEXT = 8192
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Takes every role, and switches thinking off."""
STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('what role?') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}<s>[INST] {{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }}</s>{% endif %}"
    "{% endfor %}"
)
"""Takes users and assistants by turns only; an answer begins with a space."""
KINDS = ("bytes", "chatml", "metaspace")


def make_decision_model(kind: str, folder: Path) -> Any:
    """Write a random model of a kind into the folder; returns transformers' own.

    "bytes": no template, and " A" is two tokens. "chatml": Qwen3 behind CHATML. "metaspace": behind STRICT, a
    tokenizer that puts a space before every text.
    """
    fields = {"max_position_embeddings": CONTEXT}
    if kind == "metaspace":
        vocab_size = _make_metaspace_tokenizer(folder)
        _, model = make_random_model("llama", "odd", folder, vocab_size=vocab_size, **fields)
    else:
        arch = "qwen3" if kind == "chatml" else "llama"
        _, model = make_random_model(arch, "small", folder, vocab_size=VOCAB_SIZE, **fields)
        make_byte_tokenizer(folder)
    template = {"chatml": CHATML, "metaspace": STRICT}.get(kind)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def _make_metaspace_tokenizer(folder: Path) -> int:
    characters = [chr(code) for code in range(33, 127)] + ["\n", "\u2581"]
    words = [f"\u2581{letter}" for letter in "ABCDEFGHIJKLM"] + ["in", "th", "the"]
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *characters, *words])}
    merges = [("\u2581", letter) for letter in "ABCDEFGHIJKLM"] + [("i", "n"), ("t", "h"), ("th", "e")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return len(vocab)


_WORDS = "the screen of a parcel arrived late and broken but support was kind so I stay 7 days in Oslo\n- yes!".split(
    " "
)


class RandomDecisions:
    """Inputs, questions and options of decisions, the same for a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self, low: int, high: int) -> str:
        """Some words."""
        return " ".join(self._random.choices(_WORDS, k=self._random.randint(low, high)))

    def input(self) -> Any:
        """A text or a conversation."""
        if self._random.random() < 0.6:
            return self.text(1, 12)
        roles = [self._random.choice(["user", "assistant"]) for _ in range(self._random.randint(1, 3))]
        first = [{"role": self._random.choice(["system", "developer"]), "content": self.text(1, 4)}]
        return first + [{"role": role, "content": self.text(1, 8)} for role in roles]

    def question(self) -> dict[str, Any]:
        """One of any type."""
        kind = self._random.choice(["predicate", "choice", "score"])
        question: dict[str, Any] = {"type": kind, "instructions": self.text(2, 6)}
        if self._random.random() < 0.5:
            question["name"] = self.text(1, 1)
        if kind == "choice":
            count = self._random.choice([2, 2, 3, 3, 5, 5, 12, 26, 40])
            values: list[str | bool] = [f"{self.text(1, 1)}{index}" for index in range(count)]
            values[:2] = [True, "true"]
            question["choices"] = [{"value": value} for value in values]
        elif kind == "score":
            question["levels"] = [{"label": self.text(1, 2)} for _ in range(self._random.randint(2, 10))]
        return question

    def options(self) -> dict[str, Any]:
        """Options of LLM.decide."""
        read = self._random.choice(["labels", None, "values"])
        return {"read": read, "permutations": self._random.choice([1, 1, 1, 2, 3])}
