"""All prompts of a run: the rows of every ``--prompt-data`` file, one after the other, under one numbering."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from samples.config import DataConfig, PromptFlags
from samples.errors import InputError
from samples.jsonl import JsonlFile
from samples.rows import Prompt, RowFields
from samples.slices import RowSlice, parse_file_spec
from samples.tally import BadRows


class PromptFile(Protocol):
    """One file, or a slice of one: its usable rows, from 0."""

    path: Path
    bad_rows: BadRows
    has_metadata: bool

    def __len__(self) -> int: ...

    def location(self, index: int) -> str:
        """File and line of a row, for messages."""
        ...

    def read(self, index: int) -> Prompt: ...

    def fingerprint(self) -> dict[str, Any]: ...


class PromptSet:
    """The usable prompts of ``config.prompt_data`` (which ``flag`` gave), numbered from 0 through all files.

    Building it reads and checks every row once and raises InputError for the first that cannot be used (with
    ``--skip-bad-rows`` they are counted in ``bad_rows``). Afterwards rows come from the disk one at a time. It can be
    sent to another process, which then need not check the files again.
    """

    def __init__(self, config: DataConfig, flag: str = PromptFlags.prompt_data) -> None:
        if not config.prompt_data:
            raise InputError(f"{flag} is not given: name at least one .jsonl or .parquet file")
        self.bad_rows = BadRows()
        self._files = [_open_file(spec, config, flag) for spec in config.prompt_data]
        for file in self._files:
            self.bad_rows.merge(file.bad_rows)
        self._starts = np.cumsum([0] + [len(file) for file in self._files])
        default_key = DataConfig.model_fields["metadata_key"].default
        if config.metadata_key not in (None, default_key) and not any(file.has_metadata for file in self._files):
            raise InputError(
                f"--metadata-key {config.metadata_key}: no row of {', '.join(config.prompt_data)} has that field"
            )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, row: int) -> Prompt:
        file, index = self._find(row)
        return file.read(index)

    def read_many(self, rows: Sequence[int] | np.ndarray) -> list[Prompt]:
        """The prompts of ``rows``, in the order asked for; the disk sees them in file order."""
        prompts: list[Prompt | None] = [None] * len(rows)
        for place in np.argsort(np.asarray(rows), kind="stable").tolist():
            prompts[place] = self.read(int(rows[place]))
        return [prompt for prompt in prompts if prompt is not None]

    def location(self, row: int) -> str:
        """File and line of ``row``, for messages."""
        file, index = self._find(row)
        return file.location(index)

    def fingerprint(self) -> list[dict[str, Any]]:
        """One JSON-ready entry a file: name, size, number of usable rows and a checksum, but not the directory."""
        return [file.fingerprint() for file in self._files]

    def skipped_rows(self) -> list[str]:
        """``prompts.jsonl: 99 of 100 rows skipped: 60 not JSON, ...`` for each file with bad rows."""
        return [
            f"{file.path.name}: {bad.count} of {bad.count + len(file)} rows skipped: {bad.reasons}"
            for file in self._files
            if (bad := file.bad_rows).count
        ]

    def _find(self, row: int) -> tuple[PromptFile, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._files[number], row - int(self._starts[number])


def _open_file(spec: str, config: DataConfig, flag: str) -> PromptFile:
    name, rows = parse_file_spec(spec, flag)
    path = Path(name).expanduser()
    _check_path(path, f"{flag} {spec}")
    try:
        file = _reader(path, rows, config)
    except OSError as error:
        raise InputError(f"{flag} {spec}: cannot be read: {error}") from error
    if len(file) == 0:
        raise InputError(f"{flag} {spec}: {_why_empty(file, rows)}")
    return file


def _reader(path: Path, rows: RowSlice, config: DataConfig) -> PromptFile:
    fields = RowFields.of(config)
    if path.suffix == ".jsonl":
        return JsonlFile(path, rows, fields, skip_bad_rows=config.skip_bad_rows)
    from samples.parquet import ParquetFile  # pyarrow takes a while to load and most runs read JSON Lines

    return ParquetFile(path, rows, fields, skip_bad_rows=config.skip_bad_rows)


def _check_path(path: Path, given: str) -> None:
    if not path.exists():
        raise InputError(f"{given}: no such file ({path.absolute()})")
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix in (".jsonl", ".parquet"))
        hint = f"name a file in it, such as {inside[0]}" if inside else "it holds no .jsonl or .parquet file"
        raise InputError(f"{given}: is a directory; {hint}")
    if not path.is_file():
        raise InputError(f"{given}: is no regular file; rows are read more than once, so copy it to one")
    if path.suffix not in (".jsonl", ".parquet"):
        raise InputError(
            f"{given}: unsupported suffix {path.suffix!r}; expected .jsonl (one JSON object a line) or .parquet"
        )


def _why_empty(file: PromptFile, rows: RowSlice) -> str:
    if file.bad_rows.count:
        return f"no usable row; {file.bad_rows.count} cannot be used, the first: {file.bad_rows.examples[0]}"
    return f"no row in the slice {str(rows)[1:]}" if str(rows) else "no usable row: the file is empty"
