"""How answers are written: calls as JSON, in tags or as Python; and what parts them: channels, blocks, recipients."""
