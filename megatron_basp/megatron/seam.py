"""How Megatron is touched: one function that replaces another, after it made sure that it is the one it knows."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.versions import REMEDY, MegatronMismatch, megatron_minor, megatron_version

Function = Callable[..., Any]
Make = Callable[[Function], Function]


class Hook(NamedTuple):
    """One function or method of Megatron that is replaced; `replace` explains all but make.

    make: gets what the hooks share and the original, and returns what takes its place.
    """

    target: str
    parameters: tuple[str, ...]
    make: Callable[[Runtime, Function], Function]
    also_in: tuple[str, ...] = ()
    versions: tuple[str, ...] | None = None


def replace(
    target: str,
    parameters: Sequence[str],
    make: Make,
    also_in: Sequence[str] = (),
    versions: Sequence[str] | None = None,
) -> None:
    """Replace a function or method of Megatron.

    Args:
        target: `module:name` or `module:Class.name`.
        parameters: names that the target must accept; a hook relies on these.
        make: gets the original, returns what takes its place.
        also_in: modules that imported the function by name, and hold a reference of their own.
        versions: the minor versions of Megatron that have this target; with others nothing is done. None: all.

    Raises:
        MegatronMismatch: the target is not there, or does not take the parameters, or a module in `also_in` holds
            something else under its name.
    """
    if versions is not None and megatron_minor() not in versions:
        return
    holders, name, original = find(target, parameters, also_in)
    replacement = make(original)
    for holder in holders:
        setattr(holder, name, replacement)


def find(target: str, parameters: Sequence[str], also_in: Sequence[str] = ()) -> tuple[list[Any], str, Function]:
    """Everything that holds the target, its name there, and the target itself; raises as `replace` does."""
    module_name, _, path = target.partition(":")
    owner_path, _, name = path.rpartition(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for part in filter(None, owner_path.split(".")):
            owner = getattr(owner, part)
        original = getattr(owner, name)
        others = [importlib.import_module(other) for other in also_in]
    except (ImportError, AttributeError) as error:
        raise _mismatch(target, str(error)) from error
    accepted = inspect.signature(original).parameters
    missing = [parameter for parameter in parameters if parameter not in accepted]
    if missing:
        raise _mismatch(target, f"it takes no parameter {', '.join(missing)}")
    for other in others:
        if getattr(other, name, None) is not original:
            raise _mismatch(target, f"{other.__name__} does not hold the same {name}")
    return [owner, *others], name, original


def _mismatch(target: str, what: str) -> MegatronMismatch:
    return MegatronMismatch(
        f"megatron_basp hooks {target}, and in Megatron-Core {megatron_version()} {what}: {REMEDY}"
    )
