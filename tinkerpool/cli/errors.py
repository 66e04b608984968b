"""What a command says when it cannot do what was asked."""

from __future__ import annotations


class CliError(Exception):
    """Ends the command with exit code 1; the text says in a sentence what is wrong, and what to do."""
