"""The error of a command."""

from __future__ import annotations


class CliError(Exception):
    """Ends the command with exit code 1. The message says in a sentence what is wrong, and how to mend it."""
