"""Final hidden states of cached prompts, from which later requests read positions without computing them again."""
