"""Answers of a given form: `grammar` says the form as a grammar, `matcher` which tokens it allows next."""
