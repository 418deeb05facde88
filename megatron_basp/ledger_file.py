"""The file of `--basp-ledger`: one for each rank, JSON lines, readable while the run goes on and after it was killed.

Lines, by their `line`:
    header   the first one: what `Header` says, with the `format` of the file
    sent     one for each kind of collective in a step: `phase` and `step`, the fields of `Collective` and of `Amount`
    step     behind the `sent` lines of a step: `phase`, `step`, and its `seconds` by the host's clock
    total    at the end of a run, for each phase and kind of collective: `steps`, and the sums over them

A phase is `training` (`step` counts Megatron's iterations from 1), `evaluation` (one for each call; `step` is the
iteration behind which it came) or `outside` (start, checkpoints, logging, a step that failed: what came between two
steps; its `step` is the one before, its `seconds` are those since then). Pure: no torch, no Megatron.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Literal

from megatron_basp.errors import ConfigurationError
from megatron_basp.ledger import Amount, Collective, Phase

FORMAT = 1
_COUNTS = dict.fromkeys(("count", "same_rank_bytes", "same_node_bytes", "across_nodes_bytes"), int)
# What a line must hold, by its fields; a number is 0 or more.
_COLLECTIVE: dict[str, Any] = {
    **dict.fromkeys(("part", "operation", "group"), str),
    **{"group_size": int, "layer": int | None, "wave": int | None, "direction": str | None},
}
_AMOUNT: dict[str, Any] = {**_COUNTS, "seconds": int | float | None}
_STEP: dict[str, Any] = {"phase": str, "step": int, "seconds": int | float}
_HEADER: dict[str, Any] = {
    **dict.fromkeys(("rank", "world_size", "domain_size"), int),
    **dict.fromkeys(("backend", "clock", "mode"), str),
    **dict.fromkeys(("versions", "flags", "exchanged"), dict),
    **dict.fromkeys(("training_waves", "evaluation_waves", "cp_ranks", "nodes"), list),
}


@dataclass(frozen=True)
class PlannedWave:
    """Of a plan: how many rows share K ranks each, and in how many parts their heads are exchanged."""

    rows: int
    group_size: int
    chunks: int = 1


@dataclass(frozen=True)
class Exchanged:
    """What the exchanges of attention carry: heads of one tensor-parallel rank, their sizes, bytes of an element."""

    heads: int
    kv_heads: int
    qk_head_size: int
    v_head_size: int
    element_bytes: int


@dataclass(frozen=True)
class Header:
    """What a run was, as far as it decides what is sent.

    versions: of `megatron_basp`, `megatron-core` and `torch`.
    backend: torch's, `nccl` or `gloo`.
    clock: what measured the seconds of collectives: events on the `device`, or the `host`.
    mode: `--sequence-parallel-mode`.
    flags: Megatron's, without dashes, with the values that it settled on; `model_from_flags` takes them.
    exchanged: what the exchanges of attention carry.
    training_waves, evaluation_waves: the plans of both micro-batch sizes.
    cp_ranks: the global ranks of this rank's context-parallel group.
    domain_size: consecutive ranks of a CP group that are always in one node.
    nodes: the fast domain of each global rank: its host, or `domain 0` and so on by `--basp-domain-size`.
    """

    rank: int
    world_size: int
    versions: Mapping[str, str]
    backend: str
    clock: Literal["device", "host"]
    mode: str
    flags: Mapping[str, Any]
    exchanged: Exchanged
    training_waves: tuple[PlannedWave, ...]
    evaluation_waves: tuple[PlannedWave, ...]
    cp_ranks: tuple[int, ...]
    domain_size: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """What one rank sent in one step; `seconds` are the step's own."""

    phase: Phase
    step: int
    seconds: float
    sent: Mapping[Collective, Amount]


@dataclass(frozen=True)
class LedgerFile:
    """is_complete: the run came to its end, so that the totals were written."""

    header: Header
    steps: tuple[Step, ...]
    is_complete: bool

    def of(self, phase: Phase) -> list[Step]:
        return [step for step in self.steps if step.phase == phase]

    def total(self, phase: Phase) -> dict[Collective, Amount]:
        """Summed over the steps of a phase."""
        return total(step.sent for step in self.of(phase))


def total(pages: Iterable[Mapping[Collective, Amount]]) -> dict[Collective, Amount]:
    """The sums by kind of collective."""
    sums: dict[Collective, Amount] = {}
    for page in pages:
        for collective, amount in page.items():
            sums[collective] = sums[collective] + amount if collective in sums else amount
    return sums


@dataclass
class LedgerWriter:
    """Writes a file as the run goes. A step is written in one piece."""

    file: IO[str]
    header: Header
    _totals: dict[Phase, dict[Collective, Amount]] = field(default_factory=dict)
    _steps: dict[Phase, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._write([{"line": "header", "format": FORMAT, **asdict(self.header)}])

    def write_step(self, step: Step) -> None:
        at = {"phase": step.phase, "step": step.step}
        lines = [
            {"line": "sent", **at, **collective._asdict(), **vars(amount)} for collective, amount in step.sent.items()
        ]
        self._write([*lines, {"line": "step", **at, "seconds": step.seconds}])
        self._totals[step.phase] = total([self._totals.get(step.phase, {}), step.sent])
        self._steps[step.phase] = self._steps.get(step.phase, 0) + 1

    def close(self) -> None:
        """Write the totals."""
        self._write(
            {"line": "total", "phase": phase, "steps": self._steps[phase], **collective._asdict(), **vars(amount)}
            for phase, sums in self._totals.items()
            for collective, amount in sums.items()
        )
        self.file.close()

    def totals(self, phase: Phase) -> tuple[int, dict[Collective, Amount]]:
        """The number of steps, and the sums over them."""
        return self._steps.get(phase, 0), self._totals.get(phase, {})

    def _write(self, lines: Iterable[dict[str, Any]]) -> None:
        self.file.write("".join(json.dumps(line) + "\n" for line in lines))
        self.file.flush()


def file_of_rank(file: Path, rank: int) -> Path:
    """`ledger.jsonl` -> `ledger.rank0.jsonl`."""
    return file.with_suffix(f".rank{rank}{file.suffix}")


def read_ledger(path: Path) -> LedgerFile:
    """Read the file of one rank.

    A run that was killed leaves a line or a step unfinished at the end: that is left out, with a warning.

    Raises:
        ConfigurationError: there is no such file, it is no ledger, or its format is another one.
    """
    try:
        lines = path.read_text().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"the ledger {path} cannot be read ({getattr(error, 'strerror', None) or 'no text'}): name a file that "
            f"--basp-ledger FILE wrote; FILE gets the rank before its suffix, as in {file_of_rank(path, 0).name}"
        ) from None
    records = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.endswith("\n")]
    header = _header(path, records)
    if lines and not lines[-1].endswith("\n"):
        warnings.warn(f"{path}:{len(lines)}: the last line is unfinished and left out", stacklevel=2)
    steps: list[Step] = []
    sent: dict[Collective, Amount] = {}
    for number, record in enumerate(records[1:], 2):
        where = f"{path}:{number}: the line"
        match record["line"]:
            case "sent":
                sent[Collective(**_of(record, _COLLECTIVE, where))] = Amount(**_of(record, _AMOUNT, where))
            case "step":
                steps.append(Step(**_of(record, _STEP, where), sent=sent))
                sent = {}
            case "total":
                pass  # the sums of what stands above
            case other:
                raise ConfigurationError(f"{path}:{number}: no line of format {FORMAT} is called {other}")
    if sent:
        warnings.warn(f"{path}: the last step is unfinished and left out", stacklevel=2)
    return LedgerFile(header, tuple(steps), is_complete=records[-1]["line"] == "total")


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        raise ConfigurationError(f"{path}:{number}: not JSON; is it a file that --basp-ledger wrote?") from None
    if not isinstance(record, dict) or "line" not in record:
        raise ConfigurationError(f"{path}:{number}: not a line of a ledger; is it a file that --basp-ledger wrote?")
    return record


def _header(path: Path, records: list[dict[str, Any]]) -> Header:
    if not records or records[0]["line"] != "header":
        raise ConfigurationError(f"{path} does not begin with a header; is it a file that --basp-ledger wrote?")
    record = records[0]
    if record.get("format") != FORMAT:
        raise ConfigurationError(
            f"{path} is of format {record.get('format')}, and this version reads format {FORMAT}: use the version of "
            f"megatron_basp that wrote it ({record.get('versions', {}).get('megatron_basp', 'unknown')})"
        )
    where = f"{path}:1: the header"
    taken = _of(record, _HEADER, where)
    sizes = {field.name: int for field in fields(Exchanged)}
    for name in ("training_waves", "evaluation_waves"):
        taken[name] = tuple(
            PlannedWave(**_of(wave, {"rows": int, "group_size": int, "chunks": int}, f"{where}'s {name}", least=1))
            for wave in taken[name]
        )
    header = Header(
        **{
            **taken,
            "exchanged": Exchanged(**_of(record["exchanged"], sizes, f"{where}'s exchanged", least=1)),
            "cp_ranks": tuple(record["cp_ranks"]),
            "nodes": tuple(record["nodes"]),
        }
    )
    ranks = range(len(header.nodes))
    if header.world_size != len(ranks) or not all(rank in ranks for rank in (header.rank, *header.cp_ranks)):
        raise ConfigurationError(f"{where} has ranks beyond the {len(ranks)} of its nodes; was it edited?")
    if header.rank not in header.cp_ranks or not all(isinstance(node, str) for node in header.nodes):
        raise ConfigurationError(f"{where} has a rank outside of its group, or a node without a name; was it edited?")
    if any(len(header.cp_ranks) % wave.group_size for wave in (*header.training_waves, *header.evaluation_waves)):
        raise ConfigurationError(f"{where} has a wave whose K does not divide {len(header.cp_ranks)}; was it edited?")
    return header


def _of(record: Any, kinds: Mapping[str, Any], where: str, least: int = 0) -> dict[str, Any]:
    """These fields of a line, each of its kind, and numbers `least` or more."""
    for name, kind in kinds.items():
        if not isinstance(record, dict) or name not in record:
            raise ConfigurationError(f"{where} has no {name}; is it a file that --basp-ledger wrote?")
        value = record[name]
        is_number = isinstance(value, int | float)
        if not isinstance(value, kind) or isinstance(value, bool) or (is_number and not least <= value < math.inf):
            raise ConfigurationError(f"{where} has {name} {value!r}; was it edited?")
    return {name: record[name] for name in kinds}
