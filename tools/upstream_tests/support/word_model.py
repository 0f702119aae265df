"""A random model whose tokenizer knows words: 32,000 pieces, learnt from texts that are at hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from models_util import make_random_model
from tokenizers import decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 32000
_SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
# ChatML, which carries the roles and contents that tests look for in prompts.
_CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% if not (loop.last and continue_final_message | default(false)) %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_word_model(folder: Path, texts: Iterable[str], context: int = 8192, markers: Iterable[str] = ()) -> Path:
    """A Llama of two layers and `context` positions, with a tokenizer learnt from `texts`; adds no special tokens.
    `markers`: further texts that are one token each."""
    markers = list(markers)
    make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE, max_position_embeddings=context)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(set(markers)),
        special_tokens=[*_SPECIAL.values(), "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens(list(markers))
    missing = VOCAB_SIZE - backend.get_vocab_size()
    backend.add_tokens([f"<filler{each}>" for each in range(missing)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT, **_SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    # Random models end no answer by themselves.
    generation = {"bos_token_id": 1, "eos_token_id": 2, "max_new_tokens": 64}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
