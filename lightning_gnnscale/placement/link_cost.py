"""What a peer read costs compared with a host read: measured once a machine, kept in the user's cache folder."""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from ..events import held_lock
from ..triton_kernels.gather_rows import RowTables, gather_tiers
from .shared_rows import SharedRows

ROW_BYTES = 512
_TABLE_ROWS, _READS, _ROUNDS = 1 << 16, 1 << 15, 7


def link_alphas(devices: Sequence[torch.device | None], alpha: float | str = "auto") -> np.ndarray:
    """Return the cost of reads between devices of this machine, over that of host reads.

    Of two GPUs that reach each other: reads of the second's memory and of pinned memory by the kernel that gathers. Of
    GPUs that do not: 1, nothing is gained from a peer. Of CPUs: reads of shared memory and of a memory map.

    Args:
        devices: The devices that train, of one machine; None: a GPU that this process does not see.
        alpha: Cost instead of a measured one, where devices reach each other; "auto": measured.

    Returns:
        (num_devices, num_devices) float64 in [0, 1], 0 on the diagonal.

    Cost: under a second a pair of GPUs, once a machine; then one small file is read. Ranks wait for the first to
        measure.
    """
    alphas = np.zeros((len(devices), len(devices)))
    for one, other in combinations(range(len(devices)), 2):
        alphas[one, other] = alphas[other, one] = _pair_alpha(devices[one], devices[other], alpha)
    return alphas


def devices_here(num_devices: int) -> list[torch.device]:
    """Return as many devices as a machine like this would train on: its GPUs, or where it has none CPUs."""
    return [torch.device("cuda", i) if torch.cuda.device_count() else torch.device("cpu") for i in range(num_devices)]


def _pair_alpha(one: torch.device | None, other: torch.device | None, alpha: float | str) -> float:
    if one is None or other is None:
        return 1.0
    if one.type == "cpu":
        return remembered(f"cpu: {_processor()}", measure_on_cpu)["alpha"] if alpha == "auto" else alpha
    if one == other:
        return 0.0  # two processes of one GPU
    beyond = max(one.index, other.index) >= torch.cuda.device_count()
    if beyond or not torch.cuda.can_device_access_peer(one, other):
        return 1.0
    if alpha != "auto":
        return alpha
    # By their own ids: which GPU is number 0 depends on CUDA_VISIBLE_DEVICES.
    return remembered(f"cuda: {gpu_name(one)}, {gpu_name(other)}", partial(measure_on_cuda, one, other))["alpha"]


def gpu_uuid(device: torch.device) -> str:
    """Return the id of a GPU that is the same in every process, whatever number it has there."""
    return str(torch.cuda.get_device_properties(device).uuid)


def gpus_seen(uuids: Sequence[str]) -> list[torch.device | None]:
    """Return the GPUs with these ids as this process numbers them; None for one that it does not see."""
    here = {gpu_uuid(torch.device("cuda", number)): number for number in range(torch.cuda.device_count())}
    return [torch.device("cuda", here[uuid]) if uuid in here else None for uuid in uuids]


def gpu_name(device: torch.device) -> str:
    """Return the model of a GPU and its id, by which it is known in files and reports."""
    return f"{torch.cuda.get_device_name(device)} {gpu_uuid(device)}"


def remembered(devices: str, measure: Callable[[], tuple[float, float]]) -> dict:
    """Return what was measured for devices of these names, after measuring if it never was.

    `measure` returns seconds a peer row and seconds a host row. Returned is {"alpha": in [0, 1], "peer_ns_per_row":
    ..., "host_ns_per_row": ...}.
    """
    path = memory_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with held_lock(f"{path}.lock", "is measuring the cost of reads for alpha"):
            known = _read(path)
            if devices not in known:
                known[devices] = _entry(*measure())
                part = path.with_suffix(".part")
                part.write_text(json.dumps(known, indent=1))
                os.replace(part, path)
            return known[devices]
    except OSError:  # a folder that cannot be written to
        return _entry(*measure())


def memory_file() -> Path:
    """Return the file of what was measured; `XDG_CACHE_HOME` is respected."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lightning_gnnscale" / "link_cost.json"


def measure_on_cpu() -> tuple[float, float]:
    """Return seconds a row of shared memory and of a memory map, rows at random, the best of some rounds in turns."""
    width = ROW_BYTES // 8
    peer = SharedRows.create(_TABLE_ROWS, width, np.float64)
    peer.array[:] = 0
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file, peer.array)
        file.flush()
        host = np.load(file.name, mmap_mode="r")
        out, order = np.empty((_READS, width)), np.random.default_rng(0).permutation(_TABLE_ROWS)[:_READS]
        best = [np.inf, np.inf]
        for _ in range(_ROUNDS):
            for i, table in enumerate((peer.array, host)):
                begin = time.perf_counter()
                gather_tiers(order, None, RowTables([table]), out)
                best[i] = min(best[i], time.perf_counter() - begin)
    peer.release()
    return best[0] / _READS, best[1] / _READS


def measure_on_cuda(here: torch.device, there: torch.device) -> tuple[float, float]:
    """Return seconds a row of another GPU's memory and of pinned memory, read by the first."""
    width = ROW_BYTES // 8
    peer = torch.zeros(_TABLE_ROWS, width, dtype=torch.float64, device=there)
    torch.empty(1, device=here).to(peer.device)  # opens the way for kernels of the first to the second's memory
    host = torch.zeros(_TABLE_ROWS, width, dtype=torch.float64).pin_memory()
    order = torch.randperm(_TABLE_ROWS, generator=torch.Generator().manual_seed(0))[:_READS].to(here)
    out, best = torch.empty(_READS, width, dtype=torch.float64, device=here), [np.inf, np.inf]
    with torch.cuda.device(here):
        for _ in range(_ROUNDS):
            for i, table in enumerate((peer, host)):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                gather_tiers(order, None, RowTables([table]), out)
                end.record()
                end.synchronize()
                best[i] = min(best[i], begin.elapsed_time(end) / 1e3)
    return best[0] / _READS, best[1] / _READS


def _entry(peer_s: float, host_s: float) -> dict:
    alpha = min(1.0, max(0.0, peer_s / host_s))
    return {"alpha": alpha, "peer_ns_per_row": peer_s * 1e9, "host_ns_per_row": host_s * 1e9}


def _read(path: Path) -> dict:
    with suppress(OSError, ValueError):  # missing or damaged: measured again
        known = json.loads(path.read_text())
        if isinstance(known, dict):
            return {name: entry for name, entry in known.items() if _is_entry(entry)}
    return {}


def _is_entry(entry) -> bool:
    alpha = entry.get("alpha") if isinstance(entry, dict) else None
    return isinstance(alpha, int | float) and 0 <= alpha <= 1


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
