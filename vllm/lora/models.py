"""The former place of LoRAModel."""

from vllm.lora.lora_model import LoRAModel

__all__ = ["LoRAModel"]
