"""The demo's table and picture."""

from __future__ import annotations

import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_basp.reproduction.loss import LossCurves
from megatron_basp.version import __version__

if TYPE_CHECKING:
    from megatron_basp.cli.demo_result import DemoResult

COMMAND = ("iterations", "micro_batch_size", "ranks")


def print_table(result: DemoResult, out: Path) -> None:
    """Final losses, differences, times and bytes of the runs that finished."""
    table = Table(title="the same training, three ways", title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("", "final loss", "difference", "held-out loss", "step", "K", "sent"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for mode, run in result.modes.items():
        table.add_row(
            mode,
            f"{run.losses[-1]:.4f}",
            "" if mode == "reference" else f"{result.difference(mode):.1e}",
            f"{run.held_out_loss_before:.3f} → {run.held_out_loss_after:.3f}",
            f"{run.step_seconds * 1e3:.0f} ms",
            ", ".join(map(str, run.group_sizes)),
            f"{run.bytes_sent_per_rank_per_step / 2**20:.2f} MiB",
        )
    console = Console()
    console.print(table)
    console.print(
        "difference: the largest of a step's loss from the reference's. K: ranks that share a sequence, for each "
        "wave. sent: by a rank in a step, in the exchanges of attention. Times are of processes that share this "
        f"machine's cores, where sending is a copy in memory: they say nothing about a cluster. Results: "
        f"{out / 'result.json'}, {out / 'losses.png'}; logs: {out / 'logs'}",
        highlight=False,
    )


def curves(result: DemoResult) -> LossCurves:
    """The losses of the runs that finished, with the command that makes them again from the same text."""
    settings = result.settings
    flags = " ".join(f"--{name.replace('_', '-')} {settings[name]}" for name in COMMAND)
    versions = {
        "megatron_basp": __version__,
        "megatron-core": version("megatron-core"),
        "torch": version("torch"),
        "Python": platform.python_version(),
    }
    made_with = [f"{name} {found}" for name, found in versions.items()]
    return LossCurves(
        f"megatron-basp demo {flags}",
        ", ".join([date.today().isoformat(), *made_with, settings["text"]]),
        {mode: run.losses for mode, run in result.modes.items()},
    )


def draw_losses(result: DemoResult, file: Path) -> None:
    """The losses over each other, and below how far they are from the reference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained"
    )
    styles = {
        "reference": {"color": "0.6", "linewidth": 5},
        "ulysses": {"color": "tab:blue", "linewidth": 2},
        "basp": {"color": "tab:orange", "linewidth": 2, "linestyle": (0, (4, 4))},
    }
    reference = result.modes["reference"].losses
    for mode, run in result.modes.items():
        steps = range(1, len(run.losses) + 1)
        label = f"{mode}, K = {', '.join(map(str, run.group_sizes))}" if mode != "reference" else "1 rank"
        above.plot(steps, run.losses, label=label, **styles[mode])
        if mode != "reference":
            differences = [abs(a - b) for a, b in zip(run.losses, reference, strict=True)]
            below.plot(steps, differences, **styles[mode])
    above.set_ylabel("training loss")
    above.legend()
    below.set_yscale("symlog", linthresh=1e-7)
    below.set_ylabel("|difference| from 1 rank")
    below.set_xlabel("step")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
