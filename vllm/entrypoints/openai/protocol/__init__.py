"""Bodies of requests and answers."""

from vllm.entrypoints.openai.protocol.generation import *  # noqa: F403
