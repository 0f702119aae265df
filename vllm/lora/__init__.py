"""LoRA adapters: requests for them can be made, and are refused when they are used."""
