"""Names of `vllm.renderers` and `vllm.entrypoints.chat_utils`."""
