"""What a cluster can do: arithmetic, memory, links inside a node and across nodes. Pure.

From the YAML files under `configs/hardware/`, where every figure stands beside its source, or one's own, which
`megatron-basp bench fabric` measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_basp.errors import ConfigurationError


@dataclass(frozen=True)
class WithinNode:
    """All-to-all among GPUs of one node (or one NVLink domain), by the number of GPUs that take part.

    Time = latency + bytes that a GPU sends to its peers / rate. Sizes between two entries take the next larger one;
    above the largest, the largest.
    """

    latency_seconds: Mapping[int, float]
    bytes_per_second: Mapping[int, float]


@dataclass(frozen=True)
class AcrossNodes:
    """The fabric between nodes.

    latency_seconds: of one collective that leaves the node.
    bytes_per_second_per_nic: one way, by the data sheet.
    nics_per_node: network interfaces.
    all_to_all_uses_all_nics: whether the node's share of an all-to-all is spread over them, or goes through one.
    share_of_rate: what an all-to-all reaches of the interfaces' rate, by the number of nodes that it spans.
    ring_share_of_rate: what rings (all-reduce, all-gather, reduce-scatter) reach of it.
    """

    latency_seconds: float
    bytes_per_second_per_nic: float
    nics_per_node: int
    all_to_all_uses_all_nics: bool
    share_of_rate: Mapping[int, float]
    ring_share_of_rate: float


@dataclass(frozen=True)
class ClusterSpec:
    """Nodes of equal GPUs.

    nodes: their number, or None for as many as a job takes.
    gpus_per_node: GPUs that fast links join; a rack where NVLink spans one.
    memory_bytes, memory_bytes_per_second: of one GPU.
    peak_flops_per_second: dense, by precision (`bf16`, `fp16`, `fp32`, …).
    matmul_share_of_peak: what the matrix products of a training step reach of it.
    attention_flops_per_second: causal attention, forward and backward together, by head size and sequence length.
    ring_bytes_per_second: bus bandwidth of all-reduce, all-gather and reduce-scatter inside a node.
    across: the fabric between nodes, or None where there is one node.
    """

    name: str
    nodes: int | None
    gpus_per_node: int
    memory_bytes: float
    memory_bytes_per_second: float
    peak_flops_per_second: Mapping[str, float]
    matmul_share_of_peak: float
    attention_flops_per_second: Mapping[int, Mapping[int, float]]
    ring_bytes_per_second: float
    within: WithinNode
    across: AcrossNodes | None = field(repr=False)

    def within_latency_seconds(self, gpus: int) -> float:
        return _at_least(self.within.latency_seconds, gpus)

    def within_bytes_per_second(self, gpus: int) -> float:
        return _at_least(self.within.bytes_per_second, gpus)

    def across_latency_seconds(self) -> float:
        return self._fabric().latency_seconds

    def across_bytes_per_second(self, nodes: int) -> float:
        """What an all-to-all over that many nodes carries out of one node, of all its GPUs together."""
        across = self._fabric()
        nics = across.nics_per_node if across.all_to_all_uses_all_nics else 1
        return nics * across.bytes_per_second_per_nic * _at_least(across.share_of_rate, nodes)

    def ring_across_bytes_per_second(self) -> float:
        """What rings carry out of one node, of all its GPUs together."""
        across = self._fabric()
        return across.nics_per_node * across.bytes_per_second_per_nic * across.ring_share_of_rate

    def _fabric(self) -> AcrossNodes:
        if self.across is None:
            raise ConfigurationError(
                f"cluster {self.name} has one node of {self.gpus_per_node} GPUs: use no more ranks than that, or a "
                f"cluster with across_nodes"
            )
        return self.across


def _at_least(table: Mapping[int, float], size: int) -> float:
    """The entry of the smallest key that is not below `size`; of the largest key if there is none."""
    return table[min((key for key in table if key >= size), default=max(table))]


def cluster_from_mapping(name: str, content: Mapping[str, Any]) -> ClusterSpec:
    """From the content of a YAML file; its units are GB (1e9 bytes), GB/s, µs and TFLOP/s.

    Raises:
        ConfigurationError: names the key that is missing, not known, or not positive.
    """
    top = _Keys(name, content)
    within = _Keys(f"{name}, within_node", top.mapping("within_node"))
    alone = content.get("nodes") == 1 and "across_nodes" not in content
    attention = _Keys(f"{name}, attention_teraflops", top.mapping("attention_teraflops"))
    spec = ClusterSpec(
        name=name,
        nodes=top.whole("nodes") if "nodes" in content else None,
        gpus_per_node=top.whole("gpus_per_node"),
        memory_bytes=top.number("memory_gigabytes") * 1e9,
        memory_bytes_per_second=top.number("memory_gigabytes_per_second") * 1e9,
        peak_flops_per_second=top.table("peak_teraflops", str, 1e12),
        matmul_share_of_peak=top.share("matmul_share_of_peak"),
        attention_flops_per_second={size: attention.table(size, int, 1e12) for size in attention.sizes()},
        ring_bytes_per_second=top.number("ring_gigabytes_per_second") * 1e9,
        within=WithinNode(
            latency_seconds=within.table("latency_microseconds", int, 1e-6),
            bytes_per_second=within.table("gigabytes_per_second", int, 1e9),
        ),
        across=None if alone else _across_nodes(_Keys(f"{name}, across_nodes", top.mapping("across_nodes"))),
    )
    for keys in (top, within):
        keys.check_all_used()
    return spec


def _across_nodes(keys: _Keys) -> AcrossNodes:
    across = AcrossNodes(
        latency_seconds=keys.number("latency_microseconds") * 1e-6,
        bytes_per_second_per_nic=keys.number("gigabytes_per_second_per_nic") * 1e9,
        nics_per_node=keys.whole("nics_per_node"),
        all_to_all_uses_all_nics=keys.boolean("all_to_all_uses_all_nics"),
        share_of_rate=keys.table("share_of_rate", int, 1.0, largest=1.0),
        ring_share_of_rate=keys.share("ring_share_of_rate"),
    )
    keys.check_all_used()
    return across


def load_cluster(name_or_file: str, folder: Path) -> ClusterSpec:
    """A cluster of `configs/hardware/` by its stem, or from a YAML file.

    Raises:
        ConfigurationError: there is no such cluster (lists those there are), or the file is not one.
    """
    file = Path(name_or_file)
    if file.suffix not in (".yaml", ".yml"):
        file = folder / f"{name_or_file}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        raise ConfigurationError(
            f"there is no cluster {name_or_file}: use one of {known}, or a .yaml file; `megatron-basp bench fabric` "
            f"measures the machine that it runs on and writes one"
        )
    try:
        content = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{file} is not YAML: {str(error).splitlines()[0]}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} is no mapping of names to values")
    return cluster_from_mapping(file.stem, content)


class _Keys:
    """Takes figures out of a mapping, and knows which were left."""

    def __init__(self, where: str, content: Mapping[Any, Any]) -> None:
        self._where, self._content = where, content
        self._used: set[Any] = set()

    def _take(self, key: Any) -> Any:
        if key not in self._content:
            raise ConfigurationError(f"cluster {self._where}: {key} is missing")
        self._used.add(key)
        return self._content[key]

    def _positive(self, key: Any, value: Any, largest: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= largest:
            bound = "a positive number" if largest == float("inf") else f"a number above 0 and at most {largest:g}"
            raise ConfigurationError(f"cluster {self._where}: {key} must be {bound}, got {value!r}")
        if value == float("inf"):
            raise ConfigurationError(f"cluster {self._where}: {key} must be finite, got {value!r}")
        return float(value)

    def number(self, key: str) -> float:
        return self._positive(key, self._take(key), float("inf"))

    def share(self, key: str) -> float:
        return self._positive(key, self._take(key), 1.0)

    def whole(self, key: str) -> int:
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(
                f"cluster {self._where}: {key} must be a whole number of 1 or more, got {value!r}"
            )
        return value

    def boolean(self, key: str) -> bool:
        value = self._take(key)
        if not isinstance(value, bool):
            raise ConfigurationError(f"cluster {self._where}: {key} must be true or false, got {value!r}")
        return value

    def mapping(self, key: Any) -> Mapping[Any, Any]:
        value = self._take(key)
        if not isinstance(value, dict) or not value:
            raise ConfigurationError(f"cluster {self._where}: {key} must be a mapping with entries, got {value!r}")
        return value

    def table[Key](self, key: Any, kind: type[Key], unit: float, largest: float = float("inf")) -> dict[Key, float]:
        table = self.mapping(key)
        for size in table:
            if kind is int:
                self._check_size(key, size)
            elif not isinstance(size, kind):
                raise ConfigurationError(f"cluster {self._where}: {key} has an entry for {size!r}, which is no name")
        return {size: self._positive(f"{key}[{size}]", value, largest) * unit for size, value in table.items()}

    def sizes(self) -> list[int]:
        for size in self._content:
            self._check_size("it", size)
        return sorted(self._content)

    def _check_size(self, key: Any, size: Any) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigurationError(f"cluster {self._where}: {key} has an entry for {size!r}, which is no size")

    def check_all_used(self) -> None:
        if unknown := sorted(set(map(str, self._content)) - set(map(str, self._used))):
            raise ConfigurationError(f"cluster {self._where}: {unknown[0]} is not a key that is known")
