"""`vllm score --prompt-logprobs` and `--prompt-ids-field`: a teacher reads the rollouts of a file."""
