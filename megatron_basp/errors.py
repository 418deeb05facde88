"""Errors that commands report in one place instead of a traceback of their own."""


class ConfigurationError(ValueError):
    """Bad input: one line with the formula, the values and the remedy. Commands print it alone and exit with 2."""


class RankFailed(RuntimeError):
    """A forked rank raised or died: its traceback, or exit code, and where its log is. Commands exit with 1."""
