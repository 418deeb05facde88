"""A run's YAML layers as words of a command line, held to Megatron's own parser."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

from megatron_basp.errors import ConfigurationError
from megatron_basp.run_config import Setting


def config_words(settings: Sequence[Setting], parser: argparse.ArgumentParser, given: Sequence[str]) -> list[str]:
    """The flags that hold.

    Args:
        settings: of `RunConfig`; a later one wins, also under another name of the same argument.
        parser: Megatron's, whose `error` raises `ConfigurationError`.
        given: the words of the command line, which win over all settings.

    Raises:
        ConfigurationError: names the file and the key that is no flag, with the nearest one, or whose value is wrong.
    """
    flags = parser._option_string_actions
    words: dict[str, list[str]] = {}
    for setting in settings:
        action = flags.get("--" + setting.key)
        if action is None:
            raise ConfigurationError(f"{setting.file}: there is no flag --{setting.key}{_nearest(setting.key, flags)}")
        # Last in order as in force: `--swiglu` of a later layer stands where that layer's flags stand.
        words.pop(action.dest, None)
        if found := _words(setting, action, parser):
            words[action.dest] = found
    for word in given:
        if action := flags.get(word.partition("=")[0]):
            words.pop(action.dest, None)
    return [word for found in words.values() for word in found]


def _words(setting: Setting, action: argparse.Action, parser: argparse.ArgumentParser) -> list[str]:
    value, where = setting.value, f"{setting.file}: {setting.key}"
    if value is None:
        return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigurationError(f"{where} is a switch, true or false, got {value!r}")
        return [f"--{setting.key}"] if value else []
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, bool) for one in values):
        raise ConfigurationError(f"{where} takes a value, got {str(value).lower()}; null leaves it out")
    words = [f"--{setting.key}", *map(str, values)]
    try:
        parser.parse_args(words)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    return words


def _nearest(key: str, flags: dict[str, Any]) -> str:
    near = difflib.get_close_matches("--" + key, flags, n=1)
    return f": did you mean {near[0][2:]}?" if near else ", nor one with a name like it: see SCRIPT --help"
