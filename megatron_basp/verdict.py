"""Would plain flags do as well, in a few sentences. Pure."""

from __future__ import annotations

from megatron_basp.candidates import Comparison, PlainFlags

# Closer than that, two modelled steps are the same: the model does not resolve it.
RESOLVED_SHARE = 0.01


def verdict(comparison: Comparison) -> str:
    """BASP's choice against stock Megatron over the same devices and samples."""
    plan = comparison.chosen.plan
    found = _against_modelled(comparison)
    if comparison.equivalent is None and len(plan.waves) == 1:
        size = plan.waves[0].group_size
        rows = len(plan.lengths) * size // plan.ranks
        found += (
            f" Not modelled: --context-parallel-size {size} --micro-batch-size {rows} by stock's p2p or all-gather, "
            f"since its a2a does not take so few key-value heads; it may do as well."
        )
    return found


def _against_modelled(comparison: Comparison) -> str:
    plain, equivalent = comparison.plain, comparison.equivalent
    seconds = comparison.chosen.cost.step_seconds
    if plain is None:
        return "No plain flags take these samples on these ranks by a2a within their memory."
    more = seconds / plain.cost.step_seconds - 1
    if more > RESOLVED_SHARE:
        same = f" The same as BASP's choice is {_sizes(equivalent)}." if equivalent else ""
        return (
            f"Plain flags are faster here: a step of stock Megatron with {_sizes(plain)} and {_micro_batches(plain)} "
            f"takes {plain.cost.step_seconds * 1e3:.0f} ms, and BASP's {more:.1%} more.{same}"
        )
    if equivalent is not None:
        return f"Plain flags do as well here: {_sizes(equivalent)} of stock Megatron is the same as BASP's choice."
    if more >= -RESOLVED_SHARE:
        return (
            f"Plain flags do as well here: a step of stock Megatron with {_sizes(plain)} and {_micro_batches(plain)} "
            f"takes the same time to {RESOLVED_SHARE:.0%}, which the model does not resolve."
        )
    return (
        f"BASP is faster: a step of the fastest plain flags by a2a, {_sizes(plain)} and {_micro_batches(plain)}, "
        f"takes {plain.cost.step_seconds / seconds - 1:.1%} more."
    )


def _sizes(plain: PlainFlags) -> str:
    return f"--context-parallel-size {plain.context_parallel_size} --micro-batch-size {plain.micro_batch_size}"


def _micro_batches(plain: PlainFlags) -> str:
    number = plain.training.micro_batches
    return f"{number} micro-batch{'es' if number > 1 else ''}"
