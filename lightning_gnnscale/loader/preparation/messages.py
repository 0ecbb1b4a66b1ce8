"""What trainers, hubs and workers say to each other: plain values that Ray carries."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..batch_source import BatchKey
from .batch_group import BatchGroup


class Table(NamedTuple):
    """The feature rows that batches are made of.

    Attributes:
        name: digest of where they lie.
        num_rows, dim, dtype: of it.
        sparse_width: most values of a row, None where rows are dense.
    """

    name: str
    num_rows: int
    dim: int
    dtype: str
    sparse_width: int | None = None


class Spread(NamedTuple):
    """How the rows of a graph lie with the workers.

    Attributes:
        owners: number of the worker of each part.
        names: of the workers' actors.
        replicate_bytes: of rows of high degree that each holds beside its own.
    """

    owners: tuple[int, ...]
    names: tuple[str, ...]
    replicate_bytes: int = 0


class Setup(NamedTuple):
    """How the batches of a rank are made, as a worker is told; ranks that make theirs alike share one.

    Attributes:
        name: digest of its contents.
        contents: one object of Ray's that holds (pickled meta, arrays) of (stage, maker); in a list, so that a call
            carries its name alone.
        parts: ids of all parts that there are batches of.
        passes: key epochs of one epoch.
        table: of features, or None: batches come without.
        import_paths: where the trainer finds modules.
        spread: of a graph whose rows the workers hold together; None: each reads what it needs.
    """

    name: str
    contents: list
    parts: tuple[int, ...]
    passes: int = 1
    table: Table | None = None
    import_paths: tuple[str, ...] = ()
    spread: Spread | None = None


class GroupRequest(NamedTuple):
    """What a hub asks a worker for.

    Attributes:
        hub: name of the hub, which the worker's view of its cache goes by.
        setup: of all the keys.
        keys: of the batches.
        owned: parts that the worker is assigned this epoch.
        update: of the view of the hub's cache, or None: all rows travel.
    """

    hub: str
    setup: Setup
    keys: list[BatchKey]
    owned: tuple[int, ...]
    update: Any = None


@dataclass
class GroupHeader:
    """What a worker answers beside the payload.

    Attributes:
        numbers: of each key's batch in the group, -1 where there is none.
        errors: of each key, or None.
        num_union: distinct nodes of the group. rows_sent: of them in the payload.
        row_bytes, group_bytes: of rows, and of all else that travels.
        version: of the cache that the rows left out are in, or None.
        pid: of the worker. reads: parts that it has read so far. busy_s: that it took.
    """

    numbers: list[int]
    errors: list[str | None]
    num_union: int = 0
    rows_sent: int = 0
    row_bytes: int = 0
    group_bytes: int = 0
    version: int | None = None
    pid: int = 0
    reads: int = 0
    busy_s: float = 0.0


class GroupPayload(NamedTuple):
    """The batches of a group and their rows.

    Attributes:
        group: without rows.
        missing: (num_union,) bool, nodes whose rows are in `rows`; None: all.
        rows: (num_rows, dim), sparse rows, or None without features.
    """

    group: BatchGroup
    missing: np.ndarray | None
    rows: Any


class Answer(NamedTuple):
    """What a hub answers a rank that waits for a batch.

    Attributes:
        error: why there is none, or None.
        payload: a `GroupPayload` with all rows, or an object of Ray's that holds one, in a tuple.
        number: of the batch in it.
        header: of the group, for the first batch of it that is taken; the bytes are counted there.
        notices: events that the hub has for the log.
    """

    error: str | None = None
    payload: tuple = ()
    number: int = -1
    header: GroupHeader | None = None
    notices: tuple[dict, ...] = ()
