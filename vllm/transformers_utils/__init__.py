"""Configuration files of Hugging Face repositories, read without transformers."""
