"""What a rank runs: its model, its KV cache, its sampling."""
