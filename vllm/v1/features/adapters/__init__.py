"""LoRA adapters: their files, what they change in which layers, and which of them a step's rows go through."""
