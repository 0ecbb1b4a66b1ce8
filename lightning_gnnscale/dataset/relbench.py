"""RelBench's databases: tables and the task are node types, foreign keys edge types; rows have times."""

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..values import ALWAYS, exact_integers
from .graph_dataset import GraphDataset
from .hetero import hetero_graph

TASK = "task"  # the node type of the task's rows
_SPLITS = ("train", "val", "test")
_MOST_LEVELS = 32  # of a one-hot encoded column


class _Table(NamedTuple):
    """A table of the database: its rows, its key, its time, and the tables that its foreign keys point to."""

    rows: Any
    key: str | None
    time: str | None
    foreign: dict[str, str]


def load_relbench(
    folder: str,
    task: str,
    target: str | None = None,
    regression: bool = False,
    name: str | None = None,
) -> GraphDataset:
    """Read a RelBench database folder with one of its node tasks.

    Each table is a node type, and each foreign key an edge type ("reviews", "f2p_product_id", "products"), to which
    reverses are added, as `relbench.modeling` makes them. A row exists from its time on. A row of the task is a node
    of the node type "task" with the time of its query, and an edge (entity, "asked", "task"): an entity may be
    queried several times. Sample with `temporal_strategy`, not `strictly_before`, and give "rev_asked" fan-outs of 0.

    Columns of numbers, truth values and times are features, standardised over the rows before the first validation row;
    of texts those of few levels, one-hot encoded. Other columns are named in a warning.

    Args:
        folder: Folder of the data set, with `db/*.parquet` and `tasks/<task>/{train,val,test}.parquet`.
        task: Name of the task.
        target: Column of the target; None: the only column of the task beside its time and its entity.
        regression: Whether the target is a number to predict; False: a class.
        name: Name of the data set; None: those of folder and task.

    Raises:
        FileNotFoundError: the folder, a table or the task is missing; the message lists those that exist.
        ValueError: a foreign key matches no row, or a column is missing.

    Cost: the tables in memory.
    Source: Robinson et al., RelBench, NeurIPS 2024; the form of its folders and of `make_pkey_fkey_graph`.
    """
    root = Path(folder).expanduser()
    tables = {path.stem: _read(path) for path in sorted((root / "db").glob("*.parquet"))}
    if not tables:
        raise FileNotFoundError(f"folder: {root / 'db'} holds no tables (*.parquet): give a RelBench data set's folder")
    splits = _read_task(root / "tasks", task)
    first = splits["train"]
    (entity_key, entity), *others = first.foreign.items()
    if others or entity not in tables or first.time is None:
        raise ValueError(f"task={task} must ask about rows of one table at times, got {first.foreign} at {first.time}")
    target = target or _target_of(task, first, entity_key)
    later = [splits[split] for split in ("val", "test") if split in splits] or [first]
    limit = int(min(_seconds(one.rows[one.time]).min() for one in later))
    nodes, edges = {}, {}
    unread: list[str] = []
    for node_type, table in tables.items():
        time = None if table.time is None else _seconds(table.rows[table.time])
        features, skipped = _features(table, None if time is None else time < limit)
        unread += [f"{node_type}.{column}" for column in skipped]
        nodes[node_type] = {"num_nodes": table.rows.num_rows, "features": features, "time": time}
        for column, other in table.foreign.items():
            source, found = _positions(node_type, column, table.rows[column], tables[other])
            given = {"edges": np.stack([source, found])}
            if time is not None:
                given["time"] = time[source]
            edges[node_type, f"f2p_{column}", other] = given
    if unread:
        warnings.warn(f"{root}: {', '.join(unread)} not read: neither numbers nor of few levels", stacklevel=2)
    nodes[TASK], edges[entity, "asked", TASK] = _asked(splits, entity_key, target, tables[entity], regression)
    return hetero_graph(
        nodes, edges, name=name or f"{root.name}-{task}", regression=regression, separate_reverses=False
    )


def _read(path: Path) -> _Table:
    import pyarrow.parquet as pq

    rows = pq.read_table(path)
    told = {key.decode(): value for key, value in (rows.schema.metadata or {}).items()}

    def fact(key: str) -> Any:
        return json.loads(told[key]) if key in told else None

    return _Table(rows, fact("pkey_col"), fact("time_col"), fact("fkey_col_to_pkey_table") or {})


def _read_task(folder: Path, task: str) -> dict[str, _Table]:
    paths = [folder / task / f"{split}.parquet" for split in _SPLITS]
    splits = {path.stem: _read(path) for path in paths if path.is_file()}
    if "train" not in splits:
        there = sorted(path.parent.name for path in folder.glob("*/train.parquet"))
        raise FileNotFoundError(
            f"task: no {task!r} in {folder} (train.parquet); there are {', '.join(there) or 'none'}"
        )
    return splits


def _target_of(task: str, table: _Table, entity_key: str) -> str:
    left = [column for column in table.rows.column_names if column not in (table.time, entity_key)]
    if len(left) != 1:
        raise ValueError(f"target: task {task} has the columns {', '.join(left) or 'of no target'}: name one of them")
    return left[0]


def _seconds(column: Any) -> np.ndarray:
    """Return (num_rows,) int64 seconds of a column of times or whole numbers; a row without one always exists."""
    values = column.to_numpy()
    if values.dtype.kind == "M":
        missing = np.isnat(values)
        seconds = np.where(missing, np.datetime64(0, "s"), values.astype("datetime64[s]")).astype(np.int64)
    else:
        missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)
        given = np.where(missing, 0, values) if missing.any() else values
        seconds = exact_integers("times of rows, in seconds", given, whole_floats=True)
    return np.where(missing, ALWAYS, seconds)


def _positions(node_type: str, column: str, keys: Any, table: _Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that have a foreign key, and the rows of the other table that it names."""
    import pyarrow.compute as pc

    source = np.flatnonzero(pc.is_valid(keys).to_numpy())
    given = keys.take(source)
    if table.key is None:
        found = exact_integers(f"{node_type}.{column}", given.to_numpy(), whole_floats=True)
        bad = (found < 0) | (found >= table.rows.num_rows)
    else:
        known = table.rows[table.key].combine_chunks()
        found = pc.fill_null(pc.index_in(given.cast(known.type), value_set=known), -1).to_numpy().astype(np.int64)
        bad = found < 0
    if bad.any():
        key = given[int(np.argmax(bad))].as_py()
        raise ValueError(f"{node_type}.{column}: key {key!r} matches no row: write the database again")
    return source, found


def _features(table: _Table, before: np.ndarray | None) -> tuple[np.ndarray | None, list[str]]:
    """Return (num_rows, dim) float32 features of a table, and the columns that gave none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns, skipped = [], []
    for name in table.rows.column_names:
        if name in (table.key, *table.foreign):
            continue
        values = table.rows[name].combine_chunks()
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if pa.types.is_boolean(values.type) or pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
            numbers = pc.fill_null(values.cast(pa.float64()), np.nan).to_numpy(zero_copy_only=False)
            columns.append(_standardised(numbers, before))
        elif pa.types.is_temporal(values.type):
            seconds = _seconds(table.rows[name])
            columns.append(_standardised(np.where(seconds == ALWAYS, np.nan, seconds.astype(np.float64)), before))
        elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            levels = sorted(pc.unique(values.drop_null()).to_pylist())
            if len(levels) > _MOST_LEVELS:
                skipped.append(name)
                continue
            for level in levels:
                same = pc.fill_null(pc.equal(values, level), False)
                columns.append(same.to_numpy(zero_copy_only=False).astype(np.float32))
        else:
            skipped.append(name)
    return (np.stack(columns, axis=1).astype(np.float32) if columns else None), skipped


def _standardised(values: np.ndarray, before: np.ndarray | None) -> np.ndarray:
    """Return values with mean 0 and deviation 1 over the past rows; a missing one is the mean."""
    past = values if before is None or not before.any() else values[before]
    past = past[np.isfinite(past)]
    mean, deviation = (past.mean(), past.std()) if len(past) else (0.0, 1.0)
    scaled = (values - mean) / (deviation if deviation > 0 else 1.0)
    return np.where(np.isfinite(scaled), scaled, 0.0).astype(np.float32)


def _asked(splits: dict[str, _Table], key: str, target: str, table: _Table, regression: bool) -> tuple[dict, dict]:
    """Return the description of a task's rows, and their edges from the entities that they ask about."""
    import pyarrow as pa
    import pyarrow.compute as pc

    told = splits["train"].rows.column_names
    if target not in told:
        raise ValueError(f"target: the task has no column {target!r}, there are {', '.join(told)}")
    labels, times, edges, sizes = [], [], [], []
    for one in splits.values():
        values = np.full(one.rows.num_rows, np.nan)
        if target in one.rows.column_names:  # a test table may hide it
            values = pc.fill_null(one.rows[target].cast(pa.float64()), np.nan).to_numpy()
        labels.append(values)
        times.append(_seconds(one.rows[one.time]))
        rows, found = _positions(TASK, key, one.rows[key], table)
        edges.append(np.stack([found, rows + sum(sizes)]))
        sizes.append(one.rows.num_rows)
    values, when, joined = np.concatenate(labels), np.concatenate(times), np.concatenate(edges, axis=1)
    split_of, known = np.repeat(np.arange(len(splits)), sizes), np.isfinite(values)
    masks = {split: known & (split_of == number) for number, split in enumerate(splits)}
    given = values if regression else exact_integers(target, np.where(known, values, -1), whole_floats=True)
    masks = {split: mask for split, mask in masks.items() if mask.any()}
    nodes = {"num_nodes": len(when), "labels": given, "time": when, "masks": masks}
    return nodes, {"edges": joined, "time": when[joined[1]]}
