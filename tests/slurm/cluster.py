"""A SLURM of one controller and two nodes on this host, in a folder of its own; it leaves nothing running."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_interval=2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node1} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={node2} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """commands: run in `environment`, in which SLURM's own find this cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def run(self, *words: str, cwd: Path | None = None) -> str:
        """What a command prints; raises where it fails."""
        done = subprocess.run(words, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words)[name]

    def wait(self, what: str, is_so: Callable[[], bool], seconds: float, log: Path | None = None) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            said = log.read_text()[-6000:] if log is not None and log.exists() else ""
            assert time.monotonic() < deadline, f"not in {seconds:.0f} s: {what}\n{said}"
            time.sleep(0.5)


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    assert not missing, f"{', '.join(missing)} not found: apt-get install slurm-wlm munge"
    assert os.geteuid() == 0, "daemons that start jobs want root"
    cluster, host = Slurm(folder), socket.gethostname().partition(".")[0]
    ports = dict(zip(("controller", "node1", "node2"), free_ports(3), strict=True))
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=host, **ports))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [["munged", "--foreground", "--force", *munge, f"--socket={folder}/munge.socket"]]
    daemons += [["slurmctld", "-D"], ["slurmd", "-D", "-N", "node1"], ["slurmd", "-D", "-N", "node2"]]
    processes = []
    try:
        for number, daemon in enumerate(daemons):
            output = (folder / f"{daemon[0]}{number}.out").open("wb")
            processes.append(subprocess.Popen(daemon, env=cluster.environment, stdout=output, stderr=output))
            if daemon[0] == "munged":
                cluster.wait("munged listens", (folder / "munge.socket").exists, 20, folder / "munged0.out")
        cluster.wait("both nodes are idle", lambda: nodes_are_idle(cluster), 60, folder / "slurmctld.log")
        yield cluster
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            cluster.run("scancel", "--user", "root")
            cluster.wait("no job is left", lambda: not cluster.run("squeue", "--noheader").strip(), 30)
        for process in reversed(processes):
            process.terminate()
        for process in reversed(processes):
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def nodes_are_idle(cluster: Slurm) -> bool:
    found = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"], env=cluster.environment, capture_output=True, text=True
    )
    return found.stdout.split() == ["idle", "idle"]


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
