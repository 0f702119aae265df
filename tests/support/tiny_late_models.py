"""Folders of tiny models of late interaction."""

from __future__ import annotations

import json

import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]", "[Q] ", "[D] "]
WORDS = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz.,!?", "cat", "mat", "the", "sits", "on", "where", "stop"]
PAD, UNK, CLS, SEP, MASK = range(5)


def add_tokenizer(folder, processor=None):
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", CLS), ("[SEP]", SEP)]
    usual = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.post_processor = processor or usual
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def write_modules(folder, dense, *more):
    """A Dense layer after the transformer, and modules (name, settings)."""
    modules = [("models.Transformer", {}), ("models.Dense", dense), *more]
    listed = []
    for index, (kind, settings) in enumerate(modules):
        path = f"{index}_{kind.rpartition('.')[2]}" if index else ""
        listed.append({"idx": index, "name": str(index), "path": path, "type": f"library.{kind}"})
        if index:
            (folder / path).mkdir()
            (folder / path / "config.json").write_text(json.dumps(settings))
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder / "1_Dense/model.safetensors"


def dense(**options):
    return {"in_features": 32, "out_features": 16, "bias": False, "activation_function": "torch.nn.Identity"} | options
