"""`vllm embed` and `vllm rerank`."""
