"""Reading what Hugging Face repositories ship beside their weights, without importing transformers."""
