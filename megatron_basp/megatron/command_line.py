"""A command line in Megatron's flags that can be read, and changed flag by flag."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron.arguments import add_arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"Megatron's flags: {message}")


def flag_parser() -> argparse.ArgumentParser:
    """Megatron's parser with the modes' flags, whether the hooks are in or not; its `error` raises."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(_Parser(allow_abbrev=False, add_help=False))
    return parser if "--sequence-parallel-mode" in parser._option_string_actions else add_arguments(parser)


class CommandLine:
    """Flags with their values, in the order in which they were given.

    Raises:
        ConfigurationError: a word is no flag of Megatron's or of the modes', or a value is not of its kind.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._parser = flag_parser()
        self._flags: list[tuple[str, list[str]]] = []
        for word in words:
            flag, equals, value = word.partition("=")
            if flag in self._parser._option_string_actions:
                self._flags.append((flag, [value] if equals else []))
            elif word.startswith("--") or not self._flags:
                raise ConfigurationError(f"Megatron's flags: {word} is none of them")
            else:
                self._flags[-1][1].append(word)
        self.args: Any = self._parse()

    @property
    def words(self) -> list[str]:
        return [word for flag, values in self._flags for word in (flag, *values)]

    @property
    def flags(self) -> list[str]:
        """The flags that are given, without their values."""
        return [flag for flag, _ in self._flags]

    def copy(self) -> CommandLine:
        return CommandLine(self.words)

    def drop(self, flag: str) -> bool:
        """Take a flag out under any of its names; whether it was there."""
        names = self._parser._option_string_actions[flag].option_strings
        before = len(self._flags)
        self._flags = [given for given in self._flags if given[0] not in names]
        if len(self._flags) == before:
            return False
        self.args = self._parse()
        return True

    def set(self, flag: str, *values: object) -> None:
        self.drop(flag)
        self._flags.append((flag, [str(value) for value in values]))
        self.args = self._parse()

    def _parse(self) -> Any:
        return self._parser.parse_args(self.words)
