"""A hardware file from what was measured; each line says where its figure comes from. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from megatron_basp.cluster import AcrossNodes, ClusterSpec, cluster_from_mapping
from megatron_basp.errors import ConfigurationError
from megatron_basp.fabric_fit import Fit, fit_latency_and_rate


@dataclass
class Measured:
    """All ranks together; figures of one rank, and None until they are measured.

    within: by the ranks of a group inside a host, pairs of bytes that a rank sends to its peers and seconds.
    across: by the hosts of a group that takes all their ranks, pairs of bytes that leave a host and seconds.
    ring_across_bytes_per_second: out of a host, of all its ranks together; None where there is one host.
    attention_flops_per_second: by head size and sequence length.
    """

    device: str
    backend: str
    hosts: int
    ranks_per_host: int
    versions: dict[str, str]
    memory_bytes: int
    matmul_precision: str
    within: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    across: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    ring_bytes_per_second: float | None = None
    ring_across_bytes_per_second: float | None = None
    memory_bytes_per_second: float | None = None
    matmul_flops_per_second: float | None = None
    attention_flops_per_second: dict[int, dict[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """What cannot be measured.

    like: a cluster of the library that the rest is taken from.
    peak_flops_per_second: by the data sheet, of the precision that products are measured in.
    nics_per_node, bytes_per_second_per_nic: network cards, one way, by the data sheet.
    """

    like: ClusterSpec | None = None
    peak_flops_per_second: float | None = None
    nics_per_node: int | None = None
    bytes_per_second_per_nic: float | None = None

    def check(self, hosts: int) -> None:
        """Before an hour of measuring: is there all that so many hosts need?

        Raises:
            ConfigurationError: names what is missing, or what would not be used.
        """
        cards = (self.nics_per_node, self.bytes_per_second_per_nic)
        across = self.like.across if self.like else None
        if hosts > 1 and across is None and None in cards:
            raise ConfigurationError(
                f"network cards cannot be measured, and {hosts} hosts have some: give --nics-per-node and "
                f"--nic-gigabytes-per-second, or --like NAME"
            )
        if hosts == 1 and across is None and cards != (None, None):
            raise ConfigurationError(
                "--nics-per-node and --nic-gigabytes-per-second describe a fabric that one host cannot measure: "
                "start on several with torchrun, or add --like NAME to take what it reaches from there"
            )

    def nics(self) -> tuple[int, float, str]:
        """Their number, rate and source."""
        across = self.like.across if self.like else None
        count = self.nics_per_node or (across.nics_per_node if across else None)
        rate = self.bytes_per_second_per_nic or (across.bytes_per_second_per_nic if across else None)
        assert count and rate, "check() has passed"
        given = [self.nics_per_node is not None, self.bytes_per_second_per_nic is not None]
        source = "given" if all(given) else f"{'given, or ' if any(given) else ''}{self._source()}"
        return count, rate, source

    def _source(self) -> str:
        assert self.like is not None
        return f"taken from {self.like.name}"


@dataclass(frozen=True)
class Fits:
    """Latency and rate of the all-to-all: inside a host by ranks, and by hosts, with the bytes that leave one."""

    within: Mapping[int, Fit]
    across: Mapping[int, Fit]


def fit_exchanges(measured: Measured) -> Fits:
    """Raises ConfigurationError where a group's times show no rate; names the group."""
    return Fits(
        {ranks: _fit(f"{ranks} ranks of a host", times) for ranks, times in measured.within.items()},
        {hosts: _fit(f"{hosts} hosts", times) for hosts, times in measured.across.items()},
    )


def _fit(group: str, times: Sequence[tuple[float, float]]) -> Fit:
    try:
        return fit_latency_and_rate(times)
    except ConfigurationError as error:
        raise ConfigurationError(f"all-to-all of {group}: {error}") from None


def hardware_file(name: str, title: str, measured: Measured, fits: Fits, known: Known) -> str:
    """The text of a file such as those under `configs/hardware/`.

    Args:
        name: of the file, without suffix.
        title: when, by what and on what it was measured.
        measured: all of it.

    Raises:
        ConfigurationError: what is known contradicts what was measured.
    """
    lines = [f"# {line}" for line in title.splitlines()]
    lines += ["# Keys and units: configs/hardware/README.md.", *_devices(measured, known)]
    lines += _within(fits.within, _complete(measured.ring_bytes_per_second))
    if fits.across:
        lines += _measured_across(fits.across, _complete(measured.ring_across_bytes_per_second), known)
    elif known.like and known.like.across:
        lines += _taken_across(known.like.across, known)
    text = "\n".join(lines) + "\n"
    cluster_from_mapping(name, yaml.safe_load(text))
    return text


def _complete(figure: float | None) -> float:
    assert figure is not None, "every step has been measured"
    return figure


def _devices(measured: Measured, known: Known) -> list[str]:
    like = known.like
    nodes = []
    if measured.hosts > 1:
        nodes = [f"nodes: {measured.hosts}  # measured: host names; without this line, as many as a job takes"]
    elif like is None or like.across is None:
        nodes = ["nodes: 1  # measured on one host, which shows nothing of the links between several"]
    elif like.nodes is not None:
        nodes = [f"nodes: {like.nodes}  # taken from {like.name}"]
    precision, product = measured.matmul_precision, _complete(measured.matmul_flops_per_second)
    peaks, source = _peaks(precision, product, known)
    share = product / peaks[precision]
    if share > 1:
        raise ConfigurationError(
            f"a product reached {product / 1e12:.3g} TFLOP/s in {precision}, above the peak of "
            f"{peaks[precision] / 1e12:.3g} ({source}): give this machine's --peak-teraflops"
        )
    return [
        *nodes,
        f"gpus_per_node: {measured.ranks_per_host}  # measured: ranks of a host",
        f"memory_gigabytes: {_number(measured.memory_bytes / 1e9)}  # measured: what the device reports",
        f"memory_gigabytes_per_second: {_number(_complete(measured.memory_bytes_per_second) / 1e9)}  # measured: a "
        f"copy, read and write, on all ranks at once",
        f"peak_teraflops: {_table(peaks, 1e12)}  # {source}",
        f"matmul_share_of_peak: {_number(share)}  # measured: a large {precision} product, of that peak; "
        f"a training step reaches less",
        "attention_teraflops:",
        *[
            f"  {size}: {_table(rates, 1e12)}  # measured: torch's scaled_dot_product_attention, {precision}"
            for size, rates in measured.attention_flops_per_second.items()
        ],
    ]


def _peaks(precision: str, product: float, known: Known) -> tuple[dict[str, float], str]:
    if known.peak_flops_per_second is not None:
        return {precision: known.peak_flops_per_second}, "given"
    if known.like is not None and precision in known.like.peak_flops_per_second:
        return dict(known.like.peak_flops_per_second), f"taken from {known.like.name}"
    return {precision: product}, "measured: what a large product reaches, for want of --peak-teraflops"


def _within(fits: Mapping[int, Fit], ring_bytes_per_second: float) -> list[str]:
    errors = ", ".join(f"{ranks}: {fit.largest_error:.0%}" for ranks, fit in fits.items())
    return [
        f"ring_gigabytes_per_second: {_number(ring_bytes_per_second / 1e9)}  # measured: all-gather, bus bandwidth",
        "within_node:",
        f"  # Measured: seconds = latency + sent bytes / rate; largest error of that fit by ranks {errors}.",
        f"  latency_microseconds: {_table({n: fit.latency_seconds for n, fit in fits.items()}, 1e-6)}  # measured",
        f"  gigabytes_per_second: {_table({n: fit.bytes_per_second for n, fit in fits.items()}, 1e9)}  # measured",
    ]


def _measured_across(fits: Mapping[int, Fit], ring_bytes_per_second: float, known: Known) -> list[str]:
    nics, rate, source = known.nics()
    # More than one card carries shows that several are used.
    all_nics = nics == 1 or max(fit.bytes_per_second for fit in fits.values()) > rate
    carries = rate * (nics if all_nics else 1)
    shares = {hosts: fit.bytes_per_second / carries for hosts, fit in fits.items()}
    ring_share = ring_bytes_per_second / (rate * nics)
    if (largest := max(ring_share, *shares.values())) > 1:
        raise ConfigurationError(
            f"{largest:.2f} times what the network cards carry left a node ({nics} × {rate / 1e9:g} GB/s, {source}): "
            f"give this machine's --nics-per-node and --nic-gigabytes-per-second"
        )
    errors = ", ".join(f"{hosts}: {fit.largest_error:.0%}" for hosts, fit in fits.items())
    return [
        "across_nodes:",
        f"  # Measured: all-to-alls of all ranks of so many hosts; largest error of the fit by hosts {errors}.",
        f"  latency_microseconds: {_number(max(fit.latency_seconds for fit in fits.values()) * 1e6)}  # measured: the "
        f"largest of them",
        f"  gigabytes_per_second_per_nic: {_number(rate / 1e9)}  # {source}",
        f"  nics_per_node: {nics}  # {source}",
        f"  all_to_all_uses_all_nics: {json.dumps(all_nics)}  # measured: whether it passed one card's rate",
        f"  share_of_rate: {_table(shares, 1)}  # measured, of that rate",
        f"  ring_share_of_rate: {_number(ring_share)}  # measured: bus bandwidth of an all-gather over all hosts",
    ]


def _taken_across(across: AcrossNodes, known: Known) -> list[str]:
    nics, rate, source = known.nics()
    taken = known._source()
    return [
        "across_nodes:",
        f"  latency_microseconds: {_number(across.latency_seconds * 1e6)}  # {taken}",
        f"  gigabytes_per_second_per_nic: {_number(rate / 1e9)}  # {source}",
        f"  nics_per_node: {nics}  # {source}",
        f"  all_to_all_uses_all_nics: {json.dumps(across.all_to_all_uses_all_nics)}  # {taken}",
        f"  share_of_rate: {_table(across.share_of_rate, 1)}  # {taken}",
        f"  ring_share_of_rate: {_number(across.ring_share_of_rate)}  # {taken}",
    ]


def _table(values: Mapping[Any, float], unit: float) -> str:
    return "{" + ", ".join(f"{key}: {_number(value / unit)}" for key, value in values.items()) + "}"


def _number(value: float) -> str:
    """Four digits, and never an exponent, which YAML takes for text."""
    return f"{float(f'{value:.4g}'):.12f}".rstrip("0").rstrip(".")
