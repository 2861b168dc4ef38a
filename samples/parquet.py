"""Prompt files in Parquet: checked once batch by batch, then read by row group, with the last few groups kept."""

from __future__ import annotations

import json
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from samples.errors import InputError
from samples.rows import BadLabel, BadMetadata, BadPrompt, NoText, Prompt, RowError, RowFields
from samples.slices import RowSlice
from samples.tally import BadRows

_CHECKED_AT_ONCE = 1024  # rows
_CACHE_BYTES = 256 * 2**20  # decoded row groups kept; the one in use is kept whatever its size


class ParquetFile:
    """The usable rows of ``path``, in file order. Only the columns that the fields name are read."""

    def __init__(self, path: Path, rows: RowSlice, fields: RowFields, *, skip_bad_rows: bool) -> None:
        self.path = path
        self.bad_rows = BadRows()
        self.has_metadata = False
        self._fields = fields
        self._handle: pq.ParquetFile | None = None
        self._groups: OrderedDict[int, pa.Table] = OrderedDict()
        try:
            self._build(rows, skip_bad_rows)
        except pa.ArrowException as error:
            raise InputError(f"{path}: cannot be read as Parquet: {error}") from error

    def __len__(self) -> int:
        return len(self._rows)

    def location(self, index: int) -> str:
        return f"{self.path}, row {self._rows[index] + 1}"

    def read(self, index: int) -> Prompt:
        """The prompt of usable row ``index``, from its row group."""
        row = int(self._rows[index])
        group = int(np.searchsorted(self._group_starts, row, side="right")) - 1
        table = self._group(group).slice(row - int(self._group_starts[group]), 1)
        try:
            return self._parse(table.to_pylist(maps_as_pydicts="lossy")[0])
        except RowError as error:
            raise InputError(f"{self.location(index)}: {error}; the file changed while it was in use") from error

    def fingerprint(self) -> dict[str, Any]:
        """What tells this selection of rows from another: size in bytes, usable rows, checksum of footer and rows."""
        return {"name": self.path.name, "size": self._size, "rows": len(self), "checksum": self._checksum}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None, "_groups": OrderedDict()}

    def _build(self, rows: RowSlice, skip_bad_rows: bool) -> None:
        handle = self._open()
        there = handle.schema_arrow.names
        if self._fields.input_key not in there:
            raise InputError(
                f"{self.path}: no column {self._fields.input_key!r}; there are {', '.join(map(repr, there))} "
                f"(--input-key names the column to read)"
            )
        self._columns = [name for name in self._fields.names() if name in there]
        sizes = [handle.metadata.row_group(group).num_rows for group in range(handle.metadata.num_row_groups)]
        self._group_starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        total = int(self._group_starts[-1])
        start, stop = rows.bounds(lambda: total)
        stop = total if stop is None else min(stop, total)
        usable = array("q")
        for row, values in self._checked_rows(start, stop):
            try:
                if isinstance(values, RowError):
                    raise values
                prompt = self._parse(values)
            except RowError as error:
                message = f"{self.path}, row {row + 1}: {error}"
                if not skip_bad_rows:
                    raise InputError(f"{message}. --skip-bad-rows skips and counts such rows") from error
                self.bad_rows.add(message, error.kind)
                continue
            self.has_metadata = self.has_metadata or prompt.metadata is not None
            usable.append(row)
        self._rows = np.frombuffer(usable, dtype=np.int64) if usable else np.empty(0, np.int64)
        self._size = self.path.stat().st_size
        self._checksum = zlib.crc32(self._rows.tobytes(), _footer_checksum(self.path))

    def _checked_rows(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
        """Row number and values of the rows ``start`` to ``stop``; a RowError for one whose text is no UTF-8."""
        for group, first in enumerate(self._group_starts[:-1].tolist()):
            if first >= stop or int(self._group_starts[group + 1]) <= start:
                continue
            row = first
            for batch in self._open().iter_batches(_CHECKED_AT_ONCE, row_groups=[group], columns=self._columns):
                low, high = max(start - row, 0), min(stop - row, len(batch))
                if low < high:
                    yield from enumerate(_row_values(batch.slice(low, high - low)), start=row + low)
                row += len(batch)

    def _group(self, group: int) -> pa.Table:
        if group in self._groups:
            self._groups.move_to_end(group)
            return self._groups[group]
        table = self._open().read_row_group(group, columns=self._columns, use_threads=False)
        self._groups[group] = table
        while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > _CACHE_BYTES:
            self._groups.popitem(last=False)
        return table

    def _open(self) -> pq.ParquetFile:
        if self._handle is None:
            self._handle = pq.ParquetFile(self.path)
        return self._handle

    def _parse(self, values: dict[str, Any]) -> Prompt:
        prompt = self._fields.read(values)
        question, label = _plain(prompt.prompt, "prompt", "--input-key"), _plain(prompt.label, "label", "--label-key")
        return Prompt(question, label, _plain(prompt.metadata, "metadata", "--metadata-key"), prompt.source)


def _row_values(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | RowError]:
    try:
        yield from batch.to_pylist(maps_as_pydicts="lossy")
    except UnicodeDecodeError:
        for row in range(len(batch)):
            try:
                yield from batch.slice(row, 1).to_pylist(maps_as_pydicts="lossy")
            except UnicodeDecodeError as error:
                yield NoText(f"holds text that is not UTF-8 ({error.reason} at byte {error.start + 1})")


_KINDS: dict[str, type[RowError]] = {"prompt": BadPrompt, "label": BadLabel, "metadata": BadMetadata}


def _plain(value: Any, name: str, flag: str) -> Any:
    """``value`` as JSON gives it back, so that a sample can be saved and restored unchanged."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise _KINDS[name](f"the {name} cannot be kept as JSON: {error} ({flag} names another column)") from None


def _footer_checksum(path: Path) -> int:
    """The footer holds the schema and where and how large every column chunk is: checksum of all that."""
    with path.open("rb") as handle:
        size = handle.seek(-8, 2)
        length = int.from_bytes(handle.read(4), "little")
        handle.seek(size - length)
        return zlib.crc32(handle.read(length))
