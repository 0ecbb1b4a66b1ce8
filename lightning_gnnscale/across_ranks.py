"""Ranks whose machines may share no folder: who sees which one, files that are sent, failures that end all alike."""

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist

from .errors import GNNScaleError, clear_error, disk_errors

CHUNK_BYTES = 8 << 20  # of a file that is on its way at once
Made = TypeVar("Made")


def world_size() -> int:
    """Return the number of processes of the run, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def own_ranks(rank: int, world_size: int, logical_ranks: int) -> range:
    """Return the logical ranks whose batches a process computes: a contiguous share, even but for one."""
    return range(rank * logical_ranks // world_size, (rank + 1) * logical_ranks // world_size)


def group_device() -> torch.device:
    """Return the device of tensors that the process group sends: NCCL takes none of the CPU's."""
    return torch.device("cuda") if "gloo" not in dist.get_backend() else torch.device("cpu")


def gather_from_ranks(own: Any) -> list[Any]:
    """Return a small object of each rank, on every rank; of this process alone without a process group."""
    objects = [own] * world_size()
    if len(objects) > 1:
        with clear_error("agreeing with the other processes"):
            dist.all_gather_object(objects, own)
    return objects


@contextmanager
def failing_together(kind: type[GNNScaleError] = GNNScaleError) -> Iterator[None]:
    """Raise on every rank what one of them raises in the block; it ends when all ranks are at its end.

    A rank that failed alone would leave the others waiting for it. Every rank enters the block, in which none waits
    for another before it may fail. Ranks without an error of `kind` raise that of the first rank that has one.
    """
    own = None
    try:
        yield
    except kind as error:
        own = error
    told = gather_from_ranks(None if own is None else (type(own), str(own)))
    if own is not None:
        raise own
    for failure in told:
        if failure is not None:
            raise failure[0](failure[1])


def of_first_rank(make: Callable[[], Made]) -> Made:
    """Return on every rank what the first one makes: a small object that the others may have no files for."""
    with failing_together():
        made = make() if rank() == 0 else None
    return gather_from_ranks(made)[0]


def first_in_folder(folder: Path, remedy: str) -> list[int]:
    """Return, for each rank, the first rank that sees the same folder; every rank calls it.

    Each rank leaves a file there and looks for those of the ranks before it, by names that nobody has asked for
    before: file systems of a network may remember for a while that a file was not there. The folder is created where it
    is missing, unless there is one rank alone; remedy: what to do where it cannot be written to.
    """
    if world_size() == 1:
        return [0]
    token = gather_from_ranks(secrets.token_hex(8))[0]
    marks = [folder / f".seen-{token}.{number}" for number in range(rank() + 1)]
    try:
        with failing_together(), disk_errors(marks[-1], "written", remedy):
            folder.mkdir(parents=True, exist_ok=True)
            marks[-1].touch()
        return gather_from_ranks(next(number for number, mark in enumerate(marks) if mark.exists()))
    finally:
        with suppress(OSError):
            marks[-1].unlink()


def send_file(source: int, takers: Sequence[int], path: Path, remedy: str) -> None:
    """Copy a file of one rank to others; it has its name there only when it is whole. Every rank calls it.

    Args:
        source, takers: the rank that has the file, and at least one other that gets it.
        path: the file, on the source and on each taker as that one names it.
        remedy: what to do where it cannot be written.

    Raises:
        GNNScaleError: on every rank, where one cannot read or write it.

    Cost: CHUNK_BYTES of memory on each rank that takes part.
    """
    reads, writes = rank() == source, rank() in takers
    mode, doing, name = ("rb", "read", path) if reads else ("wb", "written", Path(f"{path}.part"))
    file: BinaryIO | None = None
    lost: list[OSError] = []
    try:
        with failing_together(), disk_errors(name, doing, remedy):
            file = open(name, mode) if reads or writes else None  # noqa: SIM115
        size = gather_from_ranks(os.fstat(file.fileno()).st_size if reads else 0)[source]
        buffer = torch.empty(min(size, CHUNK_BYTES) if reads or writes or len(takers) > 1 else 0, dtype=torch.uint8)
        for start in range(0, size, CHUNK_BYTES):
            chunk = buffer[: size - start]
            with _kept(lost):
                if reads and file.readinto(memoryview(chunk.numpy())) < len(chunk):
                    raise OSError("it was shortened while it was sent")
            chunk = _pass_on(chunk, source, takers)
            with _kept(lost):
                if writes:
                    file.write(memoryview(chunk.numpy()))
        with failing_together(), disk_errors(name, doing, remedy):
            if lost:
                raise lost[0]
            if writes:
                file.close()
                os.replace(name, path)
    finally:
        with suppress(OSError):
            if file is not None:
                file.close()
        with suppress(OSError):
            if writes:
                name.unlink()


def _pass_on(chunk: torch.Tensor, source: int, takers: Sequence[int]) -> torch.Tensor:
    """Return a chunk of the source's on the takers; a single taker gets it from the source alone."""
    if rank() not in (source, *takers) and len(takers) == 1:
        return chunk
    moved = chunk.to(group_device())
    with clear_error("sending a file"):
        if len(takers) > 1:
            dist.broadcast(moved, source)
        elif rank() == source:
            dist.send(moved, takers[0])
        else:
            dist.recv(moved, source)
    return moved.cpu()


@contextmanager
def _kept(lost: list[OSError]) -> Iterator[None]:
    """Keep an error for later: the other ranks go on in step."""
    try:
        yield
    except OSError as error:
        lost.append(error)
