"""Encoders with a projection: embeddings of tokens, which are compared one by one (arXiv:2004.12832)."""

from __future__ import annotations

from dataclasses import replace

from vllm.config.checkpoint.config import HFConfig
from vllm.layers.linear import ReplicatedLinear
from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.encoders.bert import BERT_RENAMES, IGNORED, BertModel, roberta_names
from vllm.models.encoders.encoder import EncoderForPooling, EncoderSpec
from vllm.models.encoders.jina_roberta import JinaRobertaModel

# The width of embeddings.
_WIDTHS = ("colbert_dim", "dim", "projection_dim")
_PROJECTION = (r"^linear\.", "model.projection.")


class _Projected(EncoderForPooling):
    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        reader.ignore(*_WIDTHS)
        return super().describe(reader)

    @classmethod
    def resolve_config(cls, config: HFConfig) -> HFConfig:
        return replace(super().resolve_config(config), hidden_size=cls._width(config))

    @staticmethod
    def _width(config: HFConfig) -> int:
        return next((config.raw[name] for name in _WIDTHS if config.raw.get(name)), 128)

    def __init__(self, config: HFConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.model.projection = ReplicatedLinear(self.spec.hidden_size, self._width(config), False, "projection")


class ColBertModel(_Projected, BertModel):
    names = CheckpointNames((*BERT_RENAMES, _PROJECTION), ignored=IGNORED)


class ColBertJinaRobertaModel(_Projected, JinaRobertaModel):
    names = roberta_names(_PROJECTION)
