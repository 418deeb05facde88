"""The commands as a user types them, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_basp.ledger_file import read_ledger
from tests.end_to_end.training import GQA, MODEL, ROPE, TRAINING, Trainer

BIN = Path(sys.executable).parent
LAUNCH = ["-m", "megatron_basp.launch", "--cpu"]
SCRIPT = str(Path(__file__).parents[2] / "megatron_basp" / "megatron" / "pretrain_gpt.py")
BASP = f"{GQA} {ROPE} --micro-batch-size 3 --sequence-parallel-mode basp --context-parallel-size 2"


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_torchrun_trains_with_an_unmodified_script_as_a_file_says_and_writes_what_each_rank_sent(
    trainer: Trainer, tmp_path: Path
) -> None:
    (tmp_path / "base.yaml").write_text("micro-batch-size: 5\nsequence-parallel-mode: basp\nbasp-ledger: sent.jsonl\n")
    top = "include: base.yaml\ngroup-query-attention: true\nnum-query-groups: 4\nposition-embedding-type: rope\n"
    (tmp_path / "run.yaml").write_text(f"{top}micro-batch-size: 3\n")
    flags = [*MODEL.split(), *TRAINING.split(), *trainer.data_flags, "--context-parallel-size", "2"]
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", *LAUNCH]
    done = run(*torchrun, "--config", "run.yaml", SCRIPT, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    [resolved] = [line for line in done.stdout.splitlines() if "megatron_basp: python -m megatron_basp.launch" in line]
    assert "--micro-batch-size 3" in resolved and "--micro-batch-size 5" not in resolved
    assert "> megatron_basp: Megatron-Core 0." in done.stdout
    assert "sequences at K = 2" in done.stdout
    assert "iteration       10/      10" in done.stdout
    for rank in (0, 1):
        ledger = read_ledger(tmp_path / f"sent.rank{rank}.jsonl")
        assert ledger.header.rank == rank and ledger.is_complete
        assert [step.step for step in ledger.of("training")] == list(range(1, 11))
    assert "sent by rank 0, a training step of 10 (basp)" in done.stdout
    assert "process groups made for this" in done.stdout


def test_bad_input_makes_the_launcher_exit_with_2_and_one_line(tmp_path: Path) -> None:
    flags = f"{MODEL} {TRAINING} {BASP} --mock-data --tokenizer-type NullTokenizer --vocab-size 127".split()
    done = run(sys.executable, *LAUNCH, "-m", "megatron_basp.megatron.pretrain_gpt", *flags, cwd=tmp_path)
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("megatron_basp: error:")]
    assert len(said) == 1 and said[0].endswith("got 1 ranks and 1·1·2 = 2: start a multiple of 2 ranks")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no SCRIPT given"),
        (["nowhere.py"], "there is no script nowhere.py: give the path of Megatron's pretrain_gpt.py"),
    ],
)
def test_a_launcher_without_a_script_says_so(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run(sys.executable, "-m", "megatron_basp.launch", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"megatron_basp: error: {message}")


@pytest.mark.slow
def test_two_megatrons_on_the_path_are_refused(tmp_path: Path) -> None:
    """`megatron` is a namespace package: a folder that has `megatron.training` alone takes that from another place."""
    other = tmp_path / "other" / "megatron" / "training"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    script = tmp_path / "other" / "script.py"
    script.write_text("raise SystemExit('the script must not be reached')")
    done = run(sys.executable, "-m", "megatron_basp.launch", str(script), cwd=tmp_path)
    assert done.returncode == 2
    assert "two Megatrons are on the path" in done.stderr and str(tmp_path / "other") in done.stderr


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    sources = sorted((Path(__file__).parents[2] / "megatron_basp").rglob("*.py"))
    (folder / "text.txt").write_text("\n".join(path.read_text() for path in sources))
    return folder


def demo(folder: Path, *arguments: str) -> list[str]:
    text = ["--text", str(folder / "text.txt")]
    return [str(BIN / "megatron-basp"), "demo", *text, "--out", str(folder / "out"), *arguments]


def test_the_demo_prints_one_document_with_equal_losses_and_fewer_bytes(demo_folder: Path) -> None:
    command = demo(demo_folder, "--json", "--iterations", "4", "--micro-batch-size", "3")
    done = run(*command, cwd=demo_folder)
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    assert document == json.loads((demo_folder / "out" / "result.json").read_text())
    assert document["plan"] == [{"rows": 2, "group_size": 2}, {"rows": 1, "group_size": 4}]
    assert document["max_loss_difference"] <= 2e-6
    for mode, group_sizes in {"reference": [1], "ulysses": [4], "basp": [2, 4]}.items():
        result = document[mode]
        assert len(result["losses"]) == len(result["grad_norms"]) == 4
        assert result["group_sizes"] == group_sizes
        assert result["step_seconds"] > 0
        assert result["held_out_loss_after"] < result["held_out_loss_before"]
    sent = [document[mode]["bytes_sent_per_rank_per_step"] for mode in ("reference", "basp", "ulysses")]
    # Of 2 rows at K=2 and 1 at K=4, against 3 at K=4: (2·(1/2) + 3/4) / (3·(3/4)) of the bytes, with H=8 and Hkv=4.
    assert sent[0] == 0 and sent[1] * 9 == sent[2] * 7
    assert (demo_folder / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--micro-batch-size", "-1"], "--micro-batch-size must be 1 or more, got -1"),
        (["--ranks", "1"], "--ranks 1: use one of [2, 4, 8]"),
        (["--ranks", "3"], "--ranks 3: use one of [2, 4, 8]"),
        pytest.param(["--out", "/proc/demo"], "/proc/demo", marks=pytest.mark.slow),
        (["--iterations", "1"], "--iterations must be 2 or more"),
    ],
)
def test_a_demo_that_cannot_be_exits_with_2_and_one_line(
    demo_folder: Path, arguments: list[str], message: str
) -> None:
    done = run(*demo(demo_folder, *arguments), cwd=demo_folder)
    assert done.returncode == 2 and done.stdout == ""
    said = [line for line in done.stderr.splitlines() if line.startswith("megatron-basp: error: ")]
    assert len(said) == 1 and message in said[0] and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_text_of_too_few_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one line")
    done = run(*demo(tmp_path), cwd=tmp_path)
    assert done.returncode == 2 and "the text makes 1 documents, which leaves none to hold out" in done.stderr


@pytest.mark.parametrize("signals", [[signal.SIGINT], pytest.param([signal.SIGKILL], marks=pytest.mark.slow)])
def test_an_interrupted_demo_leaves_no_process_behind(demo_folder: Path, signals: list[signal.Signals]) -> None:
    """Ctrl-C, which the terminal sends to the whole group; and a kill of the parent alone."""
    command = demo(demo_folder, "--iterations", "100000")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    log = demo_folder / "out" / "logs" / "reference" / "rank0.log"
    log.unlink(missing_ok=True)
    deadline = time.monotonic() + 120
    while not (log.exists() and b"iteration " in log.read_bytes()):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.2)
    if signals == [signal.SIGINT]:
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=30) == 130
    else:
        process.kill()
        process.wait(timeout=30)
    deadline = time.monotonic() + 30
    while group_is_alive(process.pid):
        assert time.monotonic() < deadline, "ranks are still there"
        time.sleep(0.1)
    process.communicate()


@pytest.mark.slow
def test_a_killed_demo_goes_on_from_its_last_checkpoint_as_if_nothing_had_been(demo_folder: Path) -> None:
    command = ["--iterations", "5", "--save-interval", "2", "--micro-batch-size", "3"]
    whole, killed = (demo(demo_folder, *command, "--out", str(demo_folder / name)) for name in ("whole", "killed"))
    assert run(*whole, cwd=demo_folder).returncode == 0
    checkpoints = demo_folder / "killed" / "checkpoints" / "ulysses"
    process = subprocess.Popen(killed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (checkpoints / "latest_checkpointed_iteration.txt").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait(timeout=30)
    done = run(*killed, cwd=demo_folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ulysses: going on from step 2" in done.stderr and "reference: " not in done.stderr
    expected, found = (json.loads((demo_folder / name / "result.json").read_text()) for name in ("whole", "killed"))
    for mode in ("reference", "ulysses", "basp"):
        for result in (expected[mode], found[mode]):
            result.pop("step_seconds")
    assert found == expected
    rows = (demo_folder / "killed" / "losses.csv").read_text().splitlines()
    assert rows[1:] == (demo_folder / "whole" / "losses.csv").read_text().splitlines()[1:] and len(rows) == 3 + 5


def group_is_alive(process_group: int) -> bool:
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    return True
