"""A result of many rows as a Parquet file: a patching sweep's cells, compositions of all pairs.

The rest of the document is in the schema's metadata.

pyarrow is an extra (`pip install mainstem[parquet]`), because it is larger than all of Mainstem's own code.
"""

import importlib.util
import json
from typing import Any

from mainstem.composition_description import CompositionReading
from mainstem.errors import UsageError
from mainstem.patch_description import PatchReading
from mainstem.report.text import finite

Tabular = PatchReading | CompositionReading
ROWS = {
    PatchReading: ("values", "effects", "low", "high"),
    CompositionReading: ("pairs", "layers"),
}
"""What of a document stands in the rows, and so not in the metadata."""


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


def as_parquet(reading: Tabular) -> bytes:
    """The file's bytes.

    Raises:
        UsageError: pyarrow is not installed.
    """
    require_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(_columns(reading))
    document = {name: value for name, value in reading.as_dict().items() if name not in ROWS[type(reading)]}
    table = table.replace_schema_metadata({"mainstem": json.dumps(finite(document), ensure_ascii=False)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def _columns(reading: Tabular) -> dict[str, Any]:
    import pyarrow as pa

    rows = list(reading.cells())
    if isinstance(reading, CompositionReading):
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    numbers = dict.fromkeys(("value", "effect", "low", "high"), pa.float64())
    kinds = {"row": pa.string(), "column": pa.string(), **numbers}
    return {name: pa.array([row[name] for row in rows], kind) for name, kind in kinds.items()}
