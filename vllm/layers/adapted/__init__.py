"""Layers whose rows may go through adapters (LoRA), a different one each."""
