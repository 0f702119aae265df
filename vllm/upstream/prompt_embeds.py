"""Reading embeddings from a request as upstream's renderers do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.inputs.embeds import load_embeds
from vllm.v1.engine.input_processor import check_embeds_enabled

if TYPE_CHECKING:
    import torch

    from vllm.config import ModelConfig


def safe_load_prompt_embeds(model_config: ModelConfig, embed: str | bytes) -> torch.Tensor:
    """The tensor [T, H] that torch.save has written, in base64.

    Raises:
        VLLMValidationError: it is anything else, too large for the model, or embeddings are not enabled.
    """
    check_embeds_enabled(model_config)
    text = embed.decode("latin-1") if isinstance(embed, bytes) else embed
    tensor = load_embeds(text, model_config.input_embedding_size, model_config.max_model_len)
    return tensor[0] if tensor.dim() == 3 else tensor
