"""`megatron-basp reproduce`: rows that agree with the cost model's page, columns that do not mix, and its command."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_basp.cli import reproduce as command
from megatron_basp.cli.main import main
from megatron_basp.cli.reproduce_table import print_tables
from megatron_basp.errors import ConfigurationError
from megatron_basp.library import named_model
from megatron_basp.reproduction.cases import Case, load_tables
from megatron_basp.reproduction.loss import LossCurves, read_losses, write_losses
from megatron_basp.reproduction.measured import Measured, emulated, figure, on_gpus, points
from megatron_basp.reproduction.modelled import model_cases, target_shares
from megatron_basp.reproduction.report import cells, markdown, sources
from megatron_basp.reproduction.rows import Row, rows
from scripts.figures.published import groups
from scripts.figures.results import LOSSES, PAGE, SOURCES, TABLES, page_with_results
from tests.bench_documents import bench_document
from tests.commands import assert_refused

NAMES = ("speedup", "exchange_share", "exchange_time", "batch_sweep", "sequence_sweep", "memory", "beyond")
KINDS = {"paper_speed_up": "speedup", "paper_ratio": "exchange_ratio", "paper_share": "exchange_share"}


@pytest.fixture(scope="module")
def found() -> list[Row]:
    return rows(load_tables(), [], [])


def case_of(table: str, **wanted: object) -> Case:
    cases = [case for named in load_tables() if named.name == table for case in named.cases]
    return next(case for case in cases if all(getattr(case, key) == value for key, value in wanted.items()))


def label(model: str, case: Case) -> str:
    of = {"ulysses": ", Ulysses", "basp": ", BASP"}[case.of] if case.quantity == "exchange_share" else ""
    return f"{model}{of}, B={case.micro_batch_size}, {case.seq_length} tokens"


def test_the_papers_rows_are_those_that_the_cost_model_is_held_to(found: list[Row]) -> None:
    """The same published figures, contradictions and modelled figures as in docs/validation.yaml."""
    ours = {
        (row.case.quantity, label(row.case.model, row.case)): row
        for row in found
        if row.case.quantity in KINDS.values() and row.case.exchange == "paper"
    }
    held = {
        (KINDS[row.kind], row.name): row
        for group in groups()
        for row in group.rows
        if row.kind in KINDS and row.use != "unusable"
    }
    cuts = {row.case.seq_length: row for row in found if row.case.quantity == "step_time_cut"}
    for key, theirs in held.items():
        if key not in ours:  # a step-time cut there, a speed-up here
            row = cuts[int(theirs.name.split()[-2])]
            assert theirs.name.startswith(row.case.model) and isinstance(row.case.paper, float)
            assert 1 / (1 - row.case.paper) == pytest.approx(theirs.published, abs=6e-4)
            assert 1 / (1 - row.modelled_value) == pytest.approx(theirs.modelled)
        else:
            row = ours[key]
            assert row.case.paper == theirs.published, key
            assert row.modelled_value == pytest.approx(theirs.modelled), key
            assert row.case.fitted == (theirs.use == "fitted"), key
        assert bool(row.case.inconsistent) == (theirs.use == "inconsistent"), key
    published = {key for key, row in ours.items() if row.case.paper is not None and row.case.paper not in (0.005, 85)}
    assert published <= held.keys()


def test_all_tables_and_models_are_there(found: list[Row]) -> None:
    assert tuple(dict.fromkeys(row.case.table for row in found)) == NAMES
    papers = {"llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "qwen1.5-1.8b", "qwen2.5-3b", "qwen3-8b"}
    for table in ("speedup", "exchange_time", "memory"):
        assert {row.case.model for row in found if row.case.table == table} == papers
    sweep = [row for row in found if row.case.table == "batch_sweep"]
    assert [(row.case.micro_batch_size, row.group_size) for row in sweep] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert [row.case.seq_length for row in found if row.case.table == "sequence_sweep"] == [8192, 16384, 32768]


def test_beyond_has_what_the_paper_left_open(found: list[Row]) -> None:
    beyond = [row for row in found if row.case.table == "beyond"]
    assert all(row.case.paper is None for row in beyond)
    uneven = {row.case.micro_batch_size for row in beyond if "B does not divide N" in row.notes}
    assert uneven == {3, 5, 6, 7}
    few = [row for row in beyond if row.case.model == "qwen2.5-3b"]
    assert few and all(named_model("qwen2.5-3b").kv_heads < row.group_size for row in few)
    spanning = [row for row in beyond if "K still spans nodes" in row.notes]
    assert {row.case.ranks for row in spanning} == {32, 64}
    assert all(row.group_size > row.modelled.training.cluster.gpus_per_node for row in spanning)
    assert max(row.case.seq_length for row in beyond) >= 131072
    losing = [row for row in beyond if any(note.startswith("does not pay") for note in row.notes)]
    assert len(losing) >= 4 and all(row.modelled_value < 1.01 for row in losing)
    assert min(row.modelled_value for row in losing) < 0.95


def test_without_runs_nothing_is_measured(found: list[Row]) -> None:
    for row in found:
        document = row.as_document()
        assert document["measured"] is None and document["measured_on_gpus"] is None
        assert cells(row)[-2:] == ["not measured", "not measured"]
        assert document["modelled"] is not None or row.case.paper == 85


def test_a_modelled_link_is_no_measurement() -> None:
    assert points([bench_document(link="modelled")]) == []
    assert len(points([bench_document()])) == 1
    without_basp = bench_document()
    without_basp["rows"] = without_basp["rows"][:1]
    assert points([without_basp]) == []


def test_a_row_takes_the_run_whose_share_is_nearest_and_none_that_is_far() -> None:
    case = case_of("speedup", model="qwen1.5-1.8b")
    near = bench_document(ulysses_share=0.36, link_mbit=450)
    runs = points([bench_document(ulysses_share=0.30), near, bench_document(ulysses_share=0.5)])
    measured = emulated(case, False, 0.377, runs)
    assert isinstance(measured, Measured) and measured.point.document is near
    assert measured.value == pytest.approx(1000 / 750)
    assert measured.note == "2x4, 450 Mbit/s, K = 4, Ulysses' share 36.0 %, 93 % of the bound"
    assert "nearest is 12 points off" in str(emulated(case, False, 0.18, runs))
    assert emulated(replace(case, micro_batch_size=3), False, 0.377, runs) == "not measured"
    assert emulated(case, True, 0.377, runs) == "not measured"
    with_few = points([bench_document(shape={"kv_heads": 2})])
    assert isinstance(emulated(case, True, 0.35, with_few), Measured)


def test_what_is_no_real_step_is_said() -> None:
    case = case_of("speedup", model="llama3.2-1b")
    odd = points([bench_document(compute="sleep", is_finished=False)])
    measured = emulated(case, False, 0.35, odd)
    assert isinstance(measured, Measured) and measured.note.endswith("attention is a pause, interrupted")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ranks": 16}, "8 ranks"),
        ({"cluster": "h100-8"}, "two nodes"),
        ({"quantity": "memory_ratio"}, "do not show it"),
        ({"quantity": "over_plain", "micro_batches": 4}, "not measured"),
    ],
)
def test_rows_that_the_emulated_cluster_cannot_stand_for_say_why(changes: dict[str, object], why: str) -> None:
    case = replace(case_of("speedup", model="llama3.2-1b"), **changes)
    assert why in str(emulated(case, False, 0.35, points([bench_document()])))


@pytest.mark.parametrize(
    ("quantity", "of", "expected"),
    [
        ("speedup", "basp", 1000 / 750),
        ("step_time_cut", "basp", 0.25),
        ("exchange_share", "ulysses", 0.35),
        ("exchange_share", "basp", 0.1),
        ("exchange_ratio", "basp", 350 / 75),
        ("over_plain", "basp", 760 / 750),
        ("memory_ratio", "basp", None),
    ],
)
def test_each_quantity_is_read_off_the_run(quantity: str, of: str, expected: float | None) -> None:
    case = replace(case_of("speedup", model="llama3.2-1b"), quantity=quantity, of=of)
    (point,) = points([bench_document()])
    assert figure(case, point) == (expected if expected is None else pytest.approx(expected))


def test_the_wanted_share_is_the_papers_where_it_says_one() -> None:
    targets = target_shares(model_cases(load_tables()))
    assert targets[case_of("speedup", model="qwen1.5-1.8b")] == 0.377
    assert targets[case_of("exchange_time", model="llama3.2-1b", seq_length=16384)] == 0.335
    assert targets[case_of("speedup", model="llama3.1-8b")] == pytest.approx(0.233, abs=5e-4)


GPU_RUN = {
    "backend": "nccl",
    "link_mbit": None,
    "machine": {"device": "A100", "cores": 64},
    "shape": {"layers": 24, "heads": 16, "kv_heads": 16, "head_size": 128, "seq_length": 16384},
}


def test_gpus_run_the_rows_own_model_and_other_numbers_of_ranks_are_said() -> None:
    case = case_of("speedup", model="qwen1.5-1.8b")
    model = named_model(case.model)
    own = bench_document(**GPU_RUN)
    fewer = bench_document(**{**GPU_RUN, "shape": {**GPU_RUN["shape"], "ranks": 4}})
    measured = on_gpus(case, model, points([fewer, own]))
    assert measured is not None and measured.point.document is own
    assert measured.note.startswith("A100, 2x4, K = 4,")
    measured = on_gpus(case, model, points([fewer]))
    assert measured is not None and "N = 4" in measured.note
    assert on_gpus(replace(case, micro_batch_size=4), model, points([own])) is None
    assert on_gpus(replace(case, ranks=64), model, points([own])) is None
    assert on_gpus(case, named_model("llama3.2-1b"), points([own])) is None


def test_measured_figures_keep_their_column_date_and_command() -> None:
    tables = load_tables()
    at_share = [bench_document(ulysses_share=0.36), bench_document(ulysses_share=0.36, shape={"kv_heads": 2})]
    filled = rows(tables, points(at_share), points([bench_document(**GPU_RUN)]))
    row = next(row for row in filled if row.case == case_of("speedup", model="qwen1.5-1.8b"))
    document = row.as_document()
    assert document["modelled"] == pytest.approx(1.342, abs=1e-3)
    assert document["measured"] == document["measured_on_gpus"] == pytest.approx(4 / 3)
    assert cells(row)[-4:] == ["1.31× to 1.32×", "1.34×", "1.33×", "1.33×"]
    assert "emulated: 2x4, 500 Mbit/s" in document["note"] and "GPUs: A100" in document["note"]
    lines = sources(filled)
    assert len(lines) == 2 and all("2026-01-02" in line and "`megatron-basp bench train" in line for line in lines)
    assert "not measured" not in markdown([row], tables)


def test_made_up_documents_have_the_columns_of_real_ones() -> None:
    results = pytest.importorskip("megatron_basp.emulated.results")
    turns = [results.Turn(mode, 500, 1.0, 0.1, 8.0, 100) for mode in results.MODES]
    real = results.rows(turns, dict.fromkeys(results.MODES, 0), {"link": "measured", "compute": "real"})
    assert [row["mode"] for row in real] == [row["mode"] for row in bench_document()["rows"]]
    for row in bench_document()["rows"]:
        assert row.keys() <= real[0].keys()


# The command.


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of docs/results."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(command, "RESULTS", folder)
    return folder


def test_the_document_is_alone_on_stdout_and_in_the_files(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [bench_document(ulysses_share=0.36)]
    (results / "emulated.json").write_text(json.dumps({"is_finished": True, "settings": {}, "runs": runs}))
    write_losses(LossCurves("demo", "today", {"ulysses": [2.0, 1.0], "basp": [2.0, 1.25]}), results / "loss-800.csv")
    sweep = tmp_path / "sweep" / "one"
    sweep.mkdir(parents=True)
    (sweep / "train.json").write_text(json.dumps(bench_document(**GPU_RUN)))
    (sweep / "ledger.json").write_text("{}")
    out = tmp_path / "out"
    assert main(["reproduce", "--json", "--collect", str(sweep.parent), "--out", str(out)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((out / "result.json").read_text())
    assert document["loss"]["steps"] == 2 and document["loss"]["largest_difference"] == 0.25
    first = document["rows"][0]
    wanted = "table model seq_length micro_batch_size ranks group_size paper modelled measured note"
    assert set(wanted.split()) <= first.keys()
    assert first["paper"] == [1.17, 1.32] and first["measured"] == pytest.approx(4 / 3)
    assert any(row["measured_on_gpus"] for row in document["rows"] if row["model"] == "qwen1.5-1.8b")
    with (out / "tables.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert [row["table"] for row in table] == [row["table"] for row in document["rows"]]
    assert (out / "tables.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "tables.md").read_text()
    assert "33.5 % †" in text and "largest difference at any step is 2.5e-01" in text


def test_the_terminal_shows_every_row(found: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(found, load_tables(), None, Path("out"))
    said = capsys.readouterr().out
    assert "…" not in said
    assert said.count("not measured   not measured") == len(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compute", "sleep"], "--compute sleep is for --measure"),
        (["--collect", "nowhere"], "--collect nowhere: there is no such folder"),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_refused(["reproduce", *arguments], message, tmp_path, monkeypatch, capsys)


def test_a_folder_without_runs_on_gpus_is_refused(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "train.json").write_text(json.dumps(bench_document()))
    assert main(["reproduce", "--collect", str(results), "--out", str(tmp_path / "out")]) == 2
    assert "no file below it is a run" in capsys.readouterr().err


def test_a_results_file_that_is_none_is_refused(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "emulated.json").write_text('{"runs": [{"rows": []}]}')
    assert main(["reproduce", "--out", str(tmp_path / "out")]) == 2
    assert "is no file that `megatron-basp reproduce --measure` writes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"modell": "llama3.2-1b"}, "modell is not a key that is known"),
        ({"quantity": "seconds"}, "quantity must be one of speedup"),
        ({"of": "ring"}, "of must be one of ulysses, basp, got ring"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused(row: dict[str, str], message: str, tmp_path: Path) -> None:
    content = {"title": "", "quantity": "speedup", "exchange": "paper", "case": {}, "rows": [row]}
    (tmp_path / "tables.yaml").write_text(yaml.safe_dump({"tables": {"speedup": content}}))
    with pytest.raises(ConfigurationError, match=message):
        load_tables(tmp_path / "tables.yaml")


# Losses, and the page.


def test_losses_come_back_as_they_were_written(tmp_path: Path) -> None:
    losses = {"reference": [8.25, 7.0], "ulysses": [8.25, 7.000001], "basp": [8.25, 6.999999]}
    written = LossCurves("megatron-basp demo", "torch 2", losses)
    write_losses(written, tmp_path / "losses.csv")
    read = read_losses(tmp_path / "losses.csv")
    assert (read.command, read.made_with, read.losses) == (written.command, written.made_with, losses)
    assert read.largest_difference == pytest.approx(2e-6) and read.differences[0] == 0
    assert (tmp_path / "losses.csv").read_text().startswith("# megatron-basp demo\n# torch 2\nstep,reference,")


@pytest.mark.parametrize("text", ["", "# a\n# b\n1,2\n", "# a\n# b\nstep,basp,largest_difference\n2,1.0,0\n"])
def test_a_file_without_losses_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "losses.csv").write_text(text)
    with pytest.raises(ConfigurationError, match=r"losses\.csv"):
        read_losses(tmp_path / "losses.csv")


def test_the_page_shows_what_is_committed() -> None:
    page = PAGE.read_text()
    for mark in (*TABLES, *SOURCES, *LOSSES):
        assert page.count(mark) == 1
    assert page == page_with_results(page, command.committed_rows(), command.committed_losses()), "run `make results`"
    assert PAGE.with_suffix(".png").stat().st_size > 10_000
