"""Documents as `megatron-basp bench train` writes them, made up: what reads them is held to these."""

from __future__ import annotations

from typing import Any


def bench_document(
    micro_batch_size: int = 2,
    group_sizes: tuple[int, ...] = (4,),
    link_mbit: float | None = 500,
    ulysses_share: float | None = 0.35,
    step_milliseconds: tuple[float, float, float, float] = (1000, 750, 760, 700),
    shape: dict[str, int] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """step_milliseconds: of Ulysses, BASP, plain flags and without exchange. changes: of the whole document."""
    modes = dict(zip(("ulysses", "basp", "reflagged", "no_exchange"), step_milliseconds, strict=True))
    ulysses = step_milliseconds[0]
    shares = {"ulysses": ulysses_share, "basp": 0.1, "reflagged": 0.1, "no_exchange": 0.0}
    link = changes.get("link", "measured")
    return {
        "command": f"megatron-basp bench train --cluster 2x4 --link-mbit {link_mbit}",
        "date": "2026-01-02T03:04:05+00:00",
        "is_finished": True,
        "versions": {"megatron_basp": "0.1.0", "torch": "2.14.1"},
        "machine": {"device": "x86_64", "cores": 2},
        "cluster": {"nodes": 2, "ranks_per_node": 4},
        "backend": "gloo",
        "link": link,
        "compute": "real",
        "shape": {
            "layers": 2,
            "heads": 16,
            "kv_heads": 8,
            "head_size": 64,
            "seq_length": 1024,
            "micro_batch_size": micro_batch_size,
            "micro_batches": 1,
            "ranks": 8,
            **(shape or {}),
        },
        "modes": {"ulysses": {"group_sizes": [8]}, "basp": {"group_sizes": list(group_sizes)}},
        "rows": [
            {
                "mode": mode,
                "link_mbit": link_mbit,
                "link": link,
                "step_milliseconds": milliseconds,
                "exchange_milliseconds": None if shares[mode] is None else shares[mode] * milliseconds,
                "exchange_share": shares[mode],
                "speedup_over_ulysses": ulysses / milliseconds,
                "share_of_bound": step_milliseconds[3] / milliseconds,
                "peak_memory_bytes": None,
            }
            for mode, milliseconds in modes.items()
        ],
        **changes,
    }
