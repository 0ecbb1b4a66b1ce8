"""Memory: what processes hold and may hold, what is free, which pages of a file are cached, and sizes as text."""

import ctypes
import os
import re
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from .errors import short

_SUFFIXES = ("B", "KiB", "MiB", "GiB", "TiB")
_FACTORS = {"": 1, "b": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def format_bytes(num_bytes: float) -> str:
    """Return a size with three significant digits, for example '1.53 GiB'."""
    size, suffix = float(num_bytes), _SUFFIXES[0]
    for candidate in _SUFFIXES:
        suffix = candidate
        if abs(size) < 1024 or candidate == _SUFFIXES[-1]:
            break
        size /= 1024
    digits = 0 if suffix == "B" or size >= 100 else 1 if size >= 10 else 2
    return f"{size:.{digits}f} {suffix}"


def parse_bytes(size: int | float | str | None, name: str = "size") -> int | None:
    """Read a size: bytes, or text like '24GiB', '500 MB', '8g' (a bare letter is binary); ValueError names `name`."""
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, str | Real):
        raise ValueError(f"{name} must be bytes or a size like 24GiB, 500MB, 8g; got {short(size)}")
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?\d+)?)\s*([a-z]*)\s*", str(size).lower())
    if not match or match[2] not in _FACTORS:
        raise ValueError(f"{name} must be bytes or a size like 24GiB, 500MB, 8g; got {short(size)}")
    return int(float(match[1]) * _FACTORS[match[2]])


def read_sizes(settings: Any, *names: str) -> None:
    """Let attributes of a dataclass, frozen or not, that are sizes as text be numbers of bytes; others stay."""
    for name in names:
        if isinstance(getattr(settings, name), str):
            object.__setattr__(settings, name, parse_bytes(getattr(settings, name), name))


def format_seconds(seconds: float) -> str:
    """Return a duration as '0.42 s', '12.3 s' or '4 min 05 s'."""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


# Linux lists each thread's children, where it was built to; psutil reads every process of the machine to find them.
LISTS_CHILDREN = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists()

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def resident_bytes(pid: int | None = None) -> int:
    """Return the anonymous plus shared resident bytes of a process and its descendants; 0 for one that has ended.

    What a forked process still shares with its parent counts once. File-backed pages are left out: the page cache
    gives them back when memory is short. Where the kernel does not distinguish them, whole resident sizes are summed.
    """
    pid = pid or os.getpid()
    processes = [pid, *descendants(pid)]
    if len(processes) == 1:
        return _own_bytes(pid)
    return sum(shared_out_bytes(process) for process in processes)


def process_bytes() -> int:
    """Return the anonymous plus shared resident bytes of this process alone."""
    return _own_bytes(os.getpid())


def disk_read_bytes() -> int | None:
    """Return the bytes that this process has had the disk read, pages of mapped files included; None: unknown here."""
    try:
        return psutil.Process().io_counters().read_bytes
    except (AttributeError, psutil.Error, OSError):  # a system, or a container, that does not tell
        return None


def memory_limit_bytes() -> int:
    """Return the most memory that this process may use: the machine's, or less where a cgroup (v1 or v2) caps it."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _cgroup_limits())])


def free_memory_bytes() -> int:
    """Return the memory that this process could take now, bytes.

    Page cache counts as free: the kernel gives it back. Under a cgroup's cap the page cache is charged to the cap too,
    so a file that is mapped and read at random competes with what is taken here.
    """
    free = [limit - used for limit, used in _cgroup_limits()]
    return max(0, min([psutil.virtual_memory().available, *free]))


LEFT_BYTES = 512 << 20  # of free memory that exact evaluation leaves, where there is much
FIXED_BYTES = 64 << 20  # of chunks of sources, and blocks of edges that are read and sorted, whatever memory is
SORTING_BYTES = 384 << 20  # of those blocks, and of windows of sorted edges: no more, however much memory there is


def pass_bytes(free_bytes: int) -> int:
    """Return what the passes of exact evaluation on a host may hold of its free memory.

    Two thirds, or more where much is free. The rest is for pages of files that are written, and for what else the
    processes do meanwhile.
    """
    return max(2 * free_bytes // 3, min(free_bytes - LEFT_BYTES, 7 * free_bytes // 8))


def sums_bytes(memory_bytes: int, fixed_bytes: int = FIXED_BYTES) -> int:
    """Return what a pass by broadcasting holds of sums, and of edges beside them.

    The rest is for chunks of sources, and for edges that are read and sorted: three sixteenths of memory_bytes, at
    least `fixed_bytes` and at most `SORTING_BYTES`, but never more than three quarters.
    """
    space = max(memory_bytes * 13 // 16, memory_bytes - SORTING_BYTES)
    return max(1, memory_bytes // 4, min(space, memory_bytes - fixed_bytes))


def gpu_memory_bytes() -> int | None:
    """Return the memory of the smallest GPU that this process sees, bytes; None without one. No context is made."""
    import torch  # only here: plans for CPUs do without it

    if not torch.cuda.is_available():
        return None
    return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))


def return_freed_memory() -> None:
    """Have the C library give freed arrays of 1 MiB and more back to the system, from now on; glibc alone.

    It would keep those of up to 32 MiB for later, in each thread's own arena: under a cap on memory 200 MiB of nothing.
    """
    _set_thresholds(1 << 20, 4 << 20)  # smaller ones are used again: new memory is zeroed first, page by page


def keep_freed_memory() -> None:
    """Have the C library keep freed arrays of up to 1 GiB for the next that are asked for, from now on; glibc alone.

    A training step asks for the same tensors again and again. Where they are mapped again, faults and the zeroing of
    pages are a fifth to a third of its CPU time.
    """
    _set_thresholds(1 << 30, (1 << 31) - 1)


def _set_thresholds(mapped_bytes: int, trimmed_bytes: int) -> None:
    """Set from which size on arrays are mapped one by one, and how much may be free at the end of the heap."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, mapped_bytes)
        mallopt(_M_TRIM_THRESHOLD, trimmed_bytes)
        mallopt(_M_ARENA_MAX, 2)


def trim_heap() -> None:
    """Give back to the system what this process has freed, at the end of a stage; glibc alone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _cgroup_limits() -> list[tuple[int, int]]:
    """Return (limit, bytes held beside page cache) of each memory cgroup that caps this process."""
    found = []
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        elif number == "0":
            base, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "")
        else:
            continue
        group = base / path.lstrip("/")
        # A container may see its own group as the root, under a path that does not exist here.
        for folder in {base, *(one for one in (group, *group.parents) if one.is_relative_to(base))}:
            limit, used = (_text(folder / name).strip() for name in names[:2])
            if limit.isdigit() and used.isdigit() and int(limit) < psutil.virtual_memory().total:
                found.append((int(limit), int(used) - _cached_bytes(folder, names[2])))
    return found


def _cached_bytes(folder: Path, prefix: str) -> int:
    """Return the file-backed bytes that a cgroup is charged with and that can be dropped."""
    counts = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines())
    return sum(int(counts.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file"))


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have, as far as they live."""
    if not LISTS_CHILDREN:
        try:
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        except psutil.Error:
            return []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended
        return []
    lists = [_bytes_of(f"/proc/{pid}/task/{thread}/children") for thread in threads]
    children = [int(child) for child in b" ".join(lists).split()]
    return children + [one for child in children for one in descendants(child)]


class Counters(NamedTuple):
    """What the kernel counts of a process; reading it takes the same time at any size.

    Attributes:
        held: anonymous and shared resident bytes; all resident bytes where they are not distinguished.
        file_backed: resident bytes of mapped files.
        highest: the most bytes that were resident at a time, file-backed ones among them; 0 where it is unknown.
        cpu_s: seconds of all its threads so far.
        stack_start: the address at which its stack begins, chosen again at each `exec`; 0 where it is unknown.
    """

    held: int
    file_backed: int = 0
    highest: int = 0
    cpu_s: float = 0.0
    stack_start: int = 0

    @property
    def resident(self) -> int:
        return self.held + self.file_backed


_COUNTERS = re.compile(rb"(VmHWM|RssAnon|RssFile|RssShmem):\s*(\d+)")
_USER, _SYSTEM, _STACK_START = 11, 12, 25  # of the words of /proc/PID/stat behind the name


def counters(pid: int) -> Counters | None:
    """Return what the kernel counts of a process, no bytes where it waits to be waited for; None where it is gone."""
    found = _COUNTERS.findall(_bytes_of(f"/proc/{pid}/status"))
    words = _bytes_of(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    if len(found) < 4 or len(words) <= _STACK_START:
        try:
            process = psutil.Process(pid)
            return Counters(process.memory_info().rss, cpu_s=sum(process.cpu_times()[:2]))
        except psutil.Error:
            return None
    count = {name: 1024 * int(kibibytes) for name, kibibytes in found}
    cpu_s = (int(words[_USER]) + int(words[_SYSTEM])) / os.sysconf("SC_CLK_TCK")
    held = count[b"RssAnon"] + count[b"RssShmem"]
    return Counters(held, count[b"RssFile"], count[b"VmHWM"], cpu_s, int(words[_STACK_START]))


def shared_out_bytes(pid: int) -> int:
    """Return what a process holds, each page divided by the number of processes that hold it.

    Cost: a walk of its page tables, some 4 to 30 ms for each GiB, for which its memory maps are held.
    """
    rollup = _text(Path(f"/proc/{pid}/smaps_rollup"))
    kibibytes = [int(line.split()[1]) for line in rollup.splitlines() if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
    return 1024 * sum(kibibytes) if kibibytes else _own_bytes(pid)


def _own_bytes(pid: int) -> int:
    counted = counters(pid)
    return 0 if counted is None else counted.held


def _bytes_of(path: str) -> bytes:
    """Return a small file of the kernel's; nothing where it is gone. It is read often: a `Path` would cost as much."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _text(path: Path) -> str:
    """Return the text of a file; nothing where it is gone, as the files of what has ended are."""
    try:
        return path.read_text()
    except OSError:
        return ""
