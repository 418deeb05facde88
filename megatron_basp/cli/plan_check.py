"""`megatron-basp plan --check LEDGER`: the model's bytes held to those that a run counted, its seconds beside them."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_basp.errors import ConfigurationError
from megatron_basp.exchange_check import Check, Sent, check, predicted_seconds
from megatron_basp.ledger_file import LedgerFile, read_ledger
from megatron_basp.library import named_cluster


@dataclass(frozen=True)
class Time:
    """Of the exchanges of one wave and direction, of one rank in a step; measured_seconds: the mean of the steps."""

    rank: int
    wave: int
    direction: str
    modelled_seconds: float | None
    measured_seconds: float | None

    @property
    def ratio(self) -> float | None:
        """Modelled to measured."""
        if self.modelled_seconds is None or not self.measured_seconds:
            return None
        return self.modelled_seconds / self.measured_seconds


def run_check(options: argparse.Namespace) -> int:
    """Exit status 0, or 1 where bytes differ."""
    for name, value in vars(options).items():
        if value and name not in ("check", "cluster", "json", "run", "subcommand"):
            what = "a command line of Megatron's" if name == "flags" else f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"--check takes the run from its ledger: leave {what} out")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ledgers = [read_ledger(path) for path in files(options.check)]
    for warning in warned:
        print(f"megatron-basp: warning: {warning.message}", file=sys.stderr)
    checks = [one for ledger in ledgers for one in check(ledger)]
    times = _times(ledgers, checks, options.cluster)
    different = [one for one in checks if one.differs_in is not None]
    if options.json:
        print(json.dumps(_document(ledgers, checks, times, options.cluster)))
    else:
        _print(ledgers, checks, times, options.cluster)
    return 1 if different else 0


def files(path: Path) -> list[Path]:
    """The file itself, or those of all ranks where it is what `--basp-ledger` was given."""
    if path.exists():
        return [path]
    return sorted(path.parent.glob(f"{path.stem}.rank*{path.suffix}"), key=lambda one: (len(one.name), one)) or [path]


def _times(ledgers: list[LedgerFile], checks: list[Check], cluster: str | None) -> list[Time]:
    known = named_cluster(cluster) if cluster else None
    headers = [ledger.header for ledger in ledgers]
    times = []
    for header in headers:
        modelled = predicted_seconds(header, headers, known) if known else {}
        of_rank = [one for one in checks if one.rank == header.rank]
        for wave, direction in dict.fromkeys((one.kind.wave, one.kind.direction) for one in of_rank):
            seconds = [one.measured_seconds for one in of_rank if one.kind[0] == wave and one.kind[3] == direction]
            measured = [value for value in seconds if value is not None]
            times.append(
                Time(
                    header.rank,
                    wave,
                    direction,
                    modelled.get((wave, direction)),
                    sum(measured) if len(measured) == len(seconds) else None,
                )
            )
    return times


def _document(
    ledgers: list[LedgerFile], checks: list[Check], times: list[Time], cluster: str | None
) -> dict[str, Any]:
    return {
        "complete": all(ledger.is_complete for ledger in ledgers),
        "verdict": "different" if any(one.differs_in is not None for one in checks) else "equal",
        "exchanges": [
            {
                "rank": one.rank,
                **one.kind._asdict(),
                "predicted": one.predicted._asdict(),
                "counted": one.counted._asdict(),
                "steps": one.steps,
                "differs_in_step": one.differs_in,
            }
            for one in checks
        ],
        "cluster": cluster,
        "seconds": [{**vars(one), "modelled_to_measured": one.ratio} for one in times],
    }


def _print(ledgers: list[LedgerFile], checks: list[Check], times: list[Time], cluster: str | None) -> None:
    """Tables of the first rank; what differs, of all."""
    console = Console(width=120, highlight=False)
    first = ledgers[0].header.rank
    if checks:
        console.print(_table_of_bytes([one for one in checks if one.rank == first]))
    else:
        console.print("every sequence stays on one rank: nothing should be exchanged, and nothing was")
    if cluster and checks:
        console.print(_table_of_times([one for one in times if one.rank == first], cluster, ledgers[0]))
    different = [one for one in checks if one.differs_in is not None]
    for one in different:
        console.print(f"rank {one.rank}, step {one.differs_in}, wave {one.kind.wave}: {_difference(one)}")
    console.print(
        f"[bold]bytes: {f'{len(different)} of {len(checks)} differ' if different else 'equal'}[/bold], by wave, "
        f"operation and direction, of {len(ledgers)} of {ledgers[0].header.world_size} ranks in each of "
        f"{len(ledgers[0].of('training'))} training steps"
    )


def _table_of_bytes(checks: list[Check]) -> Table:
    table = Table(
        title=f"exchanges of attention in a training step of rank {checks[0].rank}: predicted, and counted",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for column in ("wave", "K", "operation", "direction"):
        table.add_column(column)
    for column in (
        "collectives\npredicted",
        "\ncounted",
        "bytes inside\npredicted",
        "\ncounted",
        "across nodes\npredicted",
        "\ncounted",
        "",
    ):
        table.add_column(column, justify="right")
    for one in checks:
        predicted, counted = one.predicted, one.counted
        table.add_row(
            *(str(field) for field in one.kind),
            str(predicted.collectives),
            str(counted.collectives),
            str(predicted.same_node_bytes),
            str(counted.same_node_bytes),
            str(predicted.across_nodes_bytes),
            str(counted.across_nodes_bytes),
            "equal" if one.differs_in is None else "DIFFERENT",
        )
    return table


def _difference(one: Check) -> str:
    parts = [
        f"{name.replace('_', ' ')} {counted}, predicted {predicted}"
        for name, predicted, counted in zip(Sent._fields, one.predicted, one.counted, strict=True)
        if predicted != counted
    ]
    return f"{one.kind.operation} {one.kind.direction} at K={one.kind.group_size} has {'; '.join(parts)}"


def _table_of_times(times: list[Time], cluster: str, ledger: LedgerFile) -> Table:
    table = Table(
        title=f"a step of rank {times[0].rank}: modelled on {cluster}; measured over "
        f"{ledger.header.backend} by the {ledger.header.clock}'s clock; no verdict",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    table.add_column("wave")
    table.add_column("direction")
    for column in ("modelled ms", "measured ms", "modelled / measured"):
        table.add_column(column, justify="right")
    for one in times:
        table.add_row(
            str(one.wave),
            one.direction,
            "-" if one.modelled_seconds is None else f"{one.modelled_seconds * 1e3:.3f}",
            "not measured" if one.measured_seconds is None else f"{one.measured_seconds * 1e3:.3f}",
            "-" if one.ratio is None else f"{one.ratio:.2g}",
        )
    return table
