"""`vllm decide`: typed questions about the texts of a file."""
