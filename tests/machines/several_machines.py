"""Machines on one host: each has a network, folders and a name of its own; links between them are as slow as told.

What a machine is made of: a network namespace with one cable to a switch; a mount namespace in which `/mnt` is its own
folder, with its home and temporary files, `/dev/shm` is its own, and the folders of the others are hidden; a host name.
Programs, memory and processors are the host's. It takes root, `ip`, `tc` and `unshare`.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

SWITCH, LOCK = "gnnscale0", Path(tempfile.gettempdir()) / "gnnscale-machines.lock"


def cannot_be_made() -> str | None:
    """Return why machines cannot be made here; None: they can."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        return f"machines take root, and the tools {', '.join(missing) or 'that are here'}"
    probe = subprocess.run(["unshare", "-mun", "true"], capture_output=True, text=True)
    return probe.stderr.strip() or None


@dataclass
class Machine:
    """One of them.

    Attributes:
        number: From 0.
        folder: What is at /mnt on it, as the host sees it.
        address: Of its network.
        started: Processes that were started on it and not waited for.
    """

    number: int
    folder: Path
    started: list[subprocess.Popen] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number + 1}"

    @property
    def network(self) -> str:
        return f"gnnscale-{self.number}"

    @property
    def cable(self) -> str:
        return f"gnnscale-c{self.number}"

    def start(self, command: Sequence[str], log: str = "log.txt", **environment: str) -> subprocess.Popen:
        """Start a command in this machine's home; what it prints goes to a file there."""
        own = {"HOME": "/mnt/home", "TMPDIR": "/mnt/tmp", "RAY_TMPDIR": "/mnt/tmp", "GLOO_SOCKET_IFNAME": "eth0"}
        own |= {"GNNSCALE_FETCHED": "/mnt/fetched", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        inside = (
            f"mount --bind {self.folder} /mnt && mount -t tmpfs none {self.folder.parent} && "
            "mount -t tmpfs -o size=2g none /dev/shm && mount --bind /mnt/boot_id /proc/sys/kernel/random/boot_id && "
            f'hostname machine{self.number} && cd /mnt/home && exec "$@"'
        )
        words = ["ip", "netns", "exec", self.network, "unshare", "-mu", "sh", "-ec", inside, "sh", *command]
        with open(self.folder / log, "a") as file:
            process = subprocess.Popen(
                words, env=os.environ | own | environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.started.append(process)
        return process

    def run(self, command: Sequence[str], timeout_s: float = 120.0, **environment: str) -> str:
        """Run a command to its end; return what was printed. AssertionError: it failed."""
        process = self.start(command, "run.txt", **environment)
        status = process.wait(timeout=timeout_s)
        told = (self.folder / "run.txt").read_text()
        assert status == 0, f"{' '.join(command)} on machine {self.number}: {told[-4000:]}"
        return told

    def end(self) -> None:
        """Kill all that runs here, at once: the machine is lost."""
        told = subprocess.run(["ip", "netns", "pids", self.network], capture_output=True, text=True)
        for pid in told.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.started:
            process.wait()
        self.started.clear()


@contextmanager
def machines(number: int, folder: Path, rate: str = "1gbit", delay: str = "500us"):
    """Yield machines that share no folder, with links of a rate, and of a delay each way where the kernel has netem.

    Args:
        number: How many, 1 to 99.
        folder: On the host; a folder a machine is made below it.
    """
    made, turn = [Machine(one, folder / f"machine{one}") for one in range(number)], FileLock(LOCK)
    turn.acquire(timeout=900)  # addresses are the host's
    try:
        _remove(made)  # what a killed test left
        _ip(f"link add {SWITCH} type bridge", f"link set {SWITCH} up", f"addr add 10.77.0.100/24 dev {SWITCH}")
        for machine in made:
            for name in ("tmp", "home"):
                (machine.folder / name).mkdir(parents=True)
            (machine.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
            inside = f"-n {machine.network}"
            _ip(
                f"netns add {machine.network}",
                f"link add {machine.cable} type veth peer name eth0 netns {machine.network}",
                f"link set {machine.cable} master {SWITCH} up",
                f"{inside} addr add {machine.address}/24 dev eth0",
                f"{inside} link set eth0 up",
                f"{inside} link set lo up",
            )
            _slow_down(machine, rate, delay)
        yield made
    finally:
        for machine in made:
            machine.end()
        _remove(made)
        turn.release()


def _remove(made: list[Machine]) -> None:
    for machine in made:
        for name in (f"link del {machine.cable}", f"netns del {machine.network}"):
            subprocess.run(["ip", *name.split()], capture_output=True)
    subprocess.run(["ip", "link", "del", SWITCH], capture_output=True)


def _slow_down(machine: Machine, rate: str, delay: str) -> None:
    """Shape what a machine sends; kernels without netem bound the rate alone."""
    tc = ["ip", "netns", "exec", machine.network, "tc", "qdisc", "add", "dev", "eth0", "root"]
    both = subprocess.run([*tc, *f"netem delay {delay} rate {rate} limit 100000".split()], capture_output=True)
    if both.returncode:
        subprocess.run([*tc, *f"tbf rate {rate} burst 256kb latency 50ms".split()], check=True)


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)
