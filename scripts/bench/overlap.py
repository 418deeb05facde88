"""How much of an exchange hides behind attention: measured over gloo between two nodes joined by a shaped link.

    .venv/bin/python -m scripts.bench.overlap [--json]

Two nodes of two ranks, on this machine (`two_nodes.py`). One attention layer, forward and backward: B = 1, which all
four ranks share, and B = 3, of which two rows stay inside the nodes and one crosses. Attention is a pause as long as
its work asks for: cores that compute have no time to send, as GPUs have. The exchange is real.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_basp.errors import ConfigurationError
from scripts.bench.two_nodes import RANKS, two_nodes

ROWS = (1, 3)
CHUNKS = (1, 2, 4)
LEAST_HEADS = RANKS * CHUNKS[-1]


def main() -> int:
    arguments = _parser().parse_args()
    try:
        heads, kv_heads = _heads(arguments)
        network = two_nodes(arguments.megabits_per_second)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    # Late: the namespaces are made while this process has one thread.
    import torch

    from megatron_basp.local_ranks import run_ranks
    from scripts.bench.overlap_layer import Case, Layer, measure_all

    layer = Layer(arguments.seq_length, heads, kv_heads, arguments.head_size)
    cases = [Case(rows, arithmetic) for arithmetic in arguments.arithmetic for rows in ROWS]
    on_rank = partial(measure_all, network, layer, cases, CHUNKS, arguments.repetitions)
    with tempfile.TemporaryDirectory() as logs:
        measured = run_ranks(on_rank, RANKS, Path(logs))[0]
    document = {
        "command": shlex.join(["python", "-m", "scripts.bench.overlap", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "linux": platform.release()},
        "compute": "sleep",
        "megabits_per_second": arguments.megabits_per_second,
        "layer": vars(layer),
        "repetitions": arguments.repetitions,
        "rows": [row for case, times in measured.items() for row in _rows(vars(case), times)],
    }
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        _print(document)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.overlap", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--megabits-per-second", type=int, default=25, help="of the link, each way")
    parser.add_argument("--arithmetic", type=float, nargs="+", default=[1.0], help="attention over exchange, in time")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--heads", type=int, default=16, help="a multiple of 16: 4 ranks, 4 chunks")
    parser.add_argument("--kv-heads", type=int, help="a multiple of 16, as many as --heads if left out")
    parser.add_argument("--head-size", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=7, help="of each case, one after the other in turn")
    parser.add_argument("--json", action="store_true")
    return parser


def _heads(arguments: argparse.Namespace) -> tuple[int, int]:
    """H and Hkv, once all that was asked for is sound."""
    for name in ("megabits_per_second", "seq_length", "heads", "head_size", "repetitions"):
        if getattr(arguments, name) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(arguments, name)}")
    if min(arguments.arithmetic) <= 0:
        raise ConfigurationError(f"--arithmetic must be above 0, got {min(arguments.arithmetic):g}")
    if arguments.seq_length % RANKS:
        raise ConfigurationError(f"S % {RANKS} must be 0, got --seq-length {arguments.seq_length}")
    heads, kv_heads = arguments.heads, arguments.kv_heads or arguments.heads
    if heads % kv_heads or kv_heads % LEAST_HEADS:
        raise ConfigurationError(
            f"H % Hkv and Hkv % {LEAST_HEADS} must be 0 for {RANKS} ranks and {CHUNKS[-1]} chunks, got H={heads} and "
            f"Hkv={kv_heads}: use --heads {LEAST_HEADS}"
        )
    return heads, kv_heads


def _rows(case: Mapping[str, Any], measured: Any) -> list[dict[str, Any]]:
    """Medians of milliseconds; one row for each number of chunks."""
    exchange, compute, in_turn = map(statistics.median, (measured.exchange, measured.compute, measured.in_turn))
    rows = []
    for chunks, times in measured.together.items():
        together = statistics.median(times)
        rows.append(
            {
                "sequences": case["rows"],
                "arithmetic": case["arithmetic"],
                "chunks": chunks,
                "exchange_milliseconds": exchange,
                "compute_milliseconds": compute,
                "in_turn_milliseconds": in_turn,
                "together_milliseconds": together,
                "together_range": [min(times), max(times)],
                "least_milliseconds": max(exchange, compute),
                "hidden_share": 1 - (together - compute) / exchange,
            }
        )
    return rows


def _print(document: Mapping[str, Any]) -> None:
    layer = document["layer"]
    table = Table(
        title=f"one layer, forward and backward, over {document['megabits_per_second']} Mbit/s: S = "
        f"{layer['seq_length']}, H = {layer['heads']}, Hkv = {layer['kv_heads']}, d = {layer['head_size']}, fp32; "
        f"attention is a pause; milliseconds, medians of {document['repetitions']}",
        title_justify="left",
    )
    for heading in ("B", "wanted", "chunks", "exchange", "attention", "in turn", "together", "from", "to", "least"):
        table.add_column(heading, justify="right")
    table.add_column("hidden", justify="right")
    for row in document["rows"]:
        times = [row[f"{name}_milliseconds"] for name in ("exchange", "compute", "in_turn", "together")]
        times += [*row["together_range"], row["least_milliseconds"]]
        wanted = f"{row['arithmetic']:g} · exchange"
        cells = [str(row["sequences"]), wanted, str(row["chunks"]), *(f"{x:.0f}" for x in times)]
        table.add_row(*cells, f"{row['hidden_share']:.0%}", end_section=row["chunks"] == CHUNKS[-1])
    console = Console(width=119)
    console.print(table)
    console.print(
        "in turn: waves one after the other, in one part each. least: the longer of exchange and attention.\n"
        "hidden: of the exchange, 1 - (together - attention) / exchange.",
        highlight=False,
    )
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    console.print(f"{document['command']}\n{versions}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
