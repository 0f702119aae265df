"""GGUF files: their header, configuration, weights and tokenizer."""
