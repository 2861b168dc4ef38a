"""Prompt files in JSON Lines: checked once from end to end, then read row by row from the disk.

What stays in memory is where each row begins (8 bytes a row), so the size of a file costs nothing.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from samples.errors import InputError
from samples.rows import NoText, NotJson, Prompt, RowError, RowFields, check_encodable
from samples.slices import RowSlice
from samples.tally import BadRows

_BOM = b"\xef\xbb\xbf"
_LONGEST_LINE = 256 * 2**20  # bytes; a "line" beyond this is another kind of file, not a prompt


class JsonlFile:
    """The usable rows of ``path``, in file order. Blank lines are no rows; line numbers count them."""

    def __init__(self, path: Path, rows: RowSlice, fields: RowFields, *, skip_bad_rows: bool) -> None:
        self.path = path
        self.bad_rows = BadRows()
        self.has_metadata = False
        self._fields = fields
        self._handle: BinaryIO | None = None
        self._build(rows, skip_bad_rows)

    def __len__(self) -> int:
        return len(self._offsets)

    def location(self, index: int) -> str:
        line = self._first_line + index if self._lines is None else self._lines[index]
        return f"{self.path}, line {line}"

    def read(self, index: int) -> Prompt:
        """The prompt of usable row ``index``, read from the disk."""
        if self._handle is None:
            self._handle = self.path.open("rb")
        self._handle.seek(int(self._offsets[index]))
        try:
            return self._parse(self._handle.readline(_LONGEST_LINE + 1))
        except RowError as error:
            raise InputError(f"{self.location(index)}: {error}; the file changed while it was in use") from error

    def fingerprint(self) -> dict[str, Any]:
        """What tells this selection of rows from another one: size in bytes, usable rows, checksum of those rows."""
        return {"name": self.path.name, "size": self._size, "rows": len(self), "checksum": self._checksum}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}  # an index built in one process is read in another

    def _build(self, rows: RowSlice, skip_bad_rows: bool) -> None:
        offsets, lines = array("q"), array("q")
        checksum = 0
        with self.path.open("rb") as handle:
            start, stop = rows.bounds(lambda: sum(1 for _ in self._records(handle)))
            for row, (offset, line, raw) in enumerate(self._records(handle)):
                if stop is not None and row >= stop:
                    break
                if row < start:
                    continue
                try:
                    prompt = self._parse(raw)
                except RowError as error:
                    message = f"{self.path}, line {line}: {error}"
                    if not skip_bad_rows:
                        raise InputError(f"{message}. --skip-bad-rows skips and counts such rows") from error
                    self.bad_rows.add(message, error.kind)
                    continue
                self.has_metadata = self.has_metadata or prompt.metadata is not None
                offsets.append(offset)
                lines.append(line)
                checksum = zlib.crc32(raw, checksum)
            self._size = handle.seek(0, 2)
        self._offsets = np.frombuffer(offsets, dtype=np.int64) if offsets else np.empty(0, np.int64)
        self._first_line = lines[0] if lines else 1
        gapless = not lines or lines[-1] - lines[0] == len(lines) - 1
        self._lines = None if gapless else np.frombuffer(lines, dtype=np.int64)
        self._checksum = checksum

    def _records(self, handle: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
        """Byte offset, line number from 1 and bytes of every line that is not blank, from the beginning."""
        offset = handle.seek(len(_BOM) if _starts_with_bom(handle) else 0)
        line = 0
        while raw := handle.readline(_LONGEST_LINE + 1):
            line += 1
            if len(raw) > _LONGEST_LINE:
                limit = _LONGEST_LINE // 2**20
                raise InputError(
                    f"{self.path}, line {line}: longer than {limit} MiB; is this JSON Lines, a row a line?"
                )
            if raw.strip():
                yield offset, line, raw
            offset += len(raw)

    def _parse(self, raw: bytes) -> Prompt:
        prompt = self._fields.read(_json_object(raw))
        if b"\\u" in raw:
            check_encodable(prompt)
        return prompt


def _starts_with_bom(handle: BinaryIO) -> bool:
    handle.seek(0)
    return handle.read(len(_BOM)) == _BOM


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        value = _DECODER.decode(raw.decode("utf-8"))
    except RowError:
        raise
    except UnicodeDecodeError as error:
        byte = f"0x{raw[error.start]:02x} at column {error.start + 1}"
        raise NoText(f"byte {byte} is not UTF-8 (save the file as UTF-8)") from None
    except json.JSONDecodeError as error:
        hint = ""
        if b"\r" in raw.strip():
            hint = " (the line holds carriage returns: if rows end in CR alone, convert them to line feeds)"
        raise NotJson(f"is not JSON: {error.msg} at column {error.colno}{hint}") from None
    except RecursionError:
        raise NotJson("is not usable JSON: nested too deep") from None
    except ValueError as error:  # a number with thousands of digits
        raise NotJson(f"is not usable JSON: {error}") from None
    if not isinstance(value, dict):
        raise NotJson(f"is a JSON {_JSON_NAMES.get(type(value), 'value')}, expected an object with named fields")
    return value


def _refuse_constant(name: str) -> None:
    raise NotJson(f"is not JSON: holds {name}, which JSON does not have (write null, or leave the field out)")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_JSON_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
