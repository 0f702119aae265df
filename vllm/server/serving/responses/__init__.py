"""POST /v1/responses: OpenAI's newer shape of chat, with conversations that the server keeps."""
