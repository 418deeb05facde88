"""The document of a benchmark that is under way: begun by what is compared, kept after each round."""

from __future__ import annotations

import csv
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_basp.atomic_files import write_json
from megatron_basp.emulated.results import Turn, rows
from megatron_basp.emulated.runs import Conditions, Runs
from megatron_basp.version import __version__


class Document:
    """Written to `file` whenever there is more in it; a table of its rows beside it.

    Args:
        link: "measured" or "modelled".
        device: what it runs on.
    """

    def __init__(self, file: Path, runs: Runs, conditions: Conditions, link: str, device: str) -> None:
        from megatron_basp.megatron.versions import megatron_version

        self.file = file
        self._turns: list[Turn] = []
        self._formula_bytes = {run.mode: run.formula_bytes for run in runs.runs}
        pause = conditions.pause_seconds
        self._common = {"link": link, "compute": "real" if pause is None else "sleep"}
        self.content: dict[str, Any] = {
            "command": shlex.join(["megatron-basp", *sys.argv[1:]]),
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "is_finished": False,
            "versions": {
                "megatron_basp": __version__,
                "megatron-core": megatron_version(),
                "torch": version("torch"),
                "python": platform.python_version(),
                "linux": platform.release(),
            },
            "machine": {"device": device, "cores": os.cpu_count()},
            "cluster": {
                "nodes": conditions.ranks // conditions.ranks_per_node,
                "ranks_per_node": conditions.ranks_per_node,
            },
            "backend": "nccl" if conditions.on_gpu else "gloo",
            **self._common,
            "pause_milliseconds": None if pause is None else pause * 1e3,
            "shape": runs.shape,
            "flags": runs.flags,
            "modes": {run.mode: {"what": run.what, "group_sizes": list(run.group_sizes)} for run in runs.runs},
            "left_out": runs.left_out,
            "warm_up": conditions.warm_up,
            "steps": conditions.measured,
            "rows": [],
        }

    @property
    def modes(self) -> int:
        return len(self._formula_bytes)

    def add(self, turns: list[Turn]) -> None:
        """Written once each mode has taken the same steps: ratios are of both."""
        self._turns += turns
        if turns and len(self._turns) % self.modes == 0:
            self._write()

    def finish(self) -> None:
        self.content["is_finished"] = True
        self._write()

    @contextmanager
    def keeping_what_was_measured(self) -> Iterator[None]:
        """On Ctrl-C all that there is is written, and said where."""
        try:
            yield
        except KeyboardInterrupt:
            if self._turns:
                self._write()
            kept = f"what was measured until now: {self.file}" if self._turns else "nothing was measured"
            print(kept, file=sys.stderr)
            raise

    def _write(self) -> None:
        self.content["rows"] = rows(self._turns, self._formula_bytes, self._common)
        write_json(self.file, self.content)
        with self.file.with_suffix(".csv").open("w", newline="") as stream:
            writer = csv.DictWriter(stream, self.content["rows"][0])
            writer.writeheader()
            writer.writerows(self.content["rows"])
