"""Where one step of a run ends and the next begins: training, evaluation, and what lies between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron_basp.ledger import Ledger, Page, Phase

if TYPE_CHECKING:
    from megatron_basp.megatron.runtime import Runtime
    from megatron_basp.megatron.seam import Function

# Gets the phase, the number of the iteration, the seconds it took, and what was sent in it.
Reader = Callable[[Phase, int, float, Page], None]


class Steps:
    """Turns the ledger's pages.

    readers: are given each page when it is full.
    iteration: the last one that training took, from 1; of a resumed run before its first, the checkpoint's.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.readers: list[Reader] = []
        self.iteration = 0
        self._ledger = ledger
        self._since = time.perf_counter()

    @contextmanager
    def step(self, phase: Phase, iteration: int) -> Iterator[None]:
        self.turn("outside")
        self.iteration = iteration
        yield
        self.turn(phase)

    def turn(self, phase: Phase) -> None:
        """End a page, which was of this phase."""
        now, page = time.perf_counter(), self._ledger.turn()
        for reader in self.readers:
            reader(phase, self.iteration, now - self._since, page)
        self._since = now


def taking_step(runtime: Runtime, original: Function) -> Function:
    def train_step(*args: Any, **kwargs: Any) -> Any:
        if not runtime.is_active:
            return original(*args, **kwargs)
        from megatron.training import get_args

        with runtime.steps.step("training", get_args().curr_iteration + 1):
            return original(*args, **kwargs)

    return train_step


def evaluating(runtime: Runtime, original: Function) -> Function:
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        if not runtime.is_active:
            return original(*args, **kwargs)
        from megatron.training import get_args

        with runtime.steps.step("evaluation", runtime.steps.iteration or get_args().iteration):
            return original(*args, **kwargs)

    return evaluate
