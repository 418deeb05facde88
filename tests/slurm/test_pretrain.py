"""pretrain.sbatch and submit.sh on a real SLURM of two nodes: a run that is killed, or whose time is over, goes on
from its last checkpoint with the losses of one that was left alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm

SCRIPTS = Path(__file__).parents[2] / "scripts" / "slurm"
STEPS = 300
RUN = f"""
nodes: 2
sequence-parallel-mode: basp
context-parallel-size: 2
micro-batch-size: 3
global-batch-size: 3
num-layers: 2
hidden-size: 64
num-attention-heads: 8
seq-length: 64
max-position-embeddings: 64
position-embedding-type: rope
mock-data: true
tokenizer-type: NullTokenizer
vocab-size: 127
transformer-impl: local
no-gradient-accumulation-fusion: true
no-persist-layer-norm: true
no-rope-fusion: true
attention-dropout: 0
hidden-dropout: 0
lr: 1.0e-3
train-iters: {STEPS}
log-interval: 1
eval-interval: 1000
eval-iters: 0
save-interval: 50
distributed-backend: gloo
"""
ITERATION = re.compile(r"iteration +(\d+)/ +\d+ .*lm loss: (\S+)")
TURN = re.compile(r"^> .* turn (\d+), ", re.MULTILINE)


class Job:
    """A submitted run: its log holds all its turns."""

    def __init__(self, cluster: Slurm, folder: Path, *options: str, more: str = "") -> None:
        self.cluster, self.folder = cluster, folder
        config = folder / "run.yaml"
        config.write_text(RUN + more)
        words = ["--cpu", "--ranks-per-node", "1", "--max-connections", "1", "--run", str(folder / "run")]
        said = cluster.run(
            str(SCRIPTS / "submit.sh"), *words, "--python", sys.executable, *options, str(config), cwd=folder
        )
        self.id = said.split()[-1]

    @property
    def log(self) -> str:
        file = self.folder / "run" / f"{self.id}.log"
        return file.read_text() if file.exists() else ""

    def turns(self) -> list[dict[int, float]]:
        """The losses of each turn, by step. The second of a turn is left out: Megatron logs the mean of two there."""
        parts = TURN.split(self.log)[2::2]
        found = []
        for part in parts:
            losses = [(int(step), float(loss)) for step, loss in ITERATION.findall(part)]
            found.append(dict(losses[:1] + losses[2:]))
        return found

    def wait_for_step(self, step: int) -> None:
        def is_there() -> bool:
            assert self.cluster.state(self.id) not in ("FAILED", "COMPLETED", "CANCELLED"), self.log[-6000:]
            return any(step in turn for turn in self.turns())

        self.cluster.wait(f"step {step} of job {self.id}", is_there, 400)

    def wait_for_the_end(self) -> None:
        def has_ended() -> bool:
            state = self.cluster.state(self.id)
            assert state not in ("FAILED", "CANCELLED", "TIMEOUT"), self.log[-6000:]
            return state == "COMPLETED"

        self.cluster.wait(f"the end of job {self.id}", has_ended, 600)

    def start_next_turn(self) -> None:
        """SLURM holds a job that was requeued back for two minutes. Some seconds have to pass: a turn that starts in
        the second in which the one before was ended is taken for that one, and killed."""
        self.cluster.wait("it is requeued", lambda: self.cluster.state(self.id) == "PENDING", 120)
        self.cluster.run("scontrol", "update", f"JobId={self.id}", "StartTime=now+5")


@pytest.fixture(scope="module")
def undisturbed(cluster: Slurm, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    job = Job(cluster, tmp_path_factory.mktemp("undisturbed"), "--launcher", "srun")
    job.wait_for_the_end()
    [losses] = job.turns()
    assert sorted(losses) == [1, *range(3, STEPS + 1)], job.log[-6000:]
    return losses


def assert_resumed(job: Job, undisturbed: dict[int, float]) -> tuple[dict[int, float], dict[int, float]]:
    first, second = job.turns()
    assert 1 in first and STEPS not in first and STEPS in second and 1 not in second
    for turn in (first, second):
        assert {step: undisturbed.get(step, loss) for step, loss in turn.items()} == pytest.approx(turn, abs=2e-6)
    return first, second


def test_a_killed_run_goes_on_from_its_last_checkpoint(
    cluster: Slurm, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    """As after preemption, with torch.distributed.run and the links checked first."""
    job = Job(cluster, tmp_path, "--launcher", "torchrun", "--check-fabric", "h100-8", "--rank-logs", "logs")
    job.wait_for_step(120)
    cluster.run("scontrol", "requeue", job.id)
    job.start_next_turn()
    job.wait_for_the_end()
    _, second = assert_resumed(job, undisturbed)
    assert (min(second) - 1) % 50 == 0, "it went on from a checkpoint of --save-interval"
    assert job.log.count("> megatron_basp: python -m megatron_basp.launch --cpu -m") == 2
    assert (tmp_path / "runs" / "fabric" / f"{job.id}.yaml").is_file()
    logs = [path.read_text() for path in (tmp_path / "logs").rglob("std*.log")]
    assert any("lm loss" in log for log in logs)


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_run_whose_time_is_nearly_over_saves_and_asks_for_another_turn(
    cluster: Slurm, undisturbed: dict[int, float], tmp_path: Path, launcher: str
) -> None:
    """SLURM's signal comes ten minutes before the end; here it is sent by hand."""
    job = Job(cluster, tmp_path, "--launcher", launcher, more="exit-signal-handler: true")
    job.wait_for_step(120)
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    job.start_next_turn()
    job.wait_for_the_end()
    first, second = assert_resumed(job, undisturbed)
    assert min(second) == max(first) + 1, "nothing was done twice"
    assert "> time is nearly over: saving" in job.log and "> asking for another turn" in job.log


def test_a_job_says_what_it_lacks(cluster: Slurm, tmp_path: Path) -> None:
    for words, said in (
        (["--", "x"], "there are no GPUs in the allocation"),
        (["--ranks-per-node", "1", "--launcher", "mpirun", "--", "x"], "--launcher must be torchrun or srun"),
        (["--ranks-per-node", "1"], "no WORDS behind --"),
        (["--ranks-per-node", "1", "--root", "/nowhere", "--", "x"], "there is no megatron_basp in /nowhere"),
    ):
        log = tmp_path / "log"
        options = ["--wait", "--nodes", "1", "--output", str(log), "--open-mode", "truncate"]
        subprocess.run(["sbatch", *options, str(SCRIPTS / "pretrain.sbatch"), *words], env=cluster.environment)
        assert f"pretrain.sbatch: error: {said}" in log.read_text()


def test_a_program_that_fails_is_not_started_again(cluster: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = [
        "--wait",
        "--nodes",
        "2",
        "--output",
        str(log),
        str(SCRIPTS / "pretrain.sbatch"),
        "--ranks-per-node",
        "1",
    ]
    program = ["--root", str(SCRIPTS.parents[1]), "--python", sys.executable, "--launcher", "srun"]
    code = "import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)"
    done = subprocess.run(["sbatch", *options, *program, "--", "-c", code], env=cluster.environment)
    assert done.returncode and "task 1: Exited with exit code 3" in log.read_text(), log.read_text()
    assert len(TURN.findall(log.read_text())) == 1


def test_shellcheck_finds_nothing() -> None:
    scripts = [str(path) for path in (*SCRIPTS.glob("*.sh"), SCRIPTS / "pretrain.sbatch")]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert done.returncode == 0 and len(scripts) == 3, done.stdout
