#!/usr/bin/env python
"""Draw docs/plans.svg: which rank holds what of each sequence, as the planner says."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from megatron_basp.plan import BatchPlan, Limits, plan_batch

RANKS, RANKS_PER_NODE, SEQ_LENGTH = 8, 4, 8
COLOURS = ["tab:blue", "tab:orange", "tab:green"]


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/plans.svg")
    heads = Limits(heads=8, kv_heads=8)
    all_ranks = Limits(heads=8, kv_heads=8, group_size=RANKS)
    panels = [
        ("Ulysses, 2 sequences", plan_batch([SEQ_LENGTH] * 2, RANKS, all_ranks)),
        ("BASP, 2 sequences", plan_batch([SEQ_LENGTH] * 2, RANKS, heads)),
        ("BASP, 3 sequences: two waves", plan_batch([SEQ_LENGTH] * 3, RANKS, heads)),
    ]
    pyplot.rcParams.update({"svg.hashsalt": "plans", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 2.9), sharey=True, layout="constrained")
    for ax, (title, plan) in zip(axes, panels, strict=True):
        draw(ax, plan)
        ax.set_title(f"{title}\n{across_nodes(plan):.0%} of q, k, v and output crosses nodes", fontsize=9)
    axes[0].set_ylabel("tokens on a rank")
    figure.savefig(target, metadata={"Date": None})


def draw(ax: Axes, plan: BatchPlan) -> None:
    """A stack of shards for each rank; every stack is T = B·S/N high."""
    for rank in range(plan.ranks):
        bottom = 0.0
        for share in plan.shares(rank):
            for row in share.rows:
                height = share.stop - share.start
                ax.bar(rank, height, 0.9, bottom, color=COLOURS[row], edgecolor="white")
                ax.text(rank, bottom + height / 2, "ABC"[row], ha="center", va="center", color="white")
                bottom += height
    ax.axvline(RANKS_PER_NODE - 0.5, color="0.3", linestyle=":")
    ax.set_xticks(range(plan.ranks))
    ax.set_yticks([])
    ax.set_xlabel(f"rank   (nodes of {RANKS_PER_NODE})")
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(y=0.15)


def across_nodes(plan: BatchPlan) -> float:
    """The part of a rank's heads that it sends to other nodes, a mean over its tokens."""
    shares = plan.shares(0)
    sent = sum(share.tokens * max(0, share.group_size - RANKS_PER_NODE) / share.group_size for share in shares)
    return sent / plan.tokens


if __name__ == "__main__":
    main()
