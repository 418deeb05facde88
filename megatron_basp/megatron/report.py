"""What a run is going to do, in one table at its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from megatron_basp.megatron.settings import Settings
from megatron_basp.placement import aligned_blocks
from megatron_basp.process_groups import SequenceGroups
from megatron_basp.run_flags import plain_flags


def print_plan(
    settings: Settings,
    cp_groups: Sequence[Sequence[int]],
    domain_of_rank: Mapping[int, object],
    groups: SequenceGroups,
    communicator_bytes: int | None,
    carried_by: str,
) -> None:
    """Print the table of a run; for rank 0.

    Args:
        cp_groups: global ranks of every CP group.
        domain_of_rank: which fast domain each global rank is in.
        groups: those of this rank.
        communicator_bytes: what `groups.connect()` said.
        carried_by: what `with_transports` said.
    """
    table = Table(title=f"sequence parallelism by groups: {settings.mode}", show_header=False, title_justify="left")
    samples, data_parallel = settings.global_batch_size, settings.data_parallel_size
    accumulation = samples // (settings.micro_batch_size * data_parallel)
    table.add_row("context-parallel ranks N", str(settings.ranks))
    table.add_row(
        "samples an iteration",
        f"{samples} = B {settings.micro_batch_size} · DP {data_parallel} · {accumulation} micro-batches",
    )
    for batch_size in settings.batch_sizes():
        plan = settings.plan(batch_size, settings.seq_length)
        use = "training" if batch_size == settings.micro_batch_size else "evaluation"
        table.add_section()
        table.add_row(f"micro-batch B, {use}", f"{batch_size} sequences of S = {settings.seq_length} tokens")
        table.add_row("tokens a rank T", f"{plan.tokens} = B·S/N")
        for wave in plan.waves:
            table.add_row(
                f"  sequences at K = {wave.group_size}: {len(wave.rows)}",
                _groups(wave.group_size, cp_groups, domain_of_rank, settings),
            )
        if settings.exchange is not None:
            cost = settings.exchange.of_plan(plan)
            table.add_row(
                "exchange of a layer, one way, modelled",
                f"{cost.seconds * 1e3:.3g} ms on {settings.exchange.cluster.name}: {cost.sent_bytes / 1e6:.3g} MB a "
                f"rank, {cost.across_bytes / 1e6:.3g} MB of it to other nodes",
            )
        table.add_row(
            "plain Megatron flags that do the same",
            plain_flags(plan, settings.limits) or "none: sequences get different numbers of ranks",
        )
    table.add_section()
    own = len(groups.own)
    table.add_row("process groups made for this", f"{groups.created} in the world, this rank is in {own}")
    table.add_row("device memory of the exchange's communicators", _memory(communicator_bytes))
    table.add_row("the exchange is carried by", carried_by)
    table.add_row("parts in which a rank's heads are exchanged", _chunks(settings))
    Console(width=120).print(table)


def _chunks(settings: Settings) -> str:
    by_size = ", ".join(f"{chunks} at K = {size}" for size, chunks in settings.chunks.items() if size > 1)
    if not by_size:
        return "none: nothing is exchanged"
    if settings.overlap_chunks is not None:
        return f"{by_size}: as --basp-overlap-chunks says"
    if settings.exchange is not None:
        return f"{by_size}: the least seconds on {settings.exchange.cluster.name}, modelled"
    return f"{by_size}: without --basp-cluster nothing is known of links"


def _memory(communicator_bytes: int | None) -> str:
    if communicator_bytes is None:
        return "none: gloo connects through the host's memory"
    return f"{communicator_bytes / 2**20:.0f} MiB on this rank, measured"


def _groups(
    group_size: int, cp_groups: Sequence[Sequence[int]], domain_of_rank: Mapping[int, object], settings: Settings
) -> str:
    blocks = [block for cp_ranks in cp_groups for block in aligned_blocks(cp_ranks, group_size)]
    ranks = ", ".join(str(list(block)) for block in blocks[:4])
    number = f"g = {settings.ranks // group_size} groups a CP group: ranks {ranks}"
    more = f" and {len(blocks) - 4} more" if len(blocks) > 4 else ""
    if group_size == 1:
        return f"{number}{more}; nothing is exchanged"
    domain = "host" if settings.domain_devices is None else f"domain of {settings.domain_devices} devices"
    within = sum(len({domain_of_rank[rank] for rank in block}) == 1 for block in blocks)
    where = (
        f"each inside one {domain}"
        if within == len(blocks)
        else f"{len(blocks) - within} of {len(blocks)} cross the border of a {domain}"
    )
    return f"{number}{more}; {where}"
