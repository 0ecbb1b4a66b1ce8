"""The workers as a coordinator sees them: their actors, who answers, who is started again, and who is gone for good."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from ..errors import GNNScaleError
from .cluster import WORKER_GROUP, import_ray, one_line, worker_handle

_RETRY_S = 0.2
_LAST_TRY_S = 1.0  # for a coordinator that was itself stopped, and finds that the time has passed


class CoordinatorWorkers:
    """Call workers, and find out which of them no longer answer; more may join.

    Args:
        names: Names of the workers' actors.
        timeout_s: How long a worker may stay silent before it counts as lost, seconds.
        came: Called with a worker's number and what its `place` says when it answers, or answers again.
        left: Called with a worker's number when it does not answer.
        note: Called with each event for the log.

    Attributes:
        names: Name of each worker by its number.
        started: Numbers of the workers that answer.
        gone: Numbers of the workers that will never answer again.
        broken: Why no batch can be made any more; None while batches can be made.
    """

    def __init__(
        self,
        names: list[str],
        timeout_s: float,
        came: Callable[[int, tuple[str, int | None]], None],
        left: Callable[[int], None],
        note: Callable[[dict], None],
    ):
        self._ray, self.names, self._timeout_s = import_ray(), dict(enumerate(names)), timeout_s
        self._came, self._left, self._note = came, left, note
        self._actors: dict[int, Any] = {}
        self.started: set[int] = set()
        self.gone: set[int] = set()
        self._silent: set[int] = set()
        self.broken: str | None = None

    def __len__(self) -> int:
        return len(self.names)

    async def connect(self) -> bool:
        """Find the actors, which rank 0 may be about to start; return whether they had to be found.

        Raises:
            GNNScaleError: there is none of that name.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._actors:
            try:
                self._actors = {worker: worker_handle(name) for worker, name in self.names.items()}
                return True
            except ValueError as error:
                if time.monotonic() > deadline:
                    raise GNNScaleError(f"the workers did not start within {self._timeout_s:g} s: {error}") from None
            await asyncio.sleep(_RETRY_S)
        return False

    def add(self, name: str, actor: Any) -> int:
        """Add a worker that is not known, or one that was gone and has been started again; return its number."""
        known = {known: worker for worker, known in self.names.items()}
        worker = known.get(name, max(self.names, default=-1) + 1)
        self.names[worker], self._actors[worker] = name, actor
        self.gone.discard(worker)
        return worker

    def remove(self, worker: int) -> Any:
        """Forget a worker; return its actor."""
        del self.names[worker]
        for numbers in (self.started, self.gone, self._silent):
            numbers.discard(worker)
        return self._actors.pop(worker)

    def ask(self, worker: int, method: str, *arguments) -> Any:
        """Call a method that a worker's batches wait for; return Ray's references, two for "make"."""
        options = {"num_returns": 2} if method == "make" else {}
        return getattr(self._actors[worker], method).options(**options).remote(*arguments)

    def tell(self, worker: int, method: str, *arguments) -> Any:
        """Call a method that runs beside its batches; return Ray's reference."""
        return getattr(self._actors[worker], method).options(concurrency_group=WORKER_GROUP).remote(*arguments)

    async def reply(self, worker: int, method: str) -> Any:
        """Return the answer of a method that runs beside its batches."""
        return await asyncio.wrap_future(self.tell(worker, method).future())

    async def revive(self, worker: int) -> None:
        """Wait until a worker answers, or is known to be gone for good."""
        begun, reason = time.monotonic(), ""
        while worker in self.names and worker not in self.gone:
            left = begun + self._timeout_s - time.monotonic()
            try:
                place = await asyncio.wait_for(self.reply(worker, "place"), max(left, _RETRY_S))
                self.started.add(worker)
                self._silent.discard(worker)
                if len(self.gone) < len(self.names):
                    self.broken = None
                self._came(worker, place)
                return
            except self._ray.exceptions.ActorUnavailableError as error:
                reason = one_line(error)
            except (self._ray.exceptions.RayError, ValueError) as error:
                self._lose(worker, one_line(error), final=True)
                return
            except TimeoutError:
                reason = f"no answer within {self._timeout_s:.0f} s"
            if time.monotonic() > begun + self._timeout_s:
                self._lose(worker, reason, final=False)
            await asyncio.sleep(_RETRY_S)

    async def answers(self, worker: int, limit_s: float) -> bool:
        """Return whether a worker answers beside its batches; one that stays silent gets no more of them."""
        for patience_s in (max(limit_s, _RETRY_S), _LAST_TRY_S):
            try:
                await asyncio.wait_for(self.reply(worker, "ping"), patience_s)
                return True
            except TimeoutError:
                continue
            except (self._ray.exceptions.RayError, ValueError):
                return False  # it has ended, as its batches will show
        self._lose(worker, f"no answer for timeout_s={self._timeout_s:g} s", final=False)
        return False

    def _lose(self, worker: int, reason: str, final: bool) -> None:
        """Go on without a worker; with none left, report that to all callers that wait."""
        self._silent.add(worker)
        if final:
            self.gone.add(worker)
            self._note({"name": "worker_missing", "worker": worker, "reason": reason})
        count = len(self.names)
        if len(self.gone) == count:
            self.broken = (
                f"all {count} preparation workers are gone ({reason}): start them again, or resume from the last "
                "checkpoint with source=threads"
            )
        elif len(self._silent) == count:
            self.broken = (
                f"none of {count} preparation workers answers ({reason}): were they stopped? `ray status` says whether "
                "the cluster has a free CPU for each; raise source.timeout_s where it is slow"
            )
        self._left(worker)
