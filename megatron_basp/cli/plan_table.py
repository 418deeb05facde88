"""What `megatron-basp plan` prints for a person."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_basp.cli.plan_result import PlanResult, shares
from megatron_basp.cost_model import StepCost
from megatron_basp.plan import BatchPlan
from megatron_basp.verdict import verdict

COLUMNS = (
    "tokens\na rank",
    "memory\nGB",
    "exchange\nMB",
    "exchange\nms",
    "across\nnodes MB",
    "step\nms",
    "speed-up\non Ulysses",
    "speed-up\non plain",
)


def print_result(result: PlanResult) -> None:
    console = Console(width=120, highlight=False)
    comparison, chosen = result.comparison, result.comparison.chosen
    console.print(f"[bold]{result.title}[/bold]\n{result.sizes}")
    if result.search is not None:
        console.print(
            f"the best of {result.search.tried} runs with BASP and with plain flags, {result.search.too_large} of "
            f"which need more memory than there is"
        )
    console.print(_table(result))
    if result.why_no_ulysses:
        console.print(f"no Ulysses to compare with: {result.why_no_ulysses}")
    for candidate in comparison.candidates:
        console.print(f"[bold]{name(candidate.plan)}[/bold]: {candidate.reason}")
    for why in comparison.refused.values():
        console.print(f"no wave at {why}")
    cost = chosen.cost
    parts = [f"{part} {share:.1%}" for part, share in shares(result.training, cost).items() if share >= 0.0005]
    console.print(
        f"\nthe step of the choice: {_milliseconds(cost.step_seconds)}; {_milliseconds(cost.least_seconds)} if all "
        f"communication were hidden, {_milliseconds(cost.most_seconds)} if none"
    )
    console.print(f"in it: {', '.join(parts)}")
    flags = {"BASP": result.flags, "equal plain flags": result.equivalent_flags or f"none, {result.why_no_equivalent}"}
    if result.plain_flags != result.equivalent_flags:
        flags["fastest plain flags"] = result.plain_flags or "none"
    console.print()
    for label, text in flags.items():
        console.print(f"[bold]{label}[/bold]: {text}", soft_wrap=True)
    console.print(f"\n[bold]{verdict(comparison)}[/bold]")
    console.print(
        "Of a rank: tokens of a micro-batch; the rest of a step of M micro-batches. exchange, across nodes: what "
        "attention's exchanges send. plain flags: stock Megatron by a2a over the same devices and samples, with the "
        "same tensor, pipeline and expert parallelism; others may be faster. Its p2p and all-gather are not modelled.",
        style="dim",
    )


def _table(result: PlanResult) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("rows at K")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for candidate in result.comparison.candidates:
        is_chosen = candidate is result.comparison.chosen
        table.add_row(
            name(candidate.plan),
            *_figures(result, candidate.plan.tokens, candidate.cost),
            "chosen" if is_chosen else "" if candidate.fits_memory else "too large",
            style="bold" if is_chosen else None,
        )
    plain = result.comparison.plain
    if plain is not None:
        table.add_section()
        table.add_row(
            f"plain: {plain.micro_batch_size} at CP={plain.context_parallel_size}",
            *_figures(result, plain.training.tokens, plain.cost),
            f"M = {plain.training.micro_batches}",
        )
    return table


def _figures(result: PlanResult, tokens: int, cost: StepCost) -> list[str]:
    speedups = (result.over_ulysses(cost), result.over_plain(cost))
    return [
        str(tokens),
        f"{cost.memory.total_bytes / 1e9:.1f}",
        f"{cost.exchange_sent_bytes / 1e6:.1f}",
        f"{cost.exchange_seconds * 1e3:.1f}",
        f"{cost.exchange_across_bytes / 1e6:.1f}",
        f"{cost.step_seconds * 1e3:.1f}",
        *("-" if speedup is None else f"{speedup:.2f}" for speedup in speedups),
    ]


def name(plan: BatchPlan) -> str:
    """`2 at K=4, 1 at K=8`."""
    return ", ".join(f"{len(wave.rows)} at K={wave.group_size}" for wave in plan.waves)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
