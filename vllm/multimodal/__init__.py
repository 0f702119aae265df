"""Images, videos and sound: only text models are served, so what would prepare them says so when it is used."""

from vllm.multimodal.registry import MULTIMODAL_REGISTRY, MultiModalRegistry

__all__ = ["MULTIMODAL_REGISTRY", "MultiModalRegistry"]
