"""`gnnscale doctor`: what this machine offers to a run, and what would hinder it."""

import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig

from .. import compile_ahead, kernel_sets
from ..kernel_sets import version_of
from ..memory import format_bytes, free_memory_bytes, memory_limit_bytes
from ..report.terminal import print_facts, print_text
from ..system import advise, usable_cores
from .errors import UsageError
from .ranks import default_precision, told_precision

_PACKAGES = ("lightning-gnnscale", "lightning", "torch", "torch-geometric", "triton", "numpy", "numba", "pyarrow")
_OPTIONAL = ("pymetis", "kaminpar", "ogb", "ray", "s3fs", "wandb", "tensorboard", "mlflow")
_BLOCK = 1 << 22
_SLOW_DISK = 200 << 20  # bytes a second; below, out-of-core epochs mostly wait for the disk
_SMALL_SHM = 1 << 30


def run(config: DictConfig) -> None:
    """Print versions, GPUs and links, memory limits, disk speed, kernels and ports, and what to look at."""
    if config.disk_bytes < 0:
        raise UsageError(f"disk_bytes must be at least 0, got {config.disk_bytes}")
    bad = next((port for port in config.ports if isinstance(port, bool) or not 1 <= int(port) <= 65_535), None)
    if bad is not None:
        raise UsageError(f"ports must be in [1, 65535], got {bad}")
    advice: list[str] = []
    print_facts("versions", versions(advice))
    print_facts("processors", _processors(advice))
    print_facts("memory", memory(advice))
    print_facts("GPUs", gpus(advice))
    print_facts("disk", disk(Path(config.paths.stores), config.disk_bytes, advice))
    print_facts("kernels", kernels())
    print_facts("network", _network(list(config.ports), advice))
    for line in advice or ["nothing hinders a run"]:
        print_text(f"- {line}")


def versions(advice: list[str]) -> dict[str, str]:
    """Return the versions of Python and of the packages that matter."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for name in _PACKAGES:
        found[name] = version_of(name) or "not installed"
        if not version_of(name) and name != "triton":
            advice.append(f"{name} is not installed: pip install lightning-gnnscale")
    found["optional"] = ", ".join(f"{name} {version_of(name)}" for name in _OPTIONAL if version_of(name))
    if version_of("lightning") in ("2.6.2", "2.6.3"):
        advice.append(f"lightning {version_of('lightning')} is a compromised release: install another one")
    if sys.platform != "linux":
        advice.append(f"{sys.platform} is not Linux: only partitioning and training on the CPU were tried there")
    return found


def memory(advice: list[str]) -> dict[str, str]:
    """Return the memory that the machine and this process' cgroups allow."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit_bytes()
    found = {"of the machine": format_bytes(total), "free for a run": format_bytes(free_memory_bytes())}
    if limit < total:
        found["cap of a cgroup"] = format_bytes(limit)
        advice.append(
            f"a cgroup caps memory at {format_bytes(limit)}: runs are planned for that; page cache counts too"
        )
    shm = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    found["/dev/shm"] = format_bytes(shm)
    if shm < _SMALL_SHM:
        advice.append(
            f"/dev/shm has {format_bytes(shm)}: source=processes hands batches over in it; in Docker say --shm-size=8g"
        )
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        found["open files"] = f"{soft:,} of at most {hard:,}"
        if soft < 1024:
            advice.append(f"ulimit -n is {soft}: 1024 or more are needed for many parts")
    except ImportError:
        pass
    return found


def gpus(advice: list[str]) -> dict[str, str]:
    """Return the GPUs, and how each pair is linked."""
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            advice.append(f"nvidia-smi is there, and torch {torch.__version__} sees no GPU: install a build with CUDA")
        return {"none": "training runs on the CPU, by default in two processes"}
    count = torch.cuda.device_count()
    found = {"a run takes": f"{count} GPU{'s' * (count > 1)}, a process each; trainer.devices= takes fewer"}
    found["it computes in"] = told_precision(default_precision(), "high")
    for number in range(count):
        of = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        found[f"cuda:{number}"] = (
            f"{of.name}, {of.uuid}, {format_bytes(total)}, {format_bytes(free)} free, compute {of.major}.{of.minor}"
        )
        if free < total / 2:
            advice.append(f"cuda:{number}: another process holds {format_bytes(total - free)}")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    direct = [f"{a}->{b}" for a, b in pairs if torch.cuda.can_device_access_peer(a, b)]
    if pairs:
        found["peer access"] = (
            "all pairs" if len(direct) == len(pairs) else ", ".join(direct) or "none: rows go through the host"
        )
    topology = _output("nvidia-smi", "topo", "-m")
    for line in (topology or "").splitlines() if pairs else ():
        if line.startswith("GPU"):
            name, *links = line.split()
            found[f"links of {name.lower()}"] = " ".join(links[:count])
    found["cuda"] = f"{torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    found["host to device"] = _copy_speed()
    return found


def disk(folder: Path, num_bytes: int, advice: list[str]) -> dict[str, str]:
    """Return space and speed of the disk of a folder, or of its nearest existing parent."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.absolute().parent
    space = shutil.disk_usage(folder)
    found = {"folder": str(folder), "free": f"{format_bytes(space.free)} of {format_bytes(space.total)}"}
    if not os.access(folder, os.W_OK):
        advice.append(f"{folder} cannot be written to: say paths.stores=")
        return found
    num_bytes = min(num_bytes, space.free // 4) // _BLOCK * _BLOCK
    if num_bytes == 0:
        return found
    path = folder / f".gnnscale-doctor.{os.getpid()}"
    try:
        written, read, rows = _measure_disk(path, num_bytes)
    finally:
        path.unlink(missing_ok=True)
    found["written, synced"] = f"{format_bytes(written)}/s"
    found["read in order, cold"] = f"{format_bytes(read)}/s"
    found["4 KiB reads, cold"] = f"{rows:,.0f}/s, one at a time"
    if read < _SLOW_DISK:
        advice.append(
            f"{folder} reads {format_bytes(read)}/s: put stores on a faster disk (paths.stores=), or keep parts in "
            "memory where they fit (rows=resident)"
        )
    return found


def kernels() -> dict[str, str]:
    """Return how many of the known kernels are compiled for this machine, and in which folder."""
    known = kernel_sets.recorded()
    missing = compile_ahead.still_missing(list(known))
    folder = kernel_sets.cache_folder()
    size = sum(path.stat().st_size for path in folder.glob("*.kernel"))
    found = {
        "compiled": f"{len(known) - len(missing)} of {len(known)}",
        "their cache": f"{folder}, {format_bytes(size)}",
    }
    if missing:
        seconds = sum(kernel.seconds for kernel in missing)
        found["to be compiled"] = f"when a command first needs them, {seconds:.0f} s of CPU for all of them"
    return found


def _measure_disk(path: Path, num_bytes: int) -> tuple[float, float, float]:
    """Return bytes a second written and read, and small reads a second, past the page cache if possible."""
    block = np.random.default_rng(0).integers(0, 255, _BLOCK, np.uint8).tobytes()
    began = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(num_bytes // _BLOCK):
            file.write(block)
        os.fsync(file.fileno())
    written = num_bytes / (time.perf_counter() - began)
    with open(path, "rb", buffering=0) as file:
        advise(file.fileno(), 0, 0, "dontneed")
        began = time.perf_counter()
        while file.read(_BLOCK):
            pass
        read = num_bytes / (time.perf_counter() - began)
        advise(file.fileno(), 0, 0, "dontneed")
        places = np.random.default_rng(1).permutation(num_bytes // 4096)[:500] * 4096
        began = time.perf_counter()
        for place in places.tolist():
            os.pread(file.fileno(), 4096, place)
        return written, read, len(places) / (time.perf_counter() - began)


def _processors(advice: list[str]) -> dict[str, str]:
    usable = usable_cores()
    load = os.getloadavg()[0]
    if load > usable:
        advice.append(f"{load:.1f} processes compete for {usable} CPUs: other work runs here, so runs take longer")
    threads = os.environ.get("OMP_NUM_THREADS")
    return {
        "CPUs": f"{usable} of {os.cpu_count()} may be used, load {load:.1f}",
        "threads of torch": f"{torch.get_num_threads()}" + (f" (OMP_NUM_THREADS={threads})" if threads else ""),
    }


def _network(ports: list[int], advice: list[str]) -> dict[str, str]:
    found = {"host": socket.gethostname()}
    try:
        found["its address"] = socket.gethostbyname(socket.gethostname())
        if found["its address"].startswith("127."):
            advice.append(
                f"{found['host']} resolves to {found['its address']}: other machines cannot reach it by name; give "
                "torchrun an address of this machine"
            )
    except OSError as error:
        found["its address"] = f"not resolved ({error.strerror or error})"
        advice.append(f"{found['host']} does not resolve: add it to /etc/hosts, or give torchrun an address")
    for port in ports:
        state = _port_state(int(port))
        found[f"port {port}"] = state
        if state != "free":
            advice.append(
                f"port {port} is not free ({state}): training on several machines needs another --master-port"
            )
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            found["loopback"] = "processes of this machine reach each other"
    except OSError as error:
        found["loopback"] = f"closed ({error.strerror or error})"
        advice.append("127.0.0.1 cannot be bound: processes of one run cannot reach each other")
    return found


def _port_state(port: int) -> str:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
            return "free"
        except OSError as error:
            return error.strerror or str(error)


def _copy_speed() -> str:
    rows = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    rows.to("cuda:0", non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(4):
        rows.to("cuda:0", non_blocking=True)
    torch.cuda.synchronize()
    return f"{format_bytes(4 * rows.nbytes / (time.perf_counter() - began))}/s, pinned memory to cuda:0"


def _output(*words: str) -> str | None:
    """Return what a program prints; None where it is missing or fails."""
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
