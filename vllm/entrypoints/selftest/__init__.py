"""What `vllm selftest` runs on the user's own model."""
