"""Paths and names that only upstream's callers know. Nothing else here imports them.

`names.toml` says what each stands for, `finder.py` makes modules of its rows when they are imported, and the other
files hold the code of names that have some.
"""
