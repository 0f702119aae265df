"""Weights from a trainer in another process: what trainers import. Engines do not receive them yet."""

from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient, RayVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

__all__ = [
    "HTTPVLLMWeightSyncClient",
    "ModuleSource",
    "ParamMeta",
    "RayVLLMWeightSyncClient",
    "VLLMWeightSyncClient",
    "WeightSource",
    "WeightTransferEngineFactory",
    "WeightTransferTrainerFactory",
]
