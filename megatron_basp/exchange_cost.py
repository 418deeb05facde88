"""What the exchange of one wave costs, in bytes and in seconds: one layer, one direction, one micro-batch. Pure.

Letters as in `plan.py`. A rank of a wave at K holds t tokens of it and, in the exchange, hands every peer of its group
a K-th of their heads: q and the output have H, keys and values max(Hkv, K) each. Backward moves what forward moves.

    seconds = latency + max(inside a domain, across domains) + copies

The links inside and across are different ones and work at the same time; the copies before and after do not overlap
with either. All GPUs of a node exchange at once and share what leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_basp.cluster import ClusterSpec
from megatron_basp.decomposition import WaveCost
from megatron_basp.placement import Placement
from megatron_basp.plan import BatchPlan, CostOf

# What strided copies reach of a GPU's memory bandwidth: assumed (`megatron-basp bench fabric` measures plain ones).
COPY_SHARE_OF_PEAK = 0.8


@dataclass(frozen=True)
class AttentionShape:
    """Of one tensor-parallel rank: H, Hkv, the head sizes d_qk and d_v, and bytes an element."""

    heads: int
    kv_heads: int
    query_head_size: int
    value_head_size: int
    element_bytes: int

    def query_key_value_bytes(self, tokens: float, group_size: int) -> float:
        """Of q, k and v of so many tokens, as sent: a key-value head once for each rank that needs it."""
        kv_heads = max(self.kv_heads, group_size)
        elements = self.heads * self.query_head_size + kv_heads * (self.query_head_size + self.value_head_size)
        return tokens * elements * self.element_bytes

    def output_bytes(self, tokens: float) -> float:
        return tokens * self.heads * self.value_head_size * self.element_bytes


@dataclass(frozen=True)
class ExchangeMethod:
    """How an implementation exchanges.

    collectives: in one direction.
    query_key_value_passes, output_passes: how often they are read and written again in memory, packing and unpacking.
    wait_seconds: by which ranks come late to a collective, beyond what a benchmark of the fabric shows.
    """

    collectives: int
    query_key_value_passes: float
    output_passes: float
    wait_seconds: float = 0.0


# `all_to_all.py` on a GPU: q, k and v in one launch, packed and not unpacked; the output in one, unpacked and not
# packed; backward the other way round. Its wait is not known: no run of it on a cluster is published.
OURS = ExchangeMethod(collectives=2, query_key_value_passes=1, output_passes=1)


@dataclass(frozen=True)
class Transfer:
    """Seconds of one collective: its latency, and what it keeps each link busy for, 0 where it does not use it."""

    latency_seconds: float
    within_seconds: float
    across_seconds: float


@dataclass(frozen=True)
class ExchangeCost:
    """Of one rank, in one layer and direction; sums of these are of several waves.

    within_bytes, across_bytes: sent to ranks of its own domain, and of others; of the mean rank of the domain that
        most bytes leave, `leaving_bytes` of all its ranks.
    latency_seconds, within_seconds, across_seconds, copy_seconds: each taken alone.
    seconds: together, as the module says.
    """

    within_bytes: float = 0
    across_bytes: float = 0
    leaving_bytes: float = 0
    latency_seconds: float = 0
    within_seconds: float = 0
    across_seconds: float = 0
    copy_seconds: float = 0
    seconds: float = 0

    def __add__(self, other: ExchangeCost) -> ExchangeCost:
        return ExchangeCost(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    @property
    def sent_bytes(self) -> float:
        return self.within_bytes + self.across_bytes


def _values(cost: ExchangeCost) -> tuple[float, ...]:
    return tuple(vars(cost).values())


@dataclass(frozen=True)
class ExchangeModel:
    """Knows what a wave costs on a cluster.

    placement: where the ranks of all CP groups sit, which exchange at the same time.
    """

    cluster: ClusterSpec
    shape: AttentionShape
    placement: Placement
    method: ExchangeMethod = OURS

    def of_wave(self, group_size: int, tokens: float) -> ExchangeCost:
        """Args: tokens: t, that a rank holds of the wave."""
        if group_size == 1:
            return ExchangeCost()
        crossing = self.placement.crossing(group_size)
        query_key_value = self.shape.query_key_value_bytes(tokens, group_size)
        output = self.shape.output_bytes(tokens)
        to_a_peer = (query_key_value + output) / group_size
        # Seconds of links are in proportion to bytes: of all collectives together they are those of one.
        whole, passes = self.transfer(group_size, query_key_value + output), self.method
        latency_seconds = whole.latency_seconds * passes.collectives
        copy_seconds = self.copy_seconds(
            query_key_value * passes.query_key_value_passes + output * passes.output_passes
        )
        return ExchangeCost(
            to_a_peer * (group_size - 1 - crossing.across),
            to_a_peer * crossing.across,
            to_a_peer * crossing.leaving,
            latency_seconds,
            whole.within_seconds,
            whole.across_seconds,
            copy_seconds,
            latency_seconds + max(whole.within_seconds, whole.across_seconds) + copy_seconds,
        )

    def transfer(self, group_size: int, exchanged_bytes: float) -> Transfer:
        """One collective in groups of K. exchanged_bytes: of a rank's tensors, of which a K-th goes to each peer."""
        cluster, crossing = self.cluster, self.placement.crossing(group_size)
        to_a_peer = exchanged_bytes / group_size
        together = [ranks for ranks in crossing.together if ranks > 1]
        latencies = [cluster.within_latency_seconds(ranks) for ranks in together]
        within_seconds = max(
            (to_a_peer * (ranks - 1) / cluster.within_bytes_per_second(ranks) for ranks in together), default=0.0
        )
        across_seconds = 0.0
        if crossing.leaving:
            latencies.append(cluster.across_latency_seconds())
            across_seconds = to_a_peer * crossing.leaving / cluster.across_bytes_per_second(crossing.domains)
        return Transfer(max(latencies) + self.method.wait_seconds, within_seconds, across_seconds)

    def copy_seconds(self, copied_bytes: float) -> float:
        """Of one pass over memory, which reads them and writes them."""
        return 2 * copied_bytes / (self.cluster.memory_bytes_per_second * COPY_SHARE_OF_PEAK)

    def of_plan(self, plan: BatchPlan) -> ExchangeCost:
        """All waves, one after the other."""
        return sum((self.of_wave(w.group_size, sum(w.lengths) / plan.ranks) for w in plan.waves), ExchangeCost())

    def cost_of(self, seq_length: int) -> CostOf:
        """For `plan_batch`: seconds of a wave for its latency, and of each N/K rows of S tokens."""

        def cost_of(group_size: int) -> WaveCost:
            cost = self.of_wave(group_size, seq_length / group_size)
            return WaveCost(cost.latency_seconds, cost.seconds - cost.latency_seconds)

        return cost_of
