"""What the hooks of one process share: made once by `install`, filled as Megatron starts, passed to what needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_basp.ledger import Ledger
from megatron_basp.megatron.settings import Settings
from megatron_basp.megatron.steps import Steps
from megatron_basp.plan import BatchPlan, PlanHolder
from megatron_basp.process_groups import SequenceGroups
from megatron_basp.ranges import NO_RANGES

if TYPE_CHECKING:
    from megatron_basp.megatron.bookkeeping import Bookkeeper
    from megatron_basp.megatron.monitoring import ExchangeMonitor


class Runtime:
    """Settings from the arguments, groups from the start of model parallelism, the plan of the current call.

    settings: None until arguments are validated, and in a run without a mode, where hooks do nothing.
    groups: None outside of Megatron's model parallelism.
    batches_taken: micro-batches that this rank has taken its stream of.
    checked_plans: those under which a first call was checked.
    steps: tells steps apart, and turns the ledger's pages.
    monitor: what the exchanges of training steps are added up in, once somebody asked for it.
    bookkeeper: writes the ledger, where `--basp-ledger` asked for it.
    ranges: of the profiler, Megatron's once hooks are in.
    """

    def __init__(self) -> None:
        self._settings: Settings | None = None
        self._groups: SequenceGroups | None = None
        self._plans: dict[tuple[int, int], BatchPlan] = {}
        self.plan_holder = PlanHolder()
        self.ledger = Ledger()
        self.steps = Steps(self.ledger)
        self.batches_taken = 0
        self.checked_plans: set[BatchPlan] = set()
        self.monitor: ExchangeMonitor | None = None
        self.bookkeeper: Bookkeeper | None = None
        self.ranges = NO_RANGES

    @property
    def is_active(self) -> bool:
        return self._settings is not None

    @property
    def settings(self) -> Settings:
        assert self._settings is not None, "settings are there once a sequence-parallel mode was asked for"
        return self._settings

    def set_settings(self, settings: Settings | None) -> None:
        self._settings = settings
        self._plans.clear()

    @property
    def groups(self) -> SequenceGroups:
        if self._groups is None:
            raise RuntimeError("there are no sequence groups: Megatron's model parallelism is not initialized")
        return self._groups

    def set_groups(self, groups: SequenceGroups) -> None:
        self._groups = groups

    def close_books(self) -> None:
        """Once; there is nothing to close in a run without a ledger."""
        if self.bookkeeper is not None:
            bookkeeper, self.bookkeeper = self.bookkeeper, None
            bookkeeper.close()

    def destroy_groups(self) -> None:
        self.close_books()
        if self._groups is not None:
            self._groups.destroy()
            self._groups = None
            self.checked_plans.clear()

    def plan(self, micro_batch_size: int, seq_length: int) -> BatchPlan:
        """The plan for B rows of S tokens; the same object for the same shape."""
        shape = (micro_batch_size, seq_length)
        if shape not in self._plans:
            self._plans[shape] = self.settings.plan(*shape)
        return self._plans[shape]
