"""Answers of a model, read and bound. `prompts` write what one follows; its text becomes `events` as it comes, read by
parsers over `reader`, and events become a message (`deltas`). `tool_parsers` and `reasoning` have a file a format, made
of `syntax`; `answer` runs a pair of them over one choice, and `grammars` bind what it may say."""
