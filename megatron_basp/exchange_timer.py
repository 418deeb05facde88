"""How long the exchanges of attention take on one rank, for those who asked.

On a GPU events are put into the stream around each collective and read when a total is wanted, so that no layer waits.
What they measure is what the stream waits: the collective, and the ranks that come late to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ExchangeTimer:
    """Called as a context around each collective; put into `Ledger.timing`."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._events: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if not self._on_gpu:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def total_seconds(self) -> float:
        """Since it was made. On a GPU this waits for the last exchange."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
            self._events.clear()
        return self._seconds
