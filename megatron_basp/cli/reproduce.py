"""`megatron-basp reproduce`: the paper's tables, and what it left open, published, modelled and measured."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_basp.atomic_files import read_json, write_json
from megatron_basp.errors import ConfigurationError
from megatron_basp.reproduction.cases import Table, load_tables
from megatron_basp.reproduction.loss import LossCurves, read_losses
from megatron_basp.reproduction.measured import is_document, points
from megatron_basp.reproduction.rows import Row, rows

RESULTS = Path(__file__).parents[2] / "docs" / "results"
EMULATED, GPUS, LOSSES = "emulated.json", "gpus", "loss-800.csv"

DESCRIPTION = """
The tables of the BASP paper (arXiv 2609.03151) row by row: speed-ups of six models, share and time of the all-to-all,
the sweeps over B and S, memory, losses. Then what it left open: B that does not divide N, fewer key-value heads than
K, 16 to 64 ranks, long contexts, and where BASP does not pay.

Each figure stands in the column of what it is, and no column mixes them:
  paper      as published, read second-hand; † marks what contradicts other figures of the paper
  modelled   the cost model on the row's cluster: of the paper's rows with DeepSpeed's exchange and the wait that was
             fitted to it (docs/cost-model.md), of the others with this plugin's exchange
  emulated   measured: a small Llama on two network namespaces of 4 ranks (megatron-basp bench train), over a link on
             which Ulysses spends the row's share of its step in the exchange
  GPUs       measured: the row's own model on real hardware

Modelled figures are computed now, in seconds. Measured ones are those of docs/results, with the date and command of
each run; --measure takes them anew, on namespaces and on this machine's GPUs where there are two or more, which takes
an hour or so. Ctrl-C and the same command again go on at the first row that is not finished.
"""
EPILOG = """
examples:
  megatron-basp reproduce                             all tables, into runs/reproduce
  megatron-basp reproduce --collect runs/sweep        with runs of bench train on a cluster in the GPUs' column
  megatron-basp reproduce --measure                   take the measured columns anew
  cp runs/reproduce/emulated.json docs/results/ && make results
                                                      keep them: the file and docs/results.md are to be committed

Written: OUT/tables.md, tables.csv, tables.png, result.json; with --measure also emulated.json and gpus/.

exit status: 0; 2 bad input (one line on stderr); 1 a run of --measure failed.

document of --json, and of result.json:
  rows     table (speedup, exchange_share, exchange_time, batch_sweep, sequence_sweep, memory, beyond), model,
           seq_length, micro_batch_size, ranks (N), group_size (the largest K of its waves), paper (a number,
           [low, high] or null), modelled, measured (emulated cluster) and measured_on_gpus (numbers, or null: not
           measured), note;
           quantity (what the figures are: speedup, exchange_share, exchange_ratio, step_time_cut, memory_ratio,
           over_plain; shares and cuts as fractions of 1), of (the mode that a share is of), cluster, waves [{rows
           (their number), group_size}], paper_contradicts_itself
  sources  the runs that measured figures are from
  loss     of docs/results/loss-800.csv: steps, largest_difference, command, made_with; or null
"""


def add_parser(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "reproduce",
        help="the paper's tables: published, modelled and measured",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--measure", action="store_true", help="run the measured columns again, on this machine")
    parser.add_argument(
        "--compute",
        choices=("real", "sleep"),
        help="of --measure on namespaces, as of bench train: with sleep attention is a pause, for machines with few "
        "cores, and the note says so (default real)",
    )
    parser.add_argument(
        "--collect",
        type=Path,
        metavar="DIR",
        help="fill the GPUs' column from the files that bench train wrote below DIR (default: docs/results/gpus)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/reproduce"), metavar="DIR", help="results (default runs/reproduce)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else there")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    tables = load_tables()
    if options.compute and not options.measure:
        raise ConfigurationError(f"--compute {options.compute} is for --measure: give both, or neither")
    if options.collect is not None and not options.collect.is_dir():
        raise ConfigurationError(f"--collect {options.collect}: there is no such folder")
    folders = [options.collect] if options.collect else [RESULTS / GPUS]
    emulated = RESULTS / EMULATED
    if options.measure:
        from megatron_basp.cli.reproduce_runs import measure_on_gpus, measure_on_namespaces

        options.out.mkdir(parents=True, exist_ok=True)
        emulated = options.out / EMULATED
        measure_on_namespaces(tables, emulated, options.compute or "real")
        if measure_on_gpus(tables, options.out / GPUS) and not options.collect:
            folders = [options.out / GPUS]
    found = rows(tables, points(_runs(emulated)), points(_collected(folders, options.collect is not None)))
    losses = committed_losses()
    document = {"rows": [row.as_document() for row in found], **_sources(found, losses)}
    _write(found, tables, losses, document, options.out)
    if options.json:
        print(json.dumps(document))
    else:
        from megatron_basp.cli.reproduce_table import print_tables

        print_tables(found, tables, losses, options.out)
    return 0


def committed_rows() -> list[Row]:
    """All rows, with the measured figures of docs/results."""
    return rows(load_tables(), points(_runs(RESULTS / EMULATED)), points(_collected([RESULTS / GPUS], False)))


def committed_losses() -> LossCurves | None:
    file = RESULTS / LOSSES
    return read_losses(file) if file.exists() else None


def _runs(file: Path) -> list[Mapping[str, Any]]:
    """Documents of bench train in a file of --measure; none where there is no file."""
    content = read_json(file)
    if content is None:
        return []
    documents = content.get("runs") if isinstance(content, dict) else None
    if not isinstance(documents, list) or not all(map(is_document, documents)):
        raise ConfigurationError(f"{file} is no file that `megatron-basp reproduce --measure` writes")
    return documents


def _collected(folders: list[Path], is_asked_for: bool) -> list[Mapping[str, Any]]:
    """Runs on GPUs below the folders; ledgers and other files are passed over."""
    documents = []
    for file in sorted(file for folder in folders for file in folder.rglob("*.json")):
        try:
            content = read_json(file)
        except ValueError as error:
            raise ConfigurationError(f"{file} is not JSON: {error}") from None
        if is_document(content) and content["backend"] == "nccl":
            documents.append(content)
    if is_asked_for and not documents:
        raise ConfigurationError(
            f"--collect {folders[0]}: no file below it is a run of `megatron-basp bench train` on GPUs"
        )
    return documents


def _sources(found: list[Row], losses: LossCurves | None) -> dict[str, Any]:
    from megatron_basp.reproduction.report import sources

    return {
        "sources": sources(found),
        "loss": losses
        and {
            "steps": losses.steps,
            "largest_difference": losses.largest_difference,
            "command": losses.command,
            "made_with": losses.made_with,
        },
    }


def _write(
    found: list[Row], tables: tuple[Table, ...], losses: LossCurves | None, document: dict[str, Any], out: Path
) -> None:
    from megatron_basp.reproduction.picture import draw
    from megatron_basp.reproduction.report import LEGEND, loss_line, markdown, sources, write_csv

    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "result.json", document)
    write_csv(found, out / "tables.csv")
    draw(found, losses, out / "tables.png")
    parts = ["# The paper's tables", "", f"`megatron-basp reproduce`. {LEGEND}", "", "![](tables.png)", ""]
    parts += [markdown(found, tables), "", "## Losses", "", loss_line(losses), "", "## Measured by", ""]
    (out / "tables.md").write_text("\n".join([*parts, *(sources(found) or ["Nothing was measured."])]) + "\n")
    print(f"written: tables.md, tables.csv, tables.png and result.json in {out}", file=sys.stderr)
