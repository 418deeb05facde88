"""What measures how long this rank stands still for a collective: events on a GPU, the host's clock on a CPU.

On a GPU events are put into the stream before and behind, and read when a figure is wanted, so that no layer waits.
What they measure is what the stream waits: the collective, and the ranks that come late to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_basp.ledger import Span


class HostSpan:
    """From its making to `stop`, by the host's clock."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds = 0.0

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._start

    def is_over(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._seconds


class DeviceSpan:
    """From its making to `stop`, in the stream that is current at both."""

    def __init__(self) -> None:
        self._begin: Any = torch.cuda.Event(enable_timing=True)
        self._end: Any = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def is_over(self) -> bool:
        return self._end.query()

    def seconds(self) -> float:
        """Waits for the end of it."""
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3


def clock() -> Callable[[], Span]:
    """That of the machine."""
    return DeviceSpan if torch.cuda.is_available() else HostSpan
