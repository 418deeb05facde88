"""The processes of the benchmark: `python -m megatron_basp.peers.ranks SETTINGS`, in the environment with the others.

SETTINGS is JSON, of the fields of `Settings`. Results go to a file, progress to stderr. Exits 1 where a rank failed.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # what a first gradient and a first dispatch mode import, slowly: once, before ranks are forked
import torch.distributed as dist

from megatron_basp.atomic_files import read_json, write_json
from megatron_basp.cli.progress import named_steps
from megatron_basp.errors import RankFailed
from megatron_basp.local_ranks import redirect_output, run_ranks
from megatron_basp.peers.implementations import NAMES, Implementation, installed
from megatron_basp.peers.kernels import PARTS
from megatron_basp.peers.measurement import Case
from megatron_basp.peers.shapes import shape_of


@dataclass(frozen=True)
class Settings:
    """shapes, group_sizes (K), repetitions, memory: as on the command line. file: gets the document."""

    shapes: tuple[str, ...]
    group_sizes: tuple[int, ...]
    repetitions: int
    memory: str
    file: str


def main() -> int:
    settings = Settings(**json.loads(sys.argv[1]))
    file = Path(settings.file)
    logs = file.with_suffix(".logs")
    logs.mkdir(exist_ok=True)
    # Progress keeps this descriptor; what libraries print when they are imported goes where the ranks' output does.
    terminal = os.dup(2)
    redirect_output(logs / "start.log")
    # No pool of threads in the process that ranks are forked from.
    torch.set_num_threads(1)
    implementations = installed()
    write_json(file, _head(settings, implementations))
    try:
        for done, group_size in enumerate(settings.group_sizes):
            run_ranks(
                lambda rank, done=done: _measure(rank, settings, implementations, done, terminal),
                group_size,
                logs / f"K={group_size}",
            )
    except RankFailed as error:
        os.write(terminal, f"megatron-basp: error: {error}\n".encode())
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _head(settings: Settings, implementations: list[Implementation]) -> dict[str, object]:
    names = [implementation.name for implementation in implementations]
    return {
        "rows": [],
        "unsupported": [],
        "implementations": {implementation.name: implementation.what for implementation in implementations},
        "missing": [name for name in NAMES if name not in names],
        "shapes": {text: asdict(shape_of(text)) for text in settings.shapes},
        "settings": {
            "repetitions": settings.repetitions,
            "memory": settings.memory,
            "dtype": "float32",
            "backend": "gloo",
            "threads_a_rank": 1,
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        },
    }


def _measure(rank: int, settings: Settings, implementations: list[Implementation], done: int, terminal: int) -> None:
    """With K = the world, all shapes and parts; the first rank writes down each as soon as it is measured."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    file, ranks = Path(settings.file), dist.get_world_size()
    steps = len(settings.shapes) * len(PARTS)
    with named_steps(terminal, rank, steps * len(settings.group_sizes), steps * done) as advance:
        for text in settings.shapes:
            for part in PARTS:
                advance(f"K={ranks} {text} {part}")
                case = Case(shape_of(text), part, implementations, settings.repetitions)
                rows = case.rows()
                if rank == 0:
                    document = read_json(file)
                    document["rows"] += [asdict(row) for row in rows]
                    found = [asdict(one) for one in case.unsupported]
                    document["unsupported"] += [one for one in found if one not in document["unsupported"]]
                    write_json(file, document)


if __name__ == "__main__":
    sys.exit(main())
