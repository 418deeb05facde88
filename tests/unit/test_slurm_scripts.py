"""scripts/slurm/submit.sh without SLURM: what it would submit, and what it refuses. With SLURM: `make test-slurm`."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

SUBMIT = Path(__file__).parents[2] / "scripts" / "slurm" / "submit.sh"


def submit(folder: Path, *words: str, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SUBMIT), *words], cwd=folder, env={"PATH": path}, capture_output=True, text=True)


def test_a_dry_run_prints_one_command_that_the_shell_reads_back(tmp_path: Path) -> None:
    (tmp_path / "a run.yaml").write_text("nodes: 2\nlr: 1.0e-3\n")
    (tmp_path / "data.yaml").write_text("nodes: 4  # more\n")
    options = ["--sbatch=--partition=gpu", "--check-fabric", "h100-8", "--rank-logs", "logs", "--gpus-per-node", "4"]
    flags = ["--split", "9,1,0", "--data-path", "a;b $c"]
    done = submit(tmp_path, "--dry-run", *options, "a run.yaml", "data.yaml", "--", *flags)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    at = words.index("--")
    sbatch, program = words[:at], words[at + 1 :]
    assert sbatch[:5] == ["sbatch", "--job-name", "a run", "--nodes", "4"] and "--partition=gpu" in sbatch
    assert sbatch[sbatch.index("--gpus-per-node") + 1] == "4"
    assert sbatch[sbatch.index("--rank-logs") + 1] == str(tmp_path / "logs")
    assert sbatch[sbatch.index("--output") + 1] == str(tmp_path / "runs" / "a run" / "%j.log")
    checkpoints = str(tmp_path / "runs" / "a run" / "checkpoints")
    launch = ["-m", "megatron_basp.launch", "--config", str(tmp_path / "a run.yaml")]
    assert program[:6] == [*launch, "--config", str(tmp_path / "data.yaml")]
    assert program[6:8] == ["-m", "megatron_basp.megatron.pretrain_gpt"]
    assert program[8:] == ["--save", checkpoints, "--load", checkpoints, *flags]
    assert not (tmp_path / "runs").exists()


def test_a_script_and_a_container_have_their_own_place_and_python(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    (tmp_path / "pretrain_gpt.py").touch()
    options = ["--script", "pretrain_gpt.py", "--container", "image.sqsh", "--cpu", "--nodes", "3"]
    words = shlex.split(submit(tmp_path, "--dry-run", *options, "run.yaml").stdout)
    assert words[words.index("--nodes") + 1] == "3" and words[words.index("--python") + 1] == "python3"
    assert words[words.index("--container") + 1] == "image.sqsh" and "--gpus-per-node" not in words
    launch = words[words.index("--") + 1 :]
    assert launch[:3] == ["-m", "megatron_basp.launch", "--cpu"] and str(tmp_path / "pretrain_gpt.py") in launch


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no CONFIG given"),
        (["nowhere.yaml"], "there is no configuration nowhere.yaml"),
        (["--nodes"], "--nodes takes a value"),
        (["--nodes", "0", "run.yaml"], "--nodes must be a whole number, 1 or more, got 0"),
        (["--train-iters", "5", "run.yaml"], "--train-iters is no option of it"),
        (["--script", "nowhere.py", "run.yaml"], "there is no script nowhere.py"),
        (["run.yaml"], "there is no sbatch on this machine"),
    ],
)
def test_what_cannot_be_submitted_is_said_in_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "run.yaml").touch()
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("bash", "dirname", "basename", "realpath", "cat", "sed", "tail", "env"):
        (commands / name).symlink_to(f"/usr/bin/{name}")
    done = submit(tmp_path, *words, path=str(commands))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"submit.sh: error: {said}") and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
