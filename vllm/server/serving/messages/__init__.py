"""POST /v1/messages: Anthropic's shape of chat."""
