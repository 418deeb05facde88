"""What attention's exchanges should have sent in a training step, held against what a run's ledger counted. Pure.

Bytes are held to be equal by wave, operation and direction, summed over layers and micro-batches; seconds stand beside
what the model says of a cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from megatron_basp.cluster import ClusterSpec
from megatron_basp.errors import ConfigurationError
from megatron_basp.exchange_cost import AttentionShape, ExchangeModel
from megatron_basp.ledger import EXCHANGE, Amount, Collective, Direction
from megatron_basp.ledger_file import Header, LedgerFile
from megatron_basp.placement import aligned_blocks, placement


class Kind(NamedTuple):
    """Of exchanges: index of the wave, K, `qkv` or `output`, `forward` or `backward`."""

    wave: int
    group_size: int
    operation: str
    direction: Direction


class Sent(NamedTuple):
    """By one rank in one step: collectives, and bytes that it kept, sent inside its node, and to other nodes."""

    collectives: int = 0
    same_rank_bytes: int = 0
    same_node_bytes: int = 0
    across_nodes_bytes: int = 0


@dataclass(frozen=True)
class Check:
    """Of one rank and kind of exchange, in each of `steps` training steps.

    counted: of the first step that differs from what was predicted, else of any.
    differs_in: Megatron's number of that step, or None.
    measured_seconds: of the mean step; None where it was not measured.
    """

    rank: int
    kind: Kind
    predicted: Sent
    counted: Sent
    steps: int
    differs_in: int | None
    measured_seconds: float | None


def check(ledger: LedgerFile) -> list[Check]:
    """One for each kind that was predicted or counted.

    Raises:
        ConfigurationError: there is no training step, or the run's exchanges are not predicted.
    """
    header, steps = ledger.header, ledger.of("training")
    if not steps:
        raise ConfigurationError(f"the ledger of rank {header.rank} has no training step: train for one or more")
    predicted = predicted_step(header)
    counted = [(step.step, _by_kind(step.sent)) for step in steps]
    kinds = sorted({*predicted, *(kind for _, of_step in counted for kind in of_step)})
    checks = []
    for kind in kinds:
        expected = predicted.get(kind, Sent())
        found = [(number, _sent(of_step.get(kind))) for number, of_step in counted]
        differs_in, shown = next(((number, sent) for number, sent in found if sent != expected), (None, found[0][1]))
        times = [of_step[kind].seconds for _, of_step in counted if kind in of_step]
        known = [time for time in times if time is not None]
        seconds = sum(known) / len(steps) if len(known) == len(times) else None
        checks.append(Check(header.rank, kind, expected, shown, len(steps), differs_in, seconds))
    return checks


def predicted_step(header: Header) -> dict[Kind, Sent]:
    """From the plan, the shape of attention, the layers of a stage and the micro-batches of a step."""
    micro_batches = _micro_batches(header.flags)
    layers, recomputed = _layers(header.flags)
    shape = _shape(header)
    sent = {}
    for wave, (rows, group_size, chunks) in enumerate(map(astuple, header.training_waves)):
        if group_size == 1:
            continue
        tokens = rows * _number(header.flags, "seq-length") // len(header.cp_ranks)
        same_node, across = _peers(header, group_size)
        operations = {
            "qkv": shape.query_key_value_bytes(tokens, group_size),
            "output": shape.output_bytes(tokens),
        }
        for operation, n_bytes in operations.items():
            of_micro_batch = {"forward": layers + recomputed, "backward": layers}
            for direction, exchanges in of_micro_batch.items():
                number = exchanges * micro_batches
                share = round(n_bytes / group_size) * number  # H and max(Hkv, K) are multiples of K
                kind = Kind(wave, group_size, operation, direction)  # type: ignore[arg-type]
                sent[kind] = Sent(number * chunks, share, same_node * share, across * share)
    return sent


def predicted_seconds(header: Header, headers: Sequence[Header], cluster: ClusterSpec) -> dict[tuple[int, str], float]:
    """Of a step, by wave and direction: `qkv` and `output` together.

    Args:
        headers: of all ranks that are known, whose groups exchange at the same time.
    """
    cp_groups = sorted({one.cp_ranks for one in headers})
    model = ExchangeModel(cluster, _shape(header), placement(cp_groups, dict(enumerate(header.nodes))))
    layers, recomputed = _layers(header.flags)
    found = {}
    for wave, planned in enumerate(header.training_waves):
        tokens = planned.rows * _number(header.flags, "seq-length") / len(header.cp_ranks)
        cost = model.of_wave(planned.group_size, tokens)
        # Each part has a latency of its own.
        seconds = (cost.seconds + cost.latency_seconds * (planned.chunks - 1)) * _micro_batches(header.flags)
        if planned.group_size > 1:
            found[wave, "forward"] = seconds * (layers + recomputed)
            found[wave, "backward"] = seconds * layers
    return found


def _by_kind(sent: Mapping[Collective, Amount]) -> dict[Kind, Amount]:
    """The exchanges, summed over layers."""
    found: dict[Kind, Amount] = {}
    for collective, amount in sent.items():
        if collective.part != EXCHANGE:
            continue
        if collective.wave is None or collective.direction is None:
            raise ConfigurationError(
                f"an exchange of the ledger has no wave or direction: {collective}; was it edited?"
            )
        kind = Kind(collective.wave, collective.group_size, collective.operation, collective.direction)
        found[kind] = found[kind] + amount if kind in found else amount
    return found


def _sent(amount: Amount | None) -> Sent:
    if amount is None:
        return Sent()
    return Sent(amount.count, amount.same_rank_bytes, amount.same_node_bytes, amount.across_nodes_bytes)


def _shape(header: Header) -> AttentionShape:
    exchanged = header.exchanged
    return AttentionShape(
        exchanged.heads,
        exchanged.kv_heads,
        exchanged.qk_head_size,
        exchanged.v_head_size,
        exchanged.element_bytes,
    )


def _peers(header: Header, group_size: int) -> tuple[int, int]:
    """Of this rank in its group of K: in its node, itself left out, and in others."""
    block: Iterable[int] = next(block for block in aligned_blocks(header.cp_ranks, group_size) if header.rank in block)
    inside = sum(header.nodes[peer] == header.nodes[header.rank] for peer in block)
    return inside - 1, group_size - inside


def _micro_batches(flags: Mapping[str, Any]) -> int:
    return (
        _number(flags, "global-batch-size")
        // _number(flags, "micro-batch-size")
        // _number(flags, "data-parallel-size")
    )


def _number(flags: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    value = flags.get(name, otherwise)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(
            f"the ledger's header has {'no' if value is None else value} --{name}, and it is 1 or more; was it edited?"
        )
    return value


def _layers(flags: Mapping[str, Any]) -> tuple[int, int]:
    """(Of a pipeline stage, those of them whose attention is computed twice)."""
    if flags.get("mtp-num-layers"):
        raise ConfigurationError(
            "the exchanges of multi-token prediction are not predicted: check a run without --mtp-num-layers"
        )
    stages = _number(flags, "pipeline-model-parallel-size")
    chunks = _number(flags, "virtual-pipeline-model-parallel-size", 1)
    layers = _number(flags, "num-layers")
    if layers % (stages * chunks):
        raise ConfigurationError(
            f"layers % (PP·virtual stages) must be 0 to predict what a stage sends, got {layers} and {stages}·{chunks}"
        )
    of_chunk = layers // stages // chunks
    granularity = flags.get("recompute-granularity")
    recomputed = 0
    if granularity == "full":
        is_block = flags.get("recompute-method") == "block"
        recomputed = min(of_chunk, _number(flags, "recompute-num-layers")) if is_block else of_chunk
    return of_chunk * chunks, recomputed * chunks
