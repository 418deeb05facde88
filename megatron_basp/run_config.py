"""A run as YAML files whose keys are Megatron's flags, in layers of which a later one wins. Pure.

    # a run at 128K tokens
    include: [../models/llama3.1-8b.yaml, clusters/h100-8.yaml]   # layers below this one, the first one lowest
    nodes: 2                                                      # what scripts/slurm/submit.sh asks for
    seq-length: 131072                                            # --seq-length 131072
    recompute-modules: [core_attn, mlp]                           # --recompute-modules core_attn mlp
    bf16: true                                                    # --bf16
    swiglu: false                                                 # not --swiglu, whatever a layer below says

`include` and `nodes` are the only keys that are not Megatron's. Paths in `include` are relative to the file.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_basp.errors import ConfigurationError

INCLUDE, NODES = "include", "nodes"


@dataclass(frozen=True)
class Setting:
    """A flag without its dashes, its value as YAML has it (null: left out), and the file that says so."""

    key: str
    value: Any
    file: Path


@dataclass(frozen=True)
class RunConfig:
    """settings: in order; the last of a key holds. nodes: how many the run was made for, or None."""

    settings: tuple[Setting, ...]
    nodes: int | None


def load_config(files: Sequence[Path]) -> RunConfig:
    """Read layers, the lowest first.

    Raises:
        ConfigurationError: a file is missing, is no mapping, includes itself, or has a key twice or a value that no
            flag has.
    """
    settings = [setting for file in files for setting in _layer(file, ())]
    nodes = None
    for setting in settings:
        if setting.key == NODES:
            nodes = setting.value
            if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
                raise ConfigurationError(f"{setting.file}: {NODES} must be a whole number, 1 or more, got {nodes!r}")
    return RunConfig(tuple(one for one in settings if one.key != NODES), nodes)


def _layer(file: Path, above: tuple[Path, ...]) -> list[Setting]:
    """What a file includes, then what it says itself."""
    if file.resolve() in above:
        raise ConfigurationError(f"{file} includes itself: {' > '.join(path.name for path in (*above, file))}")
    content = _read(file)
    included = content.pop(INCLUDE, None) or []
    if isinstance(included, str):
        included = [included]
    if not isinstance(included, list) or not all(isinstance(name, str) for name in included):
        raise ConfigurationError(f"{file}: {INCLUDE} must be a list of files, got {included!r}")
    settings = [setting for name in included for setting in _layer(file.parent / name, (*above, file.resolve()))]
    return settings + [Setting(key, _checked(key, value, file), file) for key, value in content.items()]


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text()
        # `safe_load` keeps the last of two equal keys without a word.
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content: dict[str, Any] = yaml.safe_load(text)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} is no YAML: {' '.join(str(error).split())}") from None
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigurationError(f"{file} must hold keys and values, got a {type(content).__name__}")
    keys = [key.value for key, _ in node.value]
    for key in content:
        if not isinstance(key, str):
            raise ConfigurationError(f"{file}: a key must be a flag of Megatron's, got {key!r}")
        if keys.count(key) > 1:
            raise ConfigurationError(f"{file}: {key} stands there {keys.count(key)} times: leave one")
    return content


def _checked(key: str, value: Any, file: Path) -> Any:
    is_list = isinstance(value, list)
    for one in value if is_list else [value]:
        if isinstance(one, (dict, list, datetime.date, bytes, set)) or (is_list and one is None):
            raise ConfigurationError(
                f"{file}: {key} must be a word, a number, true, false, null or a list of those, got {one!r}"
            )
    return value
