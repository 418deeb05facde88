"""Names for a profiler: what is going on, in ranges that nest. Pure: who profiles says how a range begins and ends."""

from __future__ import annotations

from collections.abc import Callable


def _nothing(name: str) -> None:
    pass


class Ranges:
    """Makes ranges of functions of ours.

    Args:
        push: begins a range of this name inside of the one that is open.
        pop: ends it, and is given its name again. Megatron's own pair (`core/utils.py`) returns at once unless
            `--nvtx-ranges` has switched it on, for the steps that are profiled.
    """

    def __init__(self, push: Callable[[str], None] = _nothing, pop: Callable[[str], None] = _nothing) -> None:
        self.push, self.pop = push, pop

    def of(self, function: str, what: str) -> Range:
        """To be entered: `megatron_basp.FUNCTION WHAT`. A microsecond where nobody profiles."""
        return Range(self, f"megatron_basp.{function} {what}")


NO_RANGES = Ranges()


class Range:
    __slots__ = ("_name", "_ranges")

    def __init__(self, ranges: Ranges, name: str) -> None:
        self._ranges, self._name = ranges, name

    def __enter__(self) -> None:
        self._ranges.push(self._name)

    def __exit__(self, *exception: object) -> None:
        self._ranges.pop(self._name)
