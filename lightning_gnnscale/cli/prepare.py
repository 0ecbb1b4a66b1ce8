"""`gnnscale prepare`: workers that prepare batches, on this machine or on a cluster, until they are stopped."""

import signal
import threading
import uuid
from collections.abc import Callable

from omegaconf import DictConfig

from ..errors import GNNScaleError
from ..remote import RayWorkers, cluster
from ..remote.messages import WorkerSettings
from ..remote.ray_worker import start_workers


def run(config: DictConfig) -> None:
    """Start the workers, print how a trainer reaches them, and stay until Ctrl-C or SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if not config.num_cpus >= 0:
        raise ValueError(f"num_cpus must be >= 0, got {config.num_cpus}")
    names = ("address", "num_workers", "worker_memory_bytes", "store_bytes", "timeout_s")
    RayWorkers(**{name: config[name] for name in names})  # refuses what is out of range
    address = cluster.join_ray(config.address, config.timeout_s, config.store_bytes)
    try:
        with_workers(config, address, lambda: _wait(stop))
    finally:
        cluster.leave_ray()


def with_workers(settings: DictConfig, address: str, stay: Callable[[], None]) -> None:
    """Run `stay` while workers are ready; GNNScaleError: they do not start."""
    ray = cluster.import_ray()
    own = uuid.uuid4().hex[:8]  # several of these commands may serve a cluster
    names = [f"{cluster.PREPARED}{own}-{number}" for number in range(settings.num_workers)]
    how = WorkerSettings("prepared", settings.num_cpus, settings.worker_memory_bytes, settings.label)
    workers = start_workers(names, how)
    try:
        try:
            pids = ray.get([worker.ping.remote() for worker in workers[: len(names)]], timeout=settings.timeout_s)
        except ray.exceptions.RayError as error:
            free = ray.available_resources().get("CPU", 0)
            raise GNNScaleError(
                f"{len(names)} workers did not start at {address} within {settings.timeout_s:g} s "
                f"({cluster.one_line(error)}): each takes {settings.num_cpus} CPUs, {free:g} are free"
                + ("" if settings.label is None else f"; a machine must have the resource {settings.label}")
            ) from None
        there = len(cluster.workers_named())
        more = f", {there} in all" if there > len(pids) else ""
        print(f"{len(pids)} workers prepare batches at {address}{more} (Ctrl-C ends them)")
        print(f"train from them: gnnscale train source=ray source.address={address}", flush=True)
        stay()
    finally:
        for worker in workers:
            ray.kill(worker)
        print("the workers have ended", flush=True)


def _wait(stop: threading.Event) -> None:
    try:
        while not stop.wait(1.0):  # a wait without a timeout would block signals
            pass
    except KeyboardInterrupt:
        return
