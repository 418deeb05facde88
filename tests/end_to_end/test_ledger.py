"""What `--basp-ledger` writes of real training: all that went over the wire, by the formulas, to whom it went."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_basp.ledger_file import LedgerFile, file_of_rank, read_ledger
from megatron_basp.local_ranks import run_ranks
from tests.end_to_end.training import GQA, ITERATIONS, MODEL, ROPE, TRAINING, Trainer, batch, cp

# By the names of torch's operators; where the versions differ, both.
OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
}


class Wire(TorchDispatchMode):
    """Counts the operators of torch's communication library that are called, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in function.namespace:
            self.calls[f"{function.namespace}.{function._opname}"] += 1
        return function(*args, **(kwargs or {}))


def watching_the_wire(folder: Path) -> Callable[[], None]:
    """Called in each rank: the operators are counted for as long as the ledger is."""

    def before() -> None:
        import os

        from megatron_basp.megatron.own_collectives import OwnCollectives

        wire, install, uninstall = Wire(), OwnCollectives.install, OwnCollectives.uninstall

        def installed(self: OwnCollectives) -> None:
            install(self)
            wire.__enter__()

        def uninstalled(self: OwnCollectives) -> None:
            wire.__exit__(None, None, None)
            (folder / f"wire{os.environ['RANK']}").write_text(json.dumps(wire.calls))
            uninstall(self)

        OwnCollectives.install, OwnCollectives.uninstall = installed, uninstalled  # type: ignore[method-assign]

    return before


def train(
    trainer: Trainer, flags: str, ranks: int, folder: Path, before: Callable[[], None] = lambda: None
) -> list[LedgerFile]:
    """Train and read what each rank wrote."""
    from megatron_basp.megatron.observed_run import observe_training

    ledger = folder / "ledgers" / "ledger.jsonl"
    argv = [*MODEL.split(), *TRAINING.split(), *trainer.data_flags, *flags.split(), "--basp-ledger", str(ledger)]
    run_ranks(lambda rank: observe_training(argv, ITERATIONS, True, before) and None, ranks, folder)
    return [read_ledger(file_of_rank(ledger, rank)) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("flags", "ranks", "parts"),
    [
        (f"{batch(3, data_parallel=2)} {cp(2)}", 4, {"exchange", "dp", "cp"}),
    ],
)
def test_no_collective_of_megatron_s_is_missed(
    trainer: Trainer, tmp_path: Path, flags: str, ranks: int, parts: set[str]
) -> None:
    flags = f"{GQA} {ROPE} {flags} --sequence-parallel-mode basp"
    for rank, ledger in enumerate(train(trainer, flags, ranks, tmp_path, watching_the_wire(tmp_path))):
        counted: Counter[str] = Counter()
        for step in ledger.steps:
            for collective, amount in step.sent.items():
                name = "all_to_all" if collective.part == "exchange" else collective.operation
                counted[name] += amount.count
        wire = json.loads((tmp_path / f"wire{rank}").read_text())
        print(rank, wire, counted)
        for p in ("training", "outside", "evaluation"):
            for c, a in ledger.total(p).items():
                print(p, c, a)
    assert 0
