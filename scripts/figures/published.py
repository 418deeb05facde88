"""Published figures beside what the cost model says of each: `docs/validation.yaml`, row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_basp.arithmetic_cost import arithmetic_of, attention_flops_per_second
from megatron_basp.cluster import ClusterSpec, cluster_from_mapping
from megatron_basp.cost_model import exchange_model, exchanges_per_layer, step_cost
from megatron_basp.exchange_cost import AttentionShape, ExchangeModel
from megatron_basp.library import CLUSTERS, named_model
from megatron_basp.model_spec import ModelSpec, model_from_flags
from megatron_basp.paper_model import DEEPSPEED, SEPARATE, Modes, model_modes, ulysses_plan
from megatron_basp.parallel_cost import ring
from megatron_basp.placement import Placement
from megatron_basp.training_spec import Parallelism, TrainingSpec

ROWS = Path(__file__).parents[2] / "docs" / "validation.yaml"
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Row:
    """One published figure. published: a number, or the two ends of a range. modelled: None where `unusable`.

    bar: in percent of the published figure, or in points where it is a share. explanation: of a miss or of its use.
    """

    group: str
    kind: str
    name: str
    published: float | tuple[float, float] | None
    modelled: float | None
    bar: float
    use: str
    explanation: str
    miss_expected: bool

    @property
    def is_share(self) -> bool:
        return "share" in self.kind

    @property
    def deviation(self) -> float | None:
        """Percent, or points of a share, from the published figure or the nearer end of its range; 0 inside."""
        if self.modelled is None or self.published is None:
            return None
        least, most = self.published if isinstance(self.published, tuple) else (self.published, self.published)
        nearest = min(max(self.modelled, least), most)
        return 100 * (self.modelled - nearest) / (1 if self.is_share else nearest)

    @property
    def is_judged(self) -> bool:
        return self.use in ("held", "fitted")

    @property
    def is_within(self) -> bool:
        assert self.deviation is not None, self.name
        return abs(self.deviation) <= self.bar


@dataclass(frozen=True)
class Group:
    title: str
    source: str
    bar: float
    rows: tuple[Row, ...]


def groups(file: Path = ROWS) -> list[Group]:
    """All of the file, each row that can be modelled with its figure."""
    content = yaml.safe_load(file.read_text())
    models = {name: model_from_flags(flags) for name, flags in content["models"].items()}
    return [
        Group(group["title"], group["source"], group["bar"], tuple(_row(group, row, models) for row in group["rows"]))
        for group in content["groups"]
    ]


def _row(group: Mapping[str, Any], row: Mapping[str, Any], models: Mapping[str, ModelSpec]) -> Row:
    use = row.get("use", "held")
    published, modelled, name = row.get("published"), None, row.get("name")
    if use != "unusable":
        case = {"cluster": group["cluster"], "constants": group.get("constants"), **group.get("case", {}), **row}
        name = group["label"].format_map({key: _Worded(value) for key, value in {"recompute": "", **case}.items()})
        if "model" in case:
            case["model"] = models.get(case["model"]) or named_model(case["model"])
            case["constants"] = (case["constants"] or {}).get(row.get("model") or group["case"]["model"])
        modelled = MODELLED[group["kind"]](_cluster(case, group.get("with", {})), case)
        if case["constants"]:
            published = BY_CONSTANTS[group["kind"]](case)
    assert name and ("reason" in row) == (use in ("inconsistent", "unusable")), row
    return Row(
        group=group["title"],
        kind=group["kind"],
        name=name,
        published=tuple(published) if isinstance(published, list) else published,
        modelled=modelled,
        bar=group["bar"],
        use=use,
        explanation=row.get("reason") or row.get("miss", ""),
        miss_expected="miss" in row,
    )


class _Worded(str):
    """In a label, `{key:, words}` gives the words where the value is not empty."""

    def __new__(cls, value: object) -> _Worded:
        return super().__new__(cls, value)

    def __format__(self, words: str) -> str:
        return (words if self else "") if words else str(self)


def _cluster(case: Mapping[str, Any], other: Mapping[str, Any]) -> ClusterSpec:
    content = yaml.safe_load((CLUSTERS / f"{case['cluster']}.yaml").read_text())
    for key, value in other.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    cluster = cluster_from_mapping(case["cluster"], content)
    share = case.get("attention_share", 1.0)
    rates = {
        size: {length: rate * share for length, rate in table.items()}
        for size, table in cluster.attention_flops_per_second.items()
    }
    return replace(cluster, attention_flops_per_second=rates)


def _training(cluster: ClusterSpec, case: Mapping[str, Any]) -> TrainingSpec:
    data_parallel = case.get("dp", 1)
    parallelism = Parallelism(
        tensor_model_parallel_size=case.get("tp", 1),
        context_parallel_size=case.get("cp", 1),
        data_parallel_size=data_parallel,
        sharding=case.get("sharding", "no_shard"),
        recompute=case.get("recompute", "none"),
    )
    samples = case["micro_batch"] * case.get("micro_batches", 1) * data_parallel
    return TrainingSpec(
        case["model"],
        cluster,
        parallelism,
        case["seq"],
        case["micro_batch"],
        samples,
        gradient_bytes=case.get("gradient_bytes", 4),
    )


def all_to_all(cluster: ClusterSpec, case: Mapping[str, Any]) -> float:
    gpus = case["gpus"]
    sent = case["mebibytes"] * MEBIBYTE * (gpus - 1) / gpus
    return 1e3 * (cluster.within_latency_seconds(gpus) + sent / cluster.within_bytes_per_second(gpus))


def across_rate(cluster: ClusterSpec, case: Mapping[str, Any]) -> float:
    """Of large messages: MiB of a GPU's tensor, what stays in the node included, a millisecond."""
    nodes = case["gpus"] // cluster.gpus_per_node
    cluster = replace(cluster, across=replace(cluster.across, nics_per_node=case["cards"]))
    of_gpu = cluster.across_bytes_per_second(nodes) / cluster.gpus_per_node
    return of_gpu * nodes / (nodes - 1) / MEBIBYTE / 1e3


def ring_rate(cluster: ClusterSpec, case: Mapping[str, Any]) -> float:
    traffic = ring(cluster, 1e9, case["gpus"], case["apart"])
    return traffic.sent_bytes / traffic.seconds / 1e9


def interpolation(cluster: ClusterSpec, case: Mapping[str, Any]) -> float:
    size, length = case["head_size"], case["seq"]
    others = {key: rate for key, rate in cluster.attention_flops_per_second[size].items() if key != length}
    cluster = replace(cluster, attention_flops_per_second={size: others})
    return attention_flops_per_second(cluster, size, length) / 1e12


def attention_forward(cluster: ClusterSpec, case: Mapping[str, Any]) -> float:
    gpus, heads, size, length = cluster.gpus_per_node, case["heads"], case["head_size"], case["seq"]
    tokens = case["samples"] * length / gpus
    one_node = Placement((("node",) * gpus,))
    exchange = ExchangeModel(cluster, AttentionShape(heads, heads, size, size, 2), one_node, SEPARATE)
    seconds = 2 * tokens * length * heads * size / attention_flops_per_second(cluster, size, length)
    return 1 / (seconds + exchange.of_wave(gpus, tokens).seconds)


def arithmetic(cluster: ClusterSpec, case: Mapping[str, Any]) -> float:
    return 1e3 * arithmetic_of(_training(cluster, case)).stage_seconds(case["model"].layers)


def flexsp_share(cluster: ClusterSpec, case: Mapping[str, Any]) -> float:
    """As many sequences as make `tokens` on a GPU; at least one."""
    case = {**case, "micro_batch": max(1, case["tokens"] * case["cp"] // case["seq"])}
    training = _training(cluster, case)
    exchange = exchange_model(training, SEPARATE).of_plan(ulysses_plan(training)).seconds
    exchange *= exchanges_per_layer(training) * case["model"].layers
    return exchange / (exchange + arithmetic_of(training).stage_seconds(case["model"].layers))


def mfu(cluster: ClusterSpec, case: Mapping[str, Any]) -> float:
    training, model, length = _training(cluster, case), case["model"], case["seq"]
    seconds = step_cost(training, ulysses_plan(training)).step_seconds
    parameters = model.parameters + length * model.hidden  # its embedding of positions
    flops = 6 * parameters * length + 12 * model.layers * model.hidden * length**2
    samples = case["micro_batch"] * case["micro_batches"]
    return 100 * flops * samples / seconds / cluster.peak_flops_per_second["bf16"]


def step(cluster: ClusterSpec, case: Mapping[str, Any]) -> float:
    training = _training(cluster, case)
    return 1e3 * step_cost(training, ulysses_plan(training), SEPARATE).step_seconds


def memory(cluster: ClusterSpec, case: Mapping[str, Any]) -> float:
    training = _training(cluster, case)
    cost = step_cost(training, ulysses_plan(training), SEPARATE).memory
    return (cost.total_bytes - cost.reserved_bytes) / 2**30


def _paper(cluster: ClusterSpec, case: Mapping[str, Any]) -> Modes:
    return model_modes(_training(cluster, case), DEEPSPEED)


def paper_share(cluster: ClusterSpec, case: Mapping[str, Any]) -> float:
    found = _paper(cluster, case)
    return {"Ulysses": found.ulysses, "BASP": found.basp}[case["plan"]].exchange_share


def paper_ratio(cluster: ClusterSpec, case: Mapping[str, Any]) -> float:
    found = _paper(cluster, case)
    return found.ulysses.exchange_seconds / found.basp.exchange_seconds


def paper_speed_up(cluster: ClusterSpec, case: Mapping[str, Any]) -> float:
    return _paper(cluster, case).speedup


def _arithmetic_by_constants(case: Mapping[str, Any]) -> float:
    square, linear = case["constants"]
    return (square * case["seq"] ** 2 + linear * case["seq"]) / case["cp"]


def _share_by_constants(case: Mapping[str, Any]) -> float:
    model = case["model"]
    sent = 4 * 2 * model.layers * model.hidden * case["seq"] * 2 / case["cp"]
    milliseconds = sent / MEBIBYTE / case["rate"]
    return milliseconds / (milliseconds + _arithmetic_by_constants(case))


MODELLED: dict[str, Callable[[ClusterSpec, Mapping[str, Any]], float]] = {
    "all_to_all": all_to_all,
    "across_rate": across_rate,
    "ring": ring_rate,
    "interpolation": interpolation,
    "attention_forward": attention_forward,
    "arithmetic": arithmetic,
    "flexsp_share": flexsp_share,
    "mfu": mfu,
    "step": step,
    "memory": memory,
    "paper_share": paper_share,
    "paper_ratio": paper_ratio,
    "paper_speed_up": paper_speed_up,
}
BY_CONSTANTS = {"arithmetic": _arithmetic_by_constants, "flexsp_share": _share_by_constants}
