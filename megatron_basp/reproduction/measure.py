"""Run `megatron-basp bench train` on the emulated cluster for all rows, and go on where an earlier run was stopped.

The link's rate at which Ulysses spends a wanted share of its step in the exchange is not known beforehand. The first
run sweeps over some rates; the rates of the next follow from the shares that were measured, for all rows of one batch
together, since starting a run takes longer than a few steps of it. One rate stands for all rows that want its share.
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
SWEEP, LEAST_MBIT, MOST_MBIT = (30, 100), 5, 20000
# Of two rates that differ by less, the second run would only repeat the first.
SAME_RATE = 0.1

type Bench = Callable[[int, bool, Sequence[int]], dict[str, Any]]


@dataclass(frozen=True)
class Wanted:
    """What a row asks for: its batch, Ulysses' share of the exchange, and whether there are fewer KV heads than K."""

    case: Case
    copies_kv_heads: bool
    share: float

    @property
    def batch(self) -> tuple[int, bool]:
        """What one run measures together."""
        return self.case.micro_batch_size, self.copies_kv_heads


def wanted_runs(modelled: Mapping[Case, ModelledCase]) -> list[Wanted]:
    """One for each row that the emulated cluster can stand for, without repetitions."""
    found: dict[tuple[int, bool, float], Wanted] = {}
    for case, share in target_shares(modelled).items():
        if not why_not_emulated(case):
            wanted = Wanted(case, modelled[case].copies_kv_heads, share)
            found.setdefault((case.micro_batch_size, wanted.copies_kv_heads, round(share, 3)), wanted)
    return list(found.values())


def next_mbits(wanted: Sequence[Wanted], found: Sequence[Point]) -> list[int]:
    """The rates to run at next for one batch; none where nothing nearer is to be had.

    The exchange takes a time in inverse proportion to the rate. Another batch's run says where to begin: with its
    size the exchange grows, and what else is in a step does, but for a pause.
    """
    if not any(point.ulysses_share for point in found):
        return list(SWEEP)
    rates: list[int] = []
    for one in wanted:
        alike = [point for point in found if stands_for(point, one.case, one.copies_kv_heads)]
        distance, nearest = nearest_share(one.case, one.copies_kv_heads, one.share, alike)
        if distance <= AIM:
            continue
        known = [point.link_mbit for point in alike if point.link_mbit]
        rate = round(min(max(_rate(one, nearest or _nearest_batch(one, found)), LEAST_MBIT), MOST_MBIT))
        if all(abs(rate / other - 1) >= SAME_RATE for other in [*known, *rates]):
            rates.append(rate)
    return rates


def _rate(wanted: Wanted, point: Point) -> float:
    """Of the link for the wanted share, by what was measured at another."""
    assert point.ulysses_share and point.link_mbit
    grows = wanted.case.micro_batch_size / point.micro_batch_size if point.document["compute"] == "sleep" else 1
    return point.link_mbit * grows * _odds(point.ulysses_share) / _odds(wanted.share)


def _nearest_batch(wanted: Wanted, found: Sequence[Point]) -> Point:
    def distance(point: Point) -> tuple[float, float]:
        size = abs(point.micro_batch_size - wanted.case.micro_batch_size)
        return size, abs((point.ulysses_share or 0) - wanted.share)

    return min((point for point in found if point.ulysses_share), key=distance)


def _odds(share: float) -> float:
    return share / (1 - share)


def measure(
    wanted: Iterable[Wanted], file: Path, settings: dict[str, Any], bench: Bench, say: Callable[[str], None]
) -> None:
    """Run what is missing in `file`, and write it after each run.

    Args:
        wanted: what rows ask for, those of one batch together.
        file: what an interrupted call wrote is gone on with, if its settings were the same; a finished one's is not.
        settings: what all runs have in common; kept in the file.
        bench: runs at (B, fewer key-value heads than K, Mbit/s) and returns the document of `bench train`.
        say: is told each run before it begins.

    Raises:
        ConfigurationError: the link is only modelled on this machine.
    """
    batches: dict[tuple[int, bool], list[Wanted]] = {}
    for one in wanted:
        batches.setdefault(one.batch, []).append(one)
    earlier = read_json(file)
    goes_on = earlier is not None and not earlier["is_finished"] and earlier["settings"] == settings
    runs = list(earlier["runs"]) if goes_on else []
    if goes_on:
        say(f"going on with {len(runs)} runs of {file}")
    start, new = time.monotonic(), 0
    for number, ((micro_batch_size, copies_kv_heads), of_batch) in enumerate(batches.items()):
        while rates := next_mbits(of_batch, points(runs)):
            name = f"B={micro_batch_size}{', Hkv < K' if copies_kv_heads else ''}"
            left = ""
            if new:
                left = f", about {_minutes((time.monotonic() - start) / new * (len(batches) - number))} left"
            say(f"[{number + 1}/{len(batches)}] {name}: {', '.join(map(str, rates))} Mbit/s{left}")
            document = bench(micro_batch_size, copies_kv_heads, rates)
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
