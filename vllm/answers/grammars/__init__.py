"""Grammars of answers that hold calls, in Lark's dialect."""
