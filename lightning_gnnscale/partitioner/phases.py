"""What a partitioner reports of a run besides its result: seconds per phase, facts found, warnings.

`partition` opens a record; the methods write to whichever record is open, or to none when they are called directly.
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class PhaseRecord:
    """One run of a partitioner.

    Attributes:
        seconds: wall-clock seconds by phase.
        notes: plain JSON facts, for example the layout that was found.
        graph: the SimpleGraph that the method read, so that evaluation need not detect the layout again.
        num_parts: parts that were asked for; None: not told.
        judges_later: whether the caller that opened the record judges the parts, once they are final.
        counts_quality: whether the method may count, while it has the graph at hand, what the quality is made of.
        counts: arrays by name that it counted of its parts, as `quality_of_counts` takes them; None: it did not.
        judgement: the constraints that the method kept to, and the loads of its parts.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    notes: dict = field(default_factory=dict)
    graph: object | None = None
    num_parts: int | None = None
    judges_later: bool = False
    counts_quality: bool = False
    counts: dict | None = None
    judgement: tuple | None = None


_open: ContextVar[PhaseRecord | None] = ContextVar("gnnscale_phases", default=None)


@contextmanager
def recording(record: PhaseRecord | None = None) -> Iterator[PhaseRecord]:
    """Open a record for the block, a new one or one to go on with; records nest."""
    token = _open.set(record or PhaseRecord())
    try:
        yield _open.get()
    finally:
        _open.reset(token)


def _record() -> PhaseRecord:
    """Return the open record, or where there is none one that nobody reads."""
    return _open.get() or PhaseRecord()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Add the block's wall-clock seconds to the open record under `name`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds = _record().seconds
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def note(**facts) -> None:
    """Put facts into the open record."""
    _record().notes.update(facts)


def cuts() -> bool:
    """Whether the open record is of more than one part, so that edges can be cut; also without a record."""
    return _record().num_parts != 1


def warn(message: str) -> None:
    """Warn the user, and keep the message in the open record under `warnings`."""
    warnings.warn(message, UserWarning, stacklevel=3)
    _record().notes.setdefault("warnings", []).append(message)


def leave_judgement(constraints, loads) -> bool:
    """Put constraints and the loads of the parts into the open record; return whether it is to be judged later."""
    record = _record()
    if record.judges_later:
        record.judgement = (constraints, loads)
    return record.judges_later


def take_judgement() -> tuple | None:
    """Take out what `leave_judgement` put into the open record."""
    record = _record()
    judgement, record.judgement = record.judgement, None
    return judgement


def counts_quality() -> bool:
    """Whether the open record asks for the counts that the quality is made of."""
    record = _open.get()
    return record is not None and record.counts_quality


def leave_counts(**counts) -> None:
    """Put what was counted of the parts into the open record."""
    record = _open.get()
    if record is not None:
        record.counts = counts


def keep_graph(graph) -> None:
    """Hand the graph that a method read to the open record."""
    _record().graph = graph
