"""Machines on one host: each has a network, folders and a name of its own; links between them are as slow as told.

What a machine is made of: a network namespace with one cable to a switch; a mount namespace in which `/mnt` is its own
folder, with its home and temporary files, `/dev/shm` is its own, and the folders of the others are hidden; processes
that see no others; a host name. Programs, memory and processors are the host's. It takes root, `ip`, `tc`, `unshare`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock

from lightning_gnnscale.system import end_with_parent

RAY_PORT, MEETING_PORT = 6379, 29500
CLI = [sys.executable, "-m", "lightning_gnnscale.cli"]
SHORT = ["trainer.accelerator=cpu", "trainer.max_epochs=2", "trainer.enable_progress_bar=false", "test=false"]
SWITCH, LOCK = "gnnscale0", Path(tempfile.gettempdir()) / "gnnscale-machines.lock"


def cannot_be_made() -> str | None:
    """Return why machines cannot be made here; None: they can."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        return f"machines take root, and the tools {', '.join(missing) or 'that are here'}"
    if any(str(path).startswith("/mnt/") for path in (Path(sys.executable), Path(__file__).resolve())):
        return "machines have folders of their own at /mnt, where these programs lie"
    probe = subprocess.run(["unshare", "-munpf", "true"], capture_output=True, text=True)
    return probe.stderr.strip() or None


@dataclass
class Machine:
    """One of them; `boot` before use.

    Attributes:
        number: From 0.
        folder: What is at /mnt on it, as the host sees it.
    """

    number: int
    folder: Path
    _init: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        """Address in the network."""
        return f"10.77.0.{self.number + 1}"

    @property
    def network(self) -> str:
        return f"gnnscale-{self.number}"

    @property
    def cable(self) -> str:
        return f"gnnscale-c{self.number}"

    def boot(self) -> None:
        """Start the first process, whose end is that of the machine; it ends with this process, however that ends."""
        for name in ("tmp", "home"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        inside = (
            f"mount --bind {self.folder} /mnt && mount -t tmpfs none {self.folder.parent} && "
            "mount -t tmpfs -o size=2g none /dev/shm && mount --bind /mnt/boot_id /proc/sys/kernel/random/boot_id && "
            f"hostname machine{self.number} && touch /mnt/is_up && exec sleep infinity"
        )
        unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = ["ip", "netns", "exec", self.network, *unshare, "sh", "-ec", inside]
        self._init = subprocess.Popen(command, preexec_fn=end_with_parent)
        while not (self.folder / "is_up").exists():
            assert self._init.poll() is None, f"machine {self.number} did not start"
            time.sleep(0.01)

    def start(self, command: Sequence[str], log: str = "log.txt", **environment: str) -> subprocess.Popen:
        """Start a command in this machine's home; what it prints goes to a file in its folder."""
        own = {"HOME": "/mnt/home", "TMPDIR": "/mnt/tmp", "RAY_TMPDIR": "/mnt/tmp", "GLOO_SOCKET_IFNAME": "eth0"}
        own |= {"GNNSCALE_FETCHED": "/mnt/fetched", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        first = psutil.Process(self._init.pid).children()[0].pid
        enter = ["nsenter", f"--target={first}", "--mount", "--uts", "--net", "--pid"]
        words = [*enter, "sh", "-c", 'cd /mnt/home && exec "$@"', "sh", *command]
        outside = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}  # this process'
        with open(self.folder / log, "a") as file:
            return subprocess.Popen(
                words, env=outside | own | environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def run(self, command: Sequence[str], timeout_s: float = 120.0, **environment: str) -> str:
        """Run a command to its end; return what was printed. AssertionError: it failed."""
        status = self.start(command, "run.txt", **environment).wait(timeout=timeout_s)
        told = (self.folder / "run.txt").read_text()
        assert status == 0, f"{' '.join(command)} on machine {self.number}: {told[-4000:]}"
        return told

    def processes(self, name: str) -> list[psutil.Process]:
        """What runs here, of those whose first word of the command line has a name in it."""
        found = []
        for process in psutil.Process(self._init.pid).children(recursive=True):
            with suppress(psutil.Error, IndexError):
                if name in process.cmdline()[0]:
                    found.append(process)
        return found

    def end(self) -> None:
        """Kill all that runs here, at once: the machine is lost."""
        if self._init is not None:
            self._init.kill()  # and with it its child, the first process of all others
            self._init.wait()


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
            machine.boot()
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


def start_ray(made: list[Machine], label: str | None = None) -> None:
    """Start a node of one Ray cluster on each machine; all but the first have the label."""
    ray, head = [sys.executable, "-m", "ray.scripts.scripts"], made[0].address
    for machine in made:
        where = [f"--address={head}:{RAY_PORT}"]
        if machine is made[0]:
            where = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false", "--temp-dir=/mnt/tmp/ray"]
        size = ["--num-cpus=2", "--object-store-memory=200000000", f"--node-ip-address={machine.address}"]
        labels = [] if label is None or machine is made[0] else [f'--resources={{"{label}": 1}}']
        machine.run([*ray, "start", *where, *size, *labels], timeout_s=600.0)


def start_training(
    made: list[Machine], words: list[str], store: str = "/mnt/store", **environment: str
) -> list[subprocess.Popen]:
    """Start `gnnscale train` by torchrun, a process a machine."""
    words = ["train", f"store={store}", *SHORT, *words, f"trainer.num_nodes={len(made)}", "trainer.devices=1"]
    started = []
    for machine in made:
        launch = [f"--nnodes={len(made)}", "--nproc-per-node=1", f"--node-rank={machine.number}"]
        launch += [f"--master-addr={made[0].address}", f"--master-port={MEETING_PORT}", "--no-python", *CLI]
        words_here = [*words, "hydra.run.dir=run"]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, *words_here]
        started.append(machine.start(command, **environment))
    return started


def wait_for(made: list[Machine], started: list[subprocess.Popen], limit_s: float = 300.0) -> None:
    deadline = time.monotonic() + limit_s
    for machine, process in zip(made, started, strict=True):
        try:
            status = process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = "no end"
        assert status == 0, f"machine {machine.number}, {status}: {(machine.folder / 'log.txt').read_text()[-4000:]}"
