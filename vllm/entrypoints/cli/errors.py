"""What a subcommand raises when the user can mend it."""

from __future__ import annotations


class CliError(Exception):
    """A bad argument or bad data: its message is the one line that the user sees, and the exit code is 2."""
