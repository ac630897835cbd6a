"""A table of results as a Parquet file: its rows, and the rest of the document in the schema's metadata.

pyarrow is an extra (`pip install mainstem[parquet]`), because it is larger than all of Mainstem's own code.
"""

import importlib.util
import json
from typing import TYPE_CHECKING

from mainstem.errors import UsageError
from mainstem.report.text import finite

if TYPE_CHECKING:
    from mainstem.report import TabularDocument


def require_pyarrow() -> None:
    """Refuses to promise a file that cannot be written.

    Raises:
        UsageError: pyarrow is not installed.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise UsageError(
            "Parquet files are written with pyarrow, which is not installed",
            None,
            "Install it with `pip install mainstem[parquet]`, or take --format json.",
        )


def as_parquet(result: "TabularDocument") -> bytes:
    """The file's bytes.

    Raises:
        UsageError: pyarrow is not installed.
    """
    require_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = list(result.cells())
    kinds = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    columns = {}
    for name in rows[0] if rows else ():
        found = {type(row[name]) for row in rows} - {type(None)}
        kind = kinds[next(iter(found))] if len(found) == 1 else pa.float64()
        columns[name] = pa.array([row[name] for row in rows], kind)
    about = json.dumps(finite(result.about()), ensure_ascii=False)
    table = pa.table(columns).replace_schema_metadata({"mainstem": about})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()
