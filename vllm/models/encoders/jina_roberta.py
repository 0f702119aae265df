"""Jina's XLM-RoBERTa (arXiv:2409.10173), with rotary positions: jina-embeddings-v3, jina-colbert-v2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from torch import Tensor

from vllm.config.checkpoint.config import HFConfig
from vllm.models.config_reader import ConfigReader
from vllm.models.encoders.bert import ROBERTA_CLASSES, ROBERTA_NAMES
from vllm.models.encoders.encoder import EncoderForPooling, EncoderSpec, encoder
from vllm.models.encoders.heads import LATE, LATE_INTERACTION, PLAIN, SEQUENCE, TOKENS, Head

_ADAPTED = ".parametrizations.weight."
_PARTS = ("original", "0.lora_A", "0.lora_B")


class JinaRobertaModel(EncoderForPooling):
    """Files with adapters of several tasks are read with those of one: config.json's `default_task`, or
    "text-matching"."""

    names = ROBERTA_NAMES
    heads: ClassVar[dict[str, Head]] = {SEQUENCE: ROBERTA_CLASSES, TOKENS: PLAIN, LATE: LATE_INTERACTION}

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        if reader.get("position_embedding_type", default="rotary") != "rotary":
            raise reader.refuse("position_embedding_type", "positions must be rotary")
        reader.ignore("emb_pooler", "load_trained_adapters", "lora_adaptations", "lora_alpha", "lora_dropout_p")
        reader.ignore("lora_main_params_trainable", "lora_rank", "task_instructions", "default_task")
        # transformers' class has another default than the published one, whose model_type is xlm-roberta.
        theta = 20000.0 if reader.config.model_type == "jina_embeddings_v3" else 10000.0
        rotary = reader.rotary(reader.head_dim, theta=theta, theta_names=("rotary_emb_base", "rope_theta"))
        return encoder(
            reader,
            reader.mlp("gelu", bias=True, gated=False),
            eps=reader.number("layer_norm_eps", default=1e-5),
            context=reader.integer("max_position_embeddings", default=8194),
            num_types=reader.integer("type_vocab_size", default=1),
            rotary=(rotary,) * reader.num_layers,
        )

    def __init__(self, config: HFConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self._adapter, self._scale = _adapter_of(config)
        self._waiting: dict[str, dict[str, Tensor]] = {}  # of weights and their adapters, what has come

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """As WeightUpdater.update, of the checkpoint's tensors; a weight is taken once its adapters are there, too."""
        taken: set[str] = super().load_weights(self._converted(weights))
        return taken

    def convert_checkpoint(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors, with the task's adapters added to what they adapt."""
        yield from self._converted(tensors)
        for base in self._waiting:
            raise ValueError(f"weight {base}{_ADAPTED}original and its adapters are not all there")

    def _converted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            base, _, part = name.partition(_ADAPTED)
            if part not in _PARTS:
                yield name, tensor
                continue
            # Only one task's adapters are kept.
            parts = self._waiting.setdefault(base, {})
            parts[part] = tensor if part == "original" else tensor[self._adapter].float()
            if len(parts) == len(_PARTS):
                del self._waiting[base]
                yield f"{base}.weight", self._adapted(base, *(parts[each] for each in _PARTS))

    def _adapted(self, name: str, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Embeddings have A [rows, rank] and B [rank, size], linear layers B [outputs, rank] and A [rank, inputs]."""
        product = a @ b if "embeddings" in name else b @ a
        return (weight.float() + self._scale * product.view(weight.shape)).to(weight.dtype)


def _adapter_of(config: HFConfig) -> tuple[int, float]:
    """Which adapter is read, and what it is multiplied by. ValueError: there is none of that name, or no factor."""
    tasks = config.raw.get("lora_adaptations") or []
    if not tasks:
        return 0, 0.0
    task = config.raw.get("default_task") or "text-matching"
    if task not in tasks:
        raise ValueError(f"{config.where}: default_task must be one of {', '.join(tasks)}, got {task!r}")
    alpha, rank = config.raw.get("lora_alpha"), config.raw.get("lora_rank")
    if not isinstance(alpha, int | float) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{config.where}: lora_alpha and lora_rank must be numbers, got {alpha!r} and {rank!r}")
    return tasks.index(task), alpha / rank
