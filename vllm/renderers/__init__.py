"""Chat templates, under upstream's present paths."""

from vllm.renderers.unserved import BaseRenderer, ChatParams, TokenizeParams, renderer_from_config

__all__ = ["BaseRenderer", "ChatParams", "TokenizeParams", "renderer_from_config"]
