"""`reproduce --measure`: finds the link's rate by measured shares, and goes on where it was stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_basp.cli import reproduce_runs
from megatron_basp.errors import ConfigurationError, RankFailed
from megatron_basp.reproduction.cases import load_tables
from megatron_basp.reproduction.measure import AIM, MOST_MBIT, Wanted, measure, next_mbits, wanted_runs
from megatron_basp.reproduction.measured import SHARE_TOLERANCE, nearest_share, points
from megatron_basp.reproduction.modelled import model_cases
from megatron_basp.reproduction.rows import rows
from tests.bench_documents import bench_document

SETTINGS = {"cluster": "2x4", "compute": "real"}
# Megabits that Ulysses sends in a step, seconds that all else takes, and those of the exchange that no link shortens.
SENT, ELSE, LATENCY = 200.0, 0.8, 0.02


class Cluster:
    """Stands for `bench train`: a step is arithmetic and bytes over a rate."""

    def __init__(self, stop_after: int | None = None, **changes: Any) -> None:
        self.runs: list[tuple[int, bool, tuple[int, ...]]] = []
        self._stop_after, self._changes = stop_after, changes

    def __call__(self, micro_batch_size: int, with_few_kv_heads: bool, rates: Sequence[int]) -> dict[str, Any]:
        if len(self.runs) == self._stop_after:
            raise KeyboardInterrupt
        self.runs.append((micro_batch_size, with_few_kv_heads, tuple(rates)))
        documents = []
        for mbit in rates:
            exchange = (SENT / mbit + LATENCY) * micro_batch_size / 2
            rest = ELSE if self._changes.get("compute") == "sleep" else ELSE * micro_batch_size / 2
            documents.append(
                bench_document(
                    micro_batch_size,
                    link_mbit=mbit,
                    ulysses_share=exchange / (exchange + rest),
                    shape={"kv_heads": 2 if with_few_kv_heads else 8},
                    **self._changes,
                )
            )
        return {**documents[0], "rows": [row for document in documents for row in document["rows"]]}


@pytest.fixture(scope="module")
def wanted() -> list[Wanted]:
    return wanted_runs(model_cases(load_tables()))


def run(wanted: list[Wanted], file: Path, bench: Cluster, settings: dict[str, str] = SETTINGS) -> list[str]:
    said: list[str] = []
    measure(wanted, file, settings, bench, said.append)
    return said


def documents(file: Path) -> list[dict[str, Any]]:
    return reproduce_runs.read_json(file)["runs"]


def test_every_row_that_can_be_measured_is_wanted(wanted: list[Wanted]) -> None:
    assert {one.case.micro_batch_size for one in wanted} == set(range(1, 9))
    assert {one.case.micro_batch_size for one in wanted if one.copies_kv_heads} == {2, 3}
    assert {one.share for one in wanted} >= {0.377, 0.335}


@pytest.mark.parametrize("compute", ["real", "sleep"])
def test_each_wanted_share_is_met_with_two_runs_of_a_batch_at_most(
    compute: str, wanted: list[Wanted], tmp_path: Path
) -> None:
    file, bench = tmp_path / "emulated.json", Cluster(compute=compute)
    said = run(wanted, file, bench)
    batches = {one.batch for one in wanted}
    assert len(batches) <= len(bench.runs) == len(said) <= 2 * len(batches)
    found = points(documents(file))
    for one in wanted:
        assert nearest_share(one.case, one.copies_kv_heads, one.share, found)[0] <= AIM
    filled = rows(load_tables(), found, [])
    assert all(row.measured is not None for row in filled if row.case.table in ("speedup", "batch_sweep"))
    assert said[0].startswith("[1/") and "left" not in said[0] and "left" in said[-1]


def test_a_stopped_measurement_goes_on_with_the_first_run_that_is_missing(
    wanted: list[Wanted], tmp_path: Path
) -> None:
    file, whole = tmp_path / "emulated.json", Cluster()
    run(wanted, tmp_path / "whole.json", whole)
    stopped, rest = Cluster(stop_after=5), Cluster()
    with pytest.raises(KeyboardInterrupt):
        run(wanted, file, stopped)
    assert len(documents(file)) == 5
    said = run(wanted, file, rest)
    assert said[0].startswith("going on with 5 runs")
    assert stopped.runs + rest.runs == whole.runs
    assert documents(file) == documents(tmp_path / "whole.json")


@pytest.mark.parametrize("ended", ["finished", "other settings"])
def test_what_is_finished_or_of_other_settings_is_not_gone_on_with(
    ended: str, wanted: list[Wanted], tmp_path: Path
) -> None:
    file, again = tmp_path / "emulated.json", Cluster()
    some = wanted[:2]
    if ended == "finished":
        run(some, file, Cluster())
    else:
        with pytest.raises(KeyboardInterrupt):
            run(some, file, Cluster(stop_after=1), {"cluster": "2x4", "compute": "sleep"})
    run(some, file, again)
    assert len(again.runs) == len(documents(file)) > 0


def test_a_modelled_link_ends_it(wanted: list[Wanted], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="allows network namespaces"):
        run(wanted, tmp_path / "emulated.json", Cluster(link="modelled"))
    assert not (tmp_path / "emulated.json").exists()


def test_a_share_that_no_rate_gives_is_left(wanted: list[Wanted]) -> None:
    """Where the exchange takes nearly all of the step over the fastest link, too, that one is tried, and no other."""
    one, found = wanted[0], []
    while rates := next_mbits([one], points(found)):
        for mbit in rates:
            share = 0.9 - mbit / MOST_MBIT / 100
            found.append(bench_document(one.case.micro_batch_size, link_mbit=mbit, ulysses_share=share))
        assert len(found) < 10
    assert found[-1]["rows"][0]["link_mbit"] == MOST_MBIT
    assert one.share + SHARE_TOLERANCE < 0.89


# The processes behind it.


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be started; each writes the document that its --out names."""
    started: list[list[str]] = []

    def run_python(words: list[str], **_: str) -> None:
        started.append(words)
        out = Path(words[words.index("--out") + 1])
        out.parent.mkdir(parents=True, exist_ok=True)
        flags = words[words.index("--") + 1 :]
        size = int(flags[flags.index("--micro-batch-size") + 1])
        few = {"kv_heads": 2} if "--num-query-groups" in flags else None
        rates = words[words.index("--link-mbit") + 1].split(",") if "--link-mbit" in words else ["500"]
        documents = [
            bench_document(size, link_mbit=int(mbit), ulysses_share=1 / (1 + int(mbit) / 250), shape=few)
            for mbit in rates
        ]
        all_rows = [row for document in documents for row in document["rows"]]
        reproduce_runs.write_json(out, {**documents[0], "rows": all_rows})

    monkeypatch.setattr(reproduce_runs, "run_python", run_python)
    return started


class Finished:
    def __init__(self, code: int) -> None:
        self._code = code

    def wait(self) -> int:
        return self._code


def test_namespaces_are_measured_by_bench_train(commands: list[list[str]], tmp_path: Path) -> None:
    file = tmp_path / "emulated.json"
    reproduce_runs.measure_on_namespaces(load_tables(), file, "sleep")
    assert reproduce_runs.read_json(file)["is_finished"]
    assert len(commands) == len(documents(file)) >= 10
    for words in commands:
        text = " ".join(words)
        assert text.startswith("-m megatron_basp.cli.main bench train --cluster 2x4 --link measured --link-mbit ")
        assert "--compute sleep" in text


@pytest.mark.parametrize(("code", "error"), [(1, RankFailed), (2, ConfigurationError)])
def test_a_run_that_fails_is_not_taken_for_measured(
    code: int, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce_runs.subprocess, "Popen", lambda *_, **__: Finished(code))
    with pytest.raises(error, match="bench train"):
        reproduce_runs.measure_on_namespaces(load_tables(), tmp_path / "emulated.json", "real")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda number: monkeypatch.setattr("torch.cuda.device_count", lambda: number)


def test_fewer_than_two_gpus_leave_their_column(
    gpus: Callable[[int], None], commands: list[list[str]], tmp_path: Path
) -> None:
    gpus(1)
    assert not reproduce_runs.measure_on_gpus(load_tables(), tmp_path / "gpus")
    assert commands == []


def test_gpus_run_each_model_once_and_go_on_with_the_next(
    gpus: Callable[[int], None], commands: list[list[str]], tmp_path: Path
) -> None:
    gpus(4)
    folder = tmp_path / "gpus"
    assert reproduce_runs.measure_on_gpus(load_tables(), folder)
    wanted = reproduce_runs.gpu_runs(load_tables(), 4)
    assert sorted(file.stem for file in folder.glob("*.json")) == sorted(wanted)
    assert len(commands) == len(wanted) > 10
    text = " ".join(commands[0])
    assert "torch.distributed.run --standalone --nproc-per-node 4 -m megatron_basp.cli.main bench train" in text
    assert "--num-layers 16" in text and "--seq-length 16384" in text and "--group-query-attention" in text
    commands.clear()
    (folder / "qwen3-8b-s16384-b2.json").unlink()
    reproduce_runs.measure_on_gpus(load_tables(), folder)
    assert len(commands) == 1 and "--qk-layernorm" in commands[0]
    commands.clear()
    reproduce_runs.measure_on_gpus(load_tables(), folder)
    assert len(commands) == len(wanted)
