"""A generating model as one that pools: the same decoder, and in place of its output layer a classifier, or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm.config.checkpoint.shards import shard_files
from vllm.config.checkpoint.weight_files import tensor_files
from vllm.distributed.vocab_slice import VocabSlice
from vllm.layers.adapted.products import WideLinear
from vllm.layers.logits_processor_ext import LogitsProcessorWithIndexedOutput
from vllm.tokenizers.tokenizer import get_tokenizer

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# transformers' names of a decoder's classifier, and those of published reward models.
_CLASSIFIER = re.compile(r"^(score|classifier|v_head|value_head)\.")
_HEAD = re.compile(r"^(score|classifier|v_head|value_head)\.(\d+\.)?(?:summary\.)?(weight|bias)$")


class TokenClassifier(nn.Module):
    """Logits of chosen words in place of a classifier: of each, or, of two, how much the last one's exceeds the first
    one's: its logistic function is the last one's probability between the two."""

    def __init__(self, model: Any, token_ids: list[int], is_difference: bool, vocab_size: int) -> None:
        super().__init__()
        # In a tuple: the model is not a part of its own head.
        self._model, self._is_difference = (model,), is_difference
        self._indexed = LogitsProcessorWithIndexedOutput(vocab_size, token_ids)
        self._columns = torch.tensor(token_ids)

    def forward(self, hidden: Tensor) -> Tensor:
        """[R, H] -> float32 [R, 1], or [R, words]."""
        (model,) = self._model
        head = model.lm_head
        if getattr(head, "is_final", True):
            logits = self._indexed.indexed_logits(head, hidden)
        else:
            vocab = VocabSlice(self._indexed.vocab_size, head.group)
            logits = vocab.gather_columns(model.compute_logits(hidden), self._columns)
        return logits[:, 1:] - logits[:, :1] if self._is_difference else logits


def use_pooling_head(model: Any, config: ModelConfig) -> None:
    """Replace the output layer of a model that was just built by what `config.convert` says. `model.classify` takes
    hidden states [R, H] to logits, float32 [R, labels].

    Raises:
        ValueError: a word of classifier_from_token is not one token, or the model cannot do without its output layer.
    """
    if not hasattr(model, "drop_head"):
        raise ValueError(f"{type(model).__name__} cannot be served as a pooling model: it has no method drop_head")
    raw, size = config.hf_config.raw, config.hf_config.hidden_size
    head: nn.Module | None = None
    if words := raw.get("classifier_from_token"):
        if "embed" not in config.convert:
            ids, is_difference = _token_ids(words, config), raw.get("method") != "no_post_processing"
            model.add_module("head", TokenClassifier(model, ids, is_difference, config.vocab_size))
            model.classify = model.head.__call__
            return
    elif config.convert == "reward":
        head = _reward_head(config, size)
    elif "embed" not in config.convert:
        _check_classifier(config)
        head = WideLinear(size, config.hf_config.num_labels, bias=config.convert == "token_classify")
    dropped = model.drop_head()
    if head is not None:
        model.add_module("head", head)
        # Not the module itself, which would be registered twice.
        model.classify = head.__call__
    model.checkpoint_tensors = _with_head(getattr(model, "checkpoint_tensors", None), dropped, head is not None)


def _check_classifier(config: ModelConfig) -> None:
    """ValueError: the checkpoint has none."""
    names = () if config.load_format == "dummy" else tensor_files(shard_files(Path(config.path)))
    if names and not any(_CLASSIFIER.match(name) for name in names):
        raise ValueError(
            f"{Path(config.path).name} lacks a classifier (score.weight), which {config.architecture} served with "
            f"convert='classify' needs: hf_overrides={{'classifier_from_token': [NO, YES]}} makes one of two words"
        )


def _reward_head(config: ModelConfig, size: int) -> nn.Module:
    """Two layers as Qwen2's, or a linear one where the checkpoint has no more, as InternLM2's."""
    is_made_up = config.load_format == "dummy"
    names = () if is_made_up else tensor_files(shard_files(Path(config.path)))
    single = [match[3] for name in names if (match := _HEAD.match(name)) and not match[2]]
    if single:
        return WideLinear(size, _num_rewards(config), bias="bias" in single)
    middle = WideLinear(size, size, bias=True)
    return nn.Sequential(middle, nn.ReLU(), WideLinear(size, _num_rewards(config), bias=True))


def _num_rewards(config: ModelConfig) -> int:
    """A process reward is of two classes."""
    is_process = "Process" in config.architecture
    raw = config.hf_config.raw
    is_said = raw.get("num_labels") or raw.get("id2label")
    return config.hf_config.num_labels if is_said else 1 + is_process


def _with_head(
    read: Callable[[str, Tensor], Iterator[tuple[str, Tensor]]] | None, dropped: str, has_head: bool
) -> Callable[[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """A reader of checkpoints' tensors that knows the classifier's, and leaves the output layer's out."""

    def checkpoint_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if match := _HEAD.match(name):
            if has_head:
                yield f"head.{match[2] or ''}{match[3]}", tensor
            return
        for own, values in ((name, tensor),) if read is None else read(name, tensor):
            if not own.startswith(dropped):
                yield own, values

    return checkpoint_tensors


def _token_ids(words: list[str], config: ModelConfig) -> list[int]:
    tokenizer = get_tokenizer(
        config.tokenizer,
        tokenizer_mode=config.tokenizer_mode,
        trust_remote_code=config.trust_remote_code,
        revision=config.tokenizer_revision,
    )
    ids = []
    for word in words:
        known = tokenizer.token_to_id(word)
        found = tokenizer.encode(word, False) if known is None else [known]
        if len(found) != 1:
            raise ValueError(
                f"classifier_from_token: {word!r} has {len(found)} tokens, and a classifier's words have one; "
                "runner='generate' scores by words of any number of tokens"
            )
        ids += found
    return ids
