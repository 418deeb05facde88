"""The rows to reproduce, from `configs/reproduce.yaml`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from megatron_basp.errors import ConfigurationError
from megatron_basp.library import CONFIGS
from megatron_basp.training_spec import Recompute

TABLES = CONFIGS / "reproduce.yaml"
Quantity = Literal["speedup", "step_time_cut", "exchange_share", "exchange_ratio", "memory_ratio", "over_plain"]
Mode = Literal["ulysses", "basp"]
Figure = float | tuple[float, float]


@dataclass(frozen=True)
class Case:
    """One row: a run, which figure of it is shown, and what the paper says of that.

    quantity, exchange, paper, inconsistent, fitted: see the file; `of` is the mode that a share is of, else BASP.
    micro_batches: of a step, M.
    """

    table: str
    quantity: Quantity
    exchange: Literal["paper", "plugin"]
    model: str
    cluster: str
    ranks: int
    seq_length: int
    micro_batch_size: int
    micro_batches: int = 1
    gradient_bytes: int = 4
    recompute: Recompute = "none"
    of: Mode = "basp"
    paper: Figure | None = None
    inconsistent: str = ""
    fitted: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        """As in messages: `speedup, llama3.2-1b, S=16384, B=2, N=8`."""
        sizes = f"S={self.seq_length}, B={self.micro_batch_size}, N={self.ranks}"
        return f"{self.table}, {self.model}, {sizes}"


@dataclass(frozen=True)
class Table:
    """Rows of one kind. exchange: whose is modelled."""

    name: str
    title: str
    exchange: str
    cases: tuple[Case, ...]


def load_tables(file: Path = TABLES) -> tuple[Table, ...]:
    """All tables, in the order of the file.

    Raises:
        ConfigurationError: there is no file, or a row has a key or a word that is not known.
    """
    if not file.is_file():
        raise ConfigurationError(
            f"there is no {file}, since megatron_basp was installed without its repository: use pip install -e"
        )
    return tuple(_table(name, content) for name, content in yaml.safe_load(file.read_text())["tables"].items())


def _table(name: str, content: Mapping[str, Any]) -> Table:
    common = {"quantity": content["quantity"], "exchange": content["exchange"], **content["case"]}
    cases = tuple(_case(name, {**common, **row}) for row in content["rows"])
    return Table(name, content["title"], content["exchange"], cases)


def _case(table: str, row: dict[str, Any]) -> Case:
    if unknown := sorted(row.keys() - {field.name for field in fields(Case)}):
        raise ConfigurationError(f"table {table}: {unknown[0]} is not a key that is known, in {row}")
    for key, known in (("quantity", get_args(Quantity)), ("of", get_args(Mode)), ("exchange", ("paper", "plugin"))):
        if row.get(key, known[0]) not in known:
            raise ConfigurationError(f"table {table}: {key} must be one of {', '.join(known)}, got {row[key]}")
    paper = row.get("paper")
    return Case(table=table, **{**row, "paper": tuple(paper) if isinstance(paper, list) else paper})
