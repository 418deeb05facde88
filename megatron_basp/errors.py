"""The one error that is the user's to mend."""


class ConfigurationError(ValueError):
    """Bad input: one line with the formula, the values and the remedy. Commands print it alone and exit with 2."""
