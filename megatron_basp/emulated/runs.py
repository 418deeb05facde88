"""The runs that `megatron-basp bench train` compares: one model and one data order, with the flags of each mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_basp.emulated.results import BOUND, ULYSSES, exchanged_across_nodes
from megatron_basp.errors import ConfigurationError
from megatron_basp.exchange_cost import AttentionShape
from megatron_basp.plan import BatchPlan
from megatron_basp.run_flags import plain_flags

if TYPE_CHECKING:
    from megatron_basp.megatron.command_line import CommandLine
    from megatron_basp.megatron.measured_run import TimedRun
    from megatron_basp.megatron.settings import Settings

# Few parameters and long rows of wide heads, so that gradients are little beside the exchange.
CPU_FLAGS = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 96 --num-attention-heads 16 --kv-channels 64
    --group-query-attention --num-query-groups 8 --seq-length 1024 --max-position-embeddings 1024
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --transformer-impl local
    --no-gradient-accumulation-fusion --no-rope-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --distributed-backend gloo --micro-batch-size 2 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --num-workers 0
    --split 100,0,0
"""
# Where attention is a pause its length is given, and copies inside of nodes should take little beside it: short rows.
SLEEP_FLAGS = "--seq-length 256"
MOCK_DATA = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "511"]
# What the command itself decides, or the figures would not be what they are called.
OWN_FLAGS = ("--sequence-parallel-mode", "--context-parallel-size", "--train-iters", "--basp-domain-size")
UNITS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


@dataclass(frozen=True)
class Run:
    """One mode's. what: how it is run. formula_bytes: that a step has to send across nodes in the exchange."""

    mode: str
    what: str
    group_sizes: tuple[int, ...]
    formula_bytes: int
    timed: TimedRun


@dataclass
class Runs:
    """shape: as in the document of results. flags: those that all have in common."""

    flags: list[str]
    shape: dict[str, int]
    runs: list[Run] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Conditions:
    """Of all runs.

    ranks, ranks_per_node: N of them, so many consecutive ones to a node.
    rates: how many there are of the link.
    warm_up, measured: steps of each run at each rate.
    pause_seconds: that a rank's attention takes in a step where it is a pause; None where it computes.
    """

    ranks: int
    ranks_per_node: int
    rates: int
    warm_up: int
    measured: int
    on_gpu: bool
    pause_seconds: float | None

    @property
    def node_of_rank(self) -> list[int]:
        return [rank // self.ranks_per_node for rank in range(self.ranks)]

    @property
    def steps(self) -> int:
        """That each run takes in all."""
        return self.rates * (self.warm_up + self.measured)


def plan_runs(words: Sequence[str], conditions: Conditions, data_flags: Callable[[], list[str]]) -> Runs:
    """Read the flags and make each mode's of them. Imports Megatron.

    Args:
        words: Megatron's flags; on a CPU they change those of a small Llama.
        data_flags: makes the data, where the flags name none.

    Raises:
        ConfigurationError: training would refuse them, or they leave nothing to compare.
    """
    from megatron_basp.megatron.arguments import settings_from_arguments
    from megatron_basp.megatron.command_line import CommandLine

    own_flags = "" if conditions.on_gpu else CPU_FLAGS if conditions.pause_seconds is None else CPU_FLAGS + SLEEP_FLAGS
    line = CommandLine([*own_flags.split(), *words])
    _check(CommandLine(words), line.args)
    line.set("--train-iters", conditions.steps)
    line.set("--eval-iters", 0)
    line.set("--eval-interval", conditions.steps)
    line.set("--log-interval", conditions.steps)
    line.set("--context-parallel-size", conditions.ranks)
    line.set("--basp-domain-size", conditions.ranks_per_node)
    if line.args.global_batch_size is None:
        line.set("--global-batch-size", line.args.micro_batch_size)
    settings = {}
    for mode in ("basp", ULYSSES):
        own = _of_mode(line, mode)
        own.args.world_size = conditions.ranks
        settings[mode] = settings_from_arguments(own.args)
    if not (line.args.mock_data or line.args.data_path or line.args.train_data_path):
        line = CommandLine([*line.words, *data_flags()])
    return _Planner(line, conditions, settings).runs()


def _check(given: CommandLine, args: Any) -> None:
    for flag in given.flags:
        if flag in OWN_FLAGS:
            raise ConfigurationError(f"{flag} is what bench train sets itself: leave it out after --")
    for name in UNITS:
        if getattr(args, name) != 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigurationError(
                f"{flag} must be 1, got {getattr(args, name)}: all ranks are context-parallel here, and their "
                f"exchange is what is measured"
            )
    if args.recompute_granularity == "full":
        raise ConfigurationError(
            "--recompute-granularity full repeats exchanges, which the formula does not count: use selective"
        )


def _of_mode(line: CommandLine, mode: str) -> CommandLine:
    line = line.copy()
    line.set("--sequence-parallel-mode", mode)
    if mode == ULYSSES:
        line.drop("--basp-group-size")
    return line


class _Planner:
    def __init__(self, line: CommandLine, conditions: Conditions, settings: dict[str, Settings]) -> None:
        from megatron_basp.megatron.arguments import attention_shape

        self.line, self.conditions = line, conditions
        self.limits = settings["basp"].limits
        args = line.args
        self.attention: AttentionShape = attention_shape(args, self.limits.heads, self.limits.kv_heads)
        self.micro_batches = args.global_batch_size // args.micro_batch_size
        self.plans: dict[str, BatchPlan] = {
            mode: own.plan(own.micro_batch_size, own.seq_length) for mode, own in settings.items()
        }
        self.pairs = args.micro_batch_size * args.seq_length**2 * self.limits.heads // conditions.ranks
        self.layer_passes = args.num_layers * self.micro_batches

    def runs(self) -> Runs:
        args, waves = self.line.args, self.plans["basp"].waves
        shape = {
            "layers": args.num_layers,
            "heads": self.attention.heads,
            "kv_heads": self.attention.kv_heads,
            "head_size": self.attention.value_head_size,
            "element_bytes": self.attention.element_bytes,
            "seq_length": args.seq_length,
            "micro_batch_size": args.micro_batch_size,
            "micro_batches": self.micro_batches,
            "ranks": self.conditions.ranks,
        }
        found = Runs(self.line.words, shape)
        dealt = ", ".join(f"{len(wave.rows)} at K={wave.group_size}" for wave in waves)
        found.runs = [
            self._run(ULYSSES, "every sequence over all ranks", ULYSSES),
            self._run("basp", f"sequences by groups: {dealt}", "basp"),
        ]
        self._reflagged(found)
        found.runs.append(self._run(BOUND, "as basp, and nothing is exchanged", "basp", with_exchange=False))
        return found

    def _run(self, mode: str, what: str, planned_as: str, with_exchange: bool = True) -> Run:
        plan = self.plans[planned_as]
        flags = _of_mode(self.line, planned_as).words
        n_bytes = self._formula(plan) if with_exchange else 0
        return Run(mode, what, _sizes(plan), n_bytes, self._timed(flags, True, with_exchange=with_exchange))

    def _reflagged(self, found: Runs) -> None:
        """Plain flags that deal the same sequences out to the same ranks: CP = K and more data parallelism."""
        plan = self.plans["basp"]
        flags = plain_flags(plan, self.limits)
        if flags is None:
            found.left_out["reflagged"] = "no plain flags do the same: sequences get different numbers of ranks"
            return
        line = self.line.copy()
        for flag in line.flags:
            if flag.startswith("--basp-"):
                line.drop(flag)
        size = plan.waves[0].group_size
        line.set("--context-parallel-size", size)
        line.set("--micro-batch-size", len(plan.lengths) * size // plan.ranks)
        what, planned, our_kernel = f"stock Megatron with {flags}", False, False
        if size > 1 and self.conditions.on_gpu:
            if ", but" in flags:
                found.left_out["reflagged"] = flags
                return
            line.set("--cp-comm-type", "a2a")
        elif size > 1:
            # Stock's own needs Transformer Engine, and a GPU.
            what = f"plain flags, CP={size} and DP={plan.ranks // size}, with our exchange for stock's"
            line.set("--sequence-parallel-mode", ULYSSES)
            line.set("--basp-domain-size", self.conditions.ranks_per_node)
            planned = True
        elif not self.conditions.on_gpu:
            what, our_kernel = f"{what} and the modes' attention kernel", True
        timed = self._timed(line.words, planned, our_kernel=our_kernel)
        found.runs.append(Run("reflagged", what, (size,), self._formula(plan), timed))

    def _timed(self, flags: Sequence[str], planned: bool, **others: Any) -> TimedRun:
        from megatron_basp.megatron.measured_run import TimedRun

        pause = self.conditions.pause_seconds
        seconds_per_pair = None if pause is None else pause / (self.pairs * self.layer_passes)
        return TimedRun(tuple(flags), planned, seconds_per_pair=seconds_per_pair, **others)

    def _formula(self, plan: BatchPlan) -> int:
        n_bytes = exchanged_across_nodes(plan, self.conditions.ranks_per_node, self.attention)
        return n_bytes * self.layer_passes


def _sizes(plan: BatchPlan) -> tuple[int, ...]:
    return tuple(wave.group_size for wave in plan.waves)
