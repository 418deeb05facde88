"""Run `megatron-basp bench train` on the emulated cluster for all rows, and go on where an earlier run was stopped.

The link's rate at which Ulysses spends a wanted share of its step in the exchange is not known beforehand: at each
rate that was run its share is measured, and the next rate follows from the nearest. One run stands for all rows that
want about its share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_basp.atomic_files import read_json, write_json
from megatron_basp.errors import ConfigurationError
from megatron_basp.reproduction.cases import Case
from megatron_basp.reproduction.measured import Point, nearest_share, points, stands_for, why_not_emulated
from megatron_basp.reproduction.modelled import ModelledCase, target_shares

# Nearer than that, another run would not be worth its minutes; a run counts up to `SHARE_TOLERANCE`.
AIM = 0.02
FIRST_MBIT, LEAST_MBIT, MOST_MBIT = 500, 10, 20000
# Of two rates that differ by less, the second run would only repeat the first.
SAME_RATE = 0.1

type Bench = Callable[[int, bool, int], dict[str, Any]]


@dataclass(frozen=True)
class Wanted:
    """A run that rows ask for: with this batch, Ulysses' share of the exchange, and fewer key-value heads than K."""

    case: Case
    copies_kv_heads: bool
    share: float

    @property
    def name(self) -> str:
        copied = ", Hkv < K" if self.copies_kv_heads else ""
        return f"B={self.case.micro_batch_size}{copied}, share {100 * self.share:.1f} %"


def wanted_runs(modelled: Mapping[Case, ModelledCase]) -> list[Wanted]:
    """One for each row that the emulated cluster can stand for, without repetitions."""
    found: dict[tuple[int, bool, float], Wanted] = {}
    for case, share in target_shares(modelled).items():
        if not why_not_emulated(case):
            wanted = Wanted(case, modelled[case].copies_kv_heads, share)
            found.setdefault((case.micro_batch_size, wanted.copies_kv_heads, round(share, 3)), wanted)
    return list(found.values())


def next_mbit(wanted: Wanted, found: Sequence[Point]) -> int | None:
    """The rate to run at next, None where nothing nearer is to be had.

    The exchange takes a time in inverse proportion to the rate, and the rest of the step does not depend on it.
    """
    alike = [point for point in found if stands_for(point, wanted.case, wanted.copies_kv_heads)]
    known = [point.link_mbit for point in alike if point.link_mbit is not None]
    distance, nearest = nearest_share(wanted.case, wanted.copies_kv_heads, wanted.share, alike)
    if nearest is None:
        return None if known else FIRST_MBIT
    if distance <= AIM or nearest.link_mbit is None or not nearest.ulysses_share:
        return None
    odds = _odds(nearest.ulysses_share) / _odds(wanted.share)
    rate = round(min(max(nearest.link_mbit * odds, LEAST_MBIT), MOST_MBIT))
    return None if any(abs(rate / other - 1) < SAME_RATE for other in known) else rate


def _odds(share: float) -> float:
    return share / (1 - share)


def measure(
    wanted: Iterable[Wanted], file: Path, settings: dict[str, Any], bench: Bench, say: Callable[[str], None]
) -> None:
    """Run what is missing in `file`, and write it after each run.

    Args:
        wanted: in the order in which to run.
        file: what an interrupted call wrote is gone on with, if its settings were the same; a finished one's is not.
        settings: what all runs have in common; kept in the file.
        bench: runs at (B, fewer key-value heads than K, Mbit/s) and returns the document of `bench train`.
        say: is told each run before it begins.

    Raises:
        ConfigurationError: the link is only modelled on this machine.
    """
    wanted = list(wanted)
    earlier = read_json(file)
    goes_on = earlier is not None and not earlier["is_finished"] and earlier["settings"] == settings
    runs = list(earlier["runs"]) if goes_on else []
    if goes_on:
        say(f"going on with {len(runs)} runs of {file}")
    start, new = time.monotonic(), 0
    for number, one in enumerate(wanted):
        while (mbit := next_mbit(one, points(runs))) is not None:
            left = ""
            if new:
                left = f", about {_minutes((time.monotonic() - start) / new * (len(wanted) - number))} left"
            say(f"[{number + 1}/{len(wanted)}] {one.name}: {mbit:g} Mbit/s{left}")
            document = bench(one.case.micro_batch_size, one.copies_kv_heads, mbit)
            if not points([document]):
                raise ConfigurationError(
                    "--measure wants Ulysses and BASP over a link that packets cross, and this run has a modelled one "
                    "or not both: use a machine that allows network namespaces (megatron-basp bench train --help)"
                )
            runs.append(document)
            new += 1
            write_json(file, {"is_finished": False, "settings": settings, "runs": runs})
    write_json(file, {"is_finished": True, "settings": settings, "runs": runs})


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
