"""A query of a DuckDB database as batches of Arrow: "duckdb:graph.db?select src, dst from follows"."""

import os
import tempfile
from functools import cache
from pathlib import Path

import pyarrow as pa

from ..errors import EdgeStreamError, one_line_of
from ..memory import free_memory_bytes
from ..object_store import query_of

_LEAST_BYTES, _MOST_BYTES = 128 << 20, 4 << 30


def read_query(source: str) -> pa.RecordBatchReader:
    """Begin to read the rows of a query, in the same order each time.

    The database is opened for reading alone. The query is one SELECT; it reads no other file, writes none, loads no
    extension and changes no setting. What it sorts or joins beyond a part of the free memory lies in the folder of
    temporary files.

    Args:
        source: "duckdb:", the path of the database, "?", the query.

    Raises:
        EdgeStreamError: the package, the database or a table is missing, or the query is not one SELECT.

    Cost: one thread, whose order of rows is that of the query's plan; a batch of 131,072 rows, and what the query
        itself holds.
    """
    database, sql = query_of(source)
    try:
        import duckdb
    except ImportError:
        raise EdgeStreamError(
            f"duckdb:{database}: needs a package that is not installed: pip install 'lightning-gnnscale[duckdb]'"
        ) from None
    if not database or not sql.strip():
        raise EdgeStreamError(
            f"{source}: a query is a database, ? and one SELECT: duckdb:graph.db?select src, dst from follows"
        )
    if not Path(database).is_file():
        raise EdgeStreamError(f"duckdb:{database}: no such file: give the path of a DuckDB database")
    try:
        statements = duckdb.extract_statements(sql)
        if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
            kinds = ", ".join(statement.type.name for statement in statements) or "nothing"
            raise EdgeStreamError(f"{source}: a query must be one SELECT, got {kinds}: give one that reads rows")
        connection = duckdb.connect(database, read_only=True, config=_settings())
        return pa.RecordBatchReader.from_stream(connection.sql(sql))
    except duckdb.ConnectionException as error:
        raise EdgeStreamError(
            f"duckdb:{database}: is open in this process already ({one_line_of(error)[:80]}): close that connection, "
            "or give its query, connection.sql(...), instead of the text"
        ) from None
    except duckdb.Error as error:
        raise EdgeStreamError(f"{source}: {one_line_of(error)}; mend the query") from None


@cache
def _settings() -> dict:
    """Return the settings of a connection: DuckDB wants the same ones of all that are open to a database at a time."""
    memory = min(max(free_memory_bytes() // 4, _LEAST_BYTES), _MOST_BYTES)
    return {
        "threads": 1,
        "preserve_insertion_order": True,
        "enable_external_access": False,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "memory_limit": f"{memory}B",
        "temp_directory": os.path.join(tempfile.gettempdir(), f"gnnscale-duckdb-{os.getpid()}"),
        "lock_configuration": True,
    }
