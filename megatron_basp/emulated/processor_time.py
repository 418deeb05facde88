"""Who used this machine's processors meanwhile. Linux."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds until now, of some processes and of everybody. What the kernel spends on packets is nobody's."""

    own: float
    all: float

    @classmethod
    def now(cls, pids: Iterable[int]) -> ProcessorTime:
        return cls(sum(map(_of_process, pids)), _of_machine())

    def since(self, before: ProcessorTime) -> dict[str, float]:
        """As fields of a `Turn`."""
        own = self.own - before.own
        return {"cpu_seconds": own, "others_cpu_seconds": max(0.0, self.all - before.all - own)}


def _of_process(pid: int) -> float:
    # The name, in brackets, may have spaces in it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _of_machine() -> float:
    """User, nice and system, and what a hypervisor took."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:3]) + fields[7]) / _TICKS
