"""What `--basp-ledger` writes of real training: all that went over the wire, by the formulas, to whom it went."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_basp.errors import RankFailed
from megatron_basp.ledger_file import Exchanged, LedgerFile, PlannedWave, file_of_rank, read_ledger, total
from megatron_basp.library import named_cluster
from megatron_basp.local_ranks import run_ranks
from megatron_basp.megatron.recorder import Record
from megatron_basp.model_spec import model_from_flags
from megatron_basp.parallel_cost import tensor_traffic
from megatron_basp.training_spec import Parallelism, TrainingSpec
from tests.end_to_end.training import GQA, MODEL, ROPE, SEQ_LENGTH, TRAINING, Trainer, batch, cp

STEPS = 2
HEADS, KV_HEADS, HEAD_SIZE, LAYERS, ELEMENT = 8, 4, 8, 2, 4  # of the tests' model; bytes of fp32

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


def on_the_wire(folder: Path, rank: int) -> Counter[str]:
    counted: Counter[str] = Counter()
    for name, calls in json.loads((folder / f"wire{rank}").read_text()).items():
        counted[OPERATIONS[name.removeprefix("c10d.")]] += calls
    return counted


def train(
    trainer: Trainer,
    flags: str,
    ranks: int,
    folder: Path,
    before: Callable[[], None] = lambda: None,
    after_step: Callable[[Record], None] = lambda record: None,
) -> list[LedgerFile]:
    """Train and read what each rank wrote."""
    from megatron_basp.megatron.observed_run import observe_training

    ledger = folder / "ledgers" / "ledger.jsonl"
    argv = [*MODEL.split(), *TRAINING.split(), *trainer.data_flags, *flags.split(), "--train-iters", str(STEPS)]
    argv += ["--basp-ledger", str(ledger)]
    run_ranks(lambda rank: observe_training(argv, STEPS, True, before, None, after_step) and None, ranks, folder)
    return [read_ledger(file_of_rank(ledger, rank)) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("flags", "ranks", "parts"),
    [
        (f"{batch(3, data_parallel=2)} {cp(2)}", 4, {"dp", "cp"}),
        (
            f"{batch(3, data_parallel=2)} {cp(2)} --use-distributed-optimizer --overlap-grad-reduce "
            "--overlap-param-gather --ddp-bucket-size 20000",
            4,
            {"dp", "cp"},
        ),
        (
            f"{batch(3, micro_batches=4)} {cp(2)} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
            "--sequence-parallel",
            8,
            {"dp", "tp", "pp", "cp"},
        ),
        (
            f"{batch(3)} {cp(2)} --num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
            2,
            {"dp", "ep", "cp"},
        ),
        (
            f"{batch(3)} {cp(2)} --use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy "
            "optim_grads_params",
            2,
            {"dp", "cp"},
        ),
    ],
    ids=["data parallelism", "distributed optimizer, overlapping", "tensors, stages", "experts", "FSDP"],
)
def test_no_collective_is_missed_and_each_part_of_the_run_has_sent(
    trainer: Trainer, tmp_path: Path, flags: str, ranks: int, parts: set[str]
) -> None:
    flags = f"{GQA} {ROPE} {flags} --sequence-parallel-mode basp"
    for rank, ledger in enumerate(train(trainer, flags, ranks, tmp_path, watching_the_wire(tmp_path))):
        counted: Counter[str] = Counter()
        sending: set[str] = set()
        for collective, amount in total(step.sent for step in ledger.steps).items():
            if collective.part == "exchange":
                # Query, key and value: one entry of the ledger, and over gloo an operation for each.
                counted["all_to_all"] += amount.count * (3 if collective.operation == "qkv" else 1)
            else:
                counted[collective.operation] += amount.count
            sending |= {collective.part} if amount.sent_bytes else set()
        assert counted == on_the_wire(tmp_path, rank)
        assert sending == {"exchange", "other", *parts}
        assert all(amount.seconds > 0 for step in ledger.steps for amount in step.sent.values())


def test_steps_are_told_from_evaluations_and_from_what_is_between_them(trainer: Trainer, tmp_path: Path) -> None:
    ledgers = train(trainer, f"{GQA} {ROPE} {batch(3)} {cp(2)} --sequence-parallel-mode basp", 2, tmp_path)
    for rank, ledger in enumerate(ledgers):
        assert ledger.is_complete
        # Before training and behind it.
        assert [step.step for step in ledger.of("evaluation")] == [0, STEPS]
        first, second = ledger.of("training")
        assert (first.step, second.step) == (1, 2)
        header = ledger.header
        assert (header.rank, header.world_size, header.cp_ranks, header.domain_size) == (rank, 2, (0, 1), 2)
        assert len(set(header.nodes)) == 1 and (header.backend, header.clock) == ("gloo", "host")
        assert header.exchanged == Exchanged(HEADS, KV_HEADS, HEAD_SIZE, HEAD_SIZE, ELEMENT)
        assert header.training_waves == (PlannedWave(2, 1), PlannedWave(1, 2)) == header.evaluation_waves
        assert model_from_flags(header.flags).kv_heads == KV_HEADS
        # 2 micro-batches in a step; the second step does what the first did.
        exchanged = {collective for collective in first.sent if collective.part == "exchange"}
        assert {collective.wave for collective in exchanged} == {1}
        assert all(first.sent[collective].count == 2 for collective in exchanged)
        for collective in exchanged:
            assert second.sent[collective].sent_bytes == first.sent[collective].sent_bytes
        # An evaluation has as many forward passes a batch, of each of its 2 batches, and none backward.
        evaluated = {c: amount for c, amount in ledger.of("evaluation")[0].sent.items() if c.part == "exchange"}
        assert {c.direction for c in evaluated} == {"forward"}
        assert all(amount.count == 4 for amount in evaluated.values())
        assert not any(c.part == "exchange" for step in ledger.of("outside") for c in step.sent)


def test_a_killed_run_leaves_the_steps_that_it_took(trainer: Trainer, tmp_path: Path) -> None:
    def kill(record: Record) -> None:
        if len(record.losses) == STEPS:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailed):
        train(trainer, f"{GQA} {ROPE} {batch(3)} {cp(2)} --sequence-parallel-mode basp", 2, tmp_path, after_step=kill)
    ledger = read_ledger(file_of_rank(tmp_path / "ledgers" / "ledger.jsonl", 0))
    assert [step.step for step in ledger.of("training")] in ([1], [1, 2])  # the other rank's death may come first
    assert not ledger.is_complete


def exchanged_bytes(rows: int, group_size: int, ranks: int) -> tuple[int, int]:
    """What a rank passes on of q, k and v, and of the output, to the K ranks of the group, itself among them:
    T·e·(H·d + max(Hkv, K)·2·d) and T·e·H·d, of one micro-batch, layer and direction."""
    tokens = rows * SEQ_LENGTH // ranks
    kv_heads = max(KV_HEADS, group_size)
    return (
        tokens * ELEMENT * HEAD_SIZE * (HEADS + 2 * kv_heads),
        tokens * ELEMENT * HEAD_SIZE * HEADS,
    )


@pytest.mark.parametrize(
    ("rows", "mode", "waves"),
    [(2, "basp", [(2, 2)]), (3, "basp", [(2, 2), (1, 4)]), (3, "ulysses", [(3, 4)])],
)
def test_bytes_to_each_class_of_peers_are_those_of_the_formula(
    trainer: Trainer, tmp_path: Path, rows: int, mode: str, waves: list[tuple[int, int]]
) -> None:
    """On "nodes" of two ranks: of K ranks one is this rank, one its neighbour, K - 2 are in other nodes."""
    flags = f"{GQA} {ROPE} {batch(rows)} {cp(4)} --sequence-parallel-mode {mode} --basp-domain-size 2"
    expected = {}
    for wave, (in_wave, group_size) in enumerate(waves):
        for operation, n_bytes in zip(("qkv", "output"), exchanged_bytes(in_wave, group_size, 4), strict=True):
            share = 2 * n_bytes // group_size  # of 2 micro-batches
            for layer in range(1, LAYERS + 1):
                for direction in ("forward", "backward"):
                    expected[operation, layer, wave, direction] = (2, share, share, (group_size - 2) * share)
    for ledger in train(trainer, flags, 4, tmp_path):
        assert ledger.header.nodes == ("domain 0", "domain 0", "domain 1", "domain 1")
        assert ledger.header.training_waves == tuple(PlannedWave(*wave) for wave in waves)
        for step in ledger.of("training"):
            assert expected == {
                (c.operation, c.layer, c.wave, c.direction): tuple(vars(amount).values())[:4]
                for c, amount in step.sent.items()
                if c.part == "exchange"
            }
    summary = (tmp_path / "rank0.log").read_text().split("sent by rank 0, a training step of 2")[1]
    row = re.search(r"exchange of attention.*?│ +(\d+) │ +([\d.]+) │ +([\d.]+) │", summary)
    assert row is not None
    inside, across = (sum(amounts[i] for amounts in expected.values()) / 2**20 for i in (2, 3))
    assert row.groups() == (str(2 * len(expected)), f"{inside:.3f}", f"{across:.3f}")


def test_tensor_parallel_ranks_send_what_the_cost_model_says(trainer: Trainer, tmp_path: Path) -> None:
    flags = f"{GQA} {ROPE} {batch(3)} {cp(2)} --tensor-model-parallel-size 2 --sequence-parallel"
    flags += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ledger = train(trainer, f"{flags} --sequence-parallel-mode basp", 4, tmp_path)[0]
    run = TrainingSpec(
        model_from_flags(ledger.header.flags),
        named_cluster("h100-8"),
        Parallelism(tensor_model_parallel_size=2, context_parallel_size=2, recompute="full"),
        SEQ_LENGTH,
        micro_batch_size=3,
        global_batch_size=6,
        precision="fp32",
    )
    ring_bytes = run.tokens * run.model.hidden * ELEMENT // 2
    # Not modelled: the embedding scatters and gathers, the output layer gathers twice and scatters.
    a_micro_batch = LAYERS * tensor_traffic(run).sent_bytes + 5 * ring_bytes
    for step in ledger.of("training"):
        rings = [a for c, a in step.sent.items() if c.part == "tp" and c.operation in ("all_gather", "reduce_scatter")]
        assert sum(amount.sent_bytes for amount in rings) == 2 * a_micro_batch


def test_without_the_flag_torch_is_left_alone(trainer: Trainer, tmp_path: Path) -> None:
    from torch.distributed import ProcessGroup

    from megatron_basp.megatron.observed_run import observe_training
    from megatron_basp.megatron.own_collectives import METHODS

    def methods() -> list[Any]:
        return [vars(ProcessGroup).get(name) for name in METHODS]

    found = methods()

    def before() -> None:
        from megatron.training import training

        train_step = training.train_step

        @functools.wraps(train_step)
        def checked(*args: Any, **kwargs: Any) -> Any:
            assert methods() == found
            return train_step(*args, **kwargs)

        training.train_step = checked

    argv = [*MODEL.split(), *TRAINING.split(), *trainer.data_flags, *f"{GQA} {ROPE} {batch(3)} {cp(2)}".split()]
    argv += ["--sequence-parallel-mode", "basp", "--train-iters", str(STEPS)]
    run_ranks(lambda rank: observe_training(argv, STEPS, True, before) and None, 2, tmp_path)
