"""What a run writes of its ledger is what is read of it, also while it runs and after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_basp.errors import ConfigurationError
from megatron_basp.ledger import Amount, Collective
from megatron_basp.ledger_file import Exchanged, Header, LedgerWriter, PlannedWave, Step, file_of_rank, read_ledger

QKV = Collective("exchange", "qkv", "BASP_SEQUENCE_GROUP_OF_2", 2, layer=1, wave=0, direction="forward")
GRADIENTS = Collective("dp", "reduce_scatter", "DATA_PARALLEL_GROUP_WITH_CP", 4)
HEADER = Header(
    rank=1,
    world_size=4,
    versions={"megatron_basp": "0.1", "megatron-core": "0.19.2", "torch": "2.14.1"},
    backend="gloo",
    clock="host",
    mode="basp",
    flags={"num-layers": 2, "swiglu": True, "recompute-modules": ["core_attn"]},
    exchanged=Exchanged(heads=8, kv_heads=4, qk_head_size=8, v_head_size=8, element_bytes=4),
    training_waves=(PlannedWave(2, 2), PlannedWave(1, 4)),
    evaluation_waves=(PlannedWave(4, 1),),
    cp_ranks=(0, 1, 2, 3),
    domain_size=2,
    nodes=("a", "a", "b", "b"),
)
STEPS = (
    Step("outside", 0, 2.0, {GRADIENTS: Amount(1, 0, 0, 12, 0.5)}),
    Step("training", 1, 1.0, {QKV: Amount(4, 100, 100, 0, 0.25), GRADIENTS: Amount(1, 0, 0, 12, None)}),
    Step("training", 2, 1.5, {QKV: Amount(4, 100, 100, 0, 0.5), GRADIENTS: Amount(1, 0, 0, 12, 0.5)}),
    Step("evaluation", 2, 0.5, {}),
)


def write(path: Path, close: bool = True) -> LedgerWriter:
    writer = LedgerWriter(path.open("w"), HEADER)
    for step in STEPS:
        writer.write_step(step)
    if close:
        writer.close()
    return writer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.rank1.jsonl"


def test_what_is_written_is_read(path: Path) -> None:
    write(path)
    ledger = read_ledger(path)
    assert (ledger.header, ledger.steps, ledger.is_complete) == (HEADER, STEPS, True)


def test_totals_are_those_of_a_phase_and_seconds_that_were_not_measured_stay_unknown(path: Path) -> None:
    writer = write(path)
    expected = {QKV: Amount(8, 200, 200, 0, 0.75), GRADIENTS: Amount(2, 0, 0, 24, None)}
    assert read_ledger(path).total("training") == expected
    assert writer.totals("training") == (2, expected)
    totals = [json.loads(line) for line in path.read_text().splitlines() if '"total"' in line]
    assert [(line["phase"], line["operation"], line["steps"], line["count"]) for line in totals] == [
        ("outside", "reduce_scatter", 1, 1),
        ("training", "qkv", 2, 8),
        ("training", "reduce_scatter", 2, 2),
    ]


def test_every_step_is_on_the_disk_before_the_next_begins(path: Path) -> None:
    writer = write(path, close=False)
    ledger = read_ledger(path)
    assert (ledger.steps, ledger.is_complete) == (STEPS, False)
    writer.close()


def test_a_kill_loses_the_step_that_was_being_written_and_says_so(path: Path) -> None:
    write(path, close=False)
    text = path.read_text()
    last_step = text.index('{"line": "sent", "phase": "training", "step": 2')
    second = text.index("\n", last_step) + 1
    path.write_text(text[: second + 20])
    with pytest.warns(UserWarning) as warned:
        assert read_ledger(path).steps == STEPS[:2]
    assert [str(warning.message).split(": ", 1)[1] for warning in warned] == [
        "the last line is unfinished and left out",
        "the last step is unfinished and left out",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot be read \(No such file.*as in ledger\.rank1\.rank0\.jsonl"),
        ("", "does not begin with a header"),
        ("{\n", "1: not JSON"),
        ("[]\n", "1: not a line of a ledger"),
        ('{"line": "step"}\n', "does not begin with a header"),
        ('{"line": "header", "format": 2}\n', "is of format 2, and this version reads format 1"),
        ('{"line": "header", "format": 1}\n', "1: the header has no rank"),
    ],
)
def test_other_files_and_other_formats_are_refused_in_one_line(path: Path, content: str | None, message: str) -> None:
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=message) as error:
        read_ledger(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"line": "sum"}', "no line of format 1 is called sum"), ('{"line": "step"}', "the line has no phase")],
)
def test_lines_that_the_format_does_not_have_are_refused_with_their_number(
    path: Path, line: str, message: str
) -> None:
    write(path)
    number = len(path.read_text().splitlines()) + 1
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigurationError, match=f":{number}: {message}"):
        read_ledger(path)


@pytest.mark.parametrize(
    ("line", "name", "value", "message"),
    [
        (0, "flags", [], r"has flags \[\]"),
        (0, "training_waves", [{"rows": 2, "group_size": 0}], "training_waves has group_size 0"),
        (0, "training_waves", [{"rows": 2, "group_size": 3, "chunks": 1}], "whose K does not divide"),
        (0, "cp_ranks", [0, []], "ranks beyond"),
        (0, "world_size", 10**30, "ranks beyond"),
        (0, "cp_ranks", [0, 2, 3], "a rank outside of its group"),
        (1, "count", "1", "has count '1'"),
        (1, "group_size", None, "has group_size None"),
        (1, "same_node_bytes", -1, "has same_node_bytes -1"),
        (1, "seconds", float("nan"), "has seconds nan"),
    ],
)
def test_values_that_no_run_writes_are_refused_in_one_line(
    path: Path, line: int, name: str, value: object, message: str
) -> None:
    write(path)
    lines = path.read_text().splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), name: value})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigurationError, match=message) as error:
        read_ledger(path)
    assert "\n" not in str(error.value)


def test_the_rank_goes_before_the_suffix() -> None:
    assert file_of_rank(Path("runs/ledger.jsonl"), 3) == Path("runs/ledger.rank3.jsonl")
    assert file_of_rank(Path("ledger"), 3) == Path("ledger.rank3")
