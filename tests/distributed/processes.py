"""Real processes for tests: forked from a clean server that has imported the package, joined within a limit.

Where a GPU is they are spawned: a process that was forked cannot use CUDA once its server has looked for one.
"""

import multiprocessing
import os
import time
import traceback
from datetime import timedelta
from pathlib import Path

CONTEXT = multiprocessing.get_context("spawn" if os.path.exists("/dev/nvidia0") else "forkserver")


def launch(world_size, function, folder, *args, limit_s=60, killed=()):
    """Run function(folder, *args) on every rank; return the results in rank order, None for the ranks in `killed`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    started = [
        CONTEXT.Process(target=_run, args=(rank, world_size, function, str(folder), args), daemon=True)
        for rank in range(world_size)
    ]
    for process in started:
        process.start()
    deadline = time.monotonic() + limit_s
    for process in started:
        process.join(max(0.1, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(started) if process.exitcode is None]
    for rank in late:
        started[rank].kill()
        started[rank].join()
    assert not late, f"ranks {late} did not end within {limit_s} s"
    return [None if rank in killed else _result(folder, rank) for rank in range(world_size)]


def _run(rank, world_size, function, folder, args):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world_size), TORCHELASTIC_RUN_ID="test",
        LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
    )  # fmt: skip
    os.chdir(folder)
    log = os.open(f"rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=40),
        )
        result = ("ok", function(Path(folder), *args))
        dist.barrier()
    except BaseException:
        result = ("failed", traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    torch.save(result, f"{folder}/rank{rank}.pt")


def _result(folder, rank):
    import torch

    path = folder / f"rank{rank}.pt"
    assert path.exists(), f"rank {rank} left no result:\n{(folder / f'rank{rank}.log').read_text()}"
    state, value = torch.load(path, weights_only=False)
    (folder / "store").unlink(missing_ok=True)
    assert state == "ok", f"rank {rank}:\n{value}"
    return value
