"""TensorBoard's event files, written without TensorBoard.

The usual writers take seconds to import and hand events to a thread; once that has failed on a full disk, the run
waits for it forever. What a run logs needs two fixed layouts: TFRecord frames (length and data, each with a masked
CRC-32C) around ``tensorflow.Event`` messages in protobuf's wire format (tensorflow/core/util/event.proto).
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from observability.trackers import step_record, write_all

_CASTAGNOLI = 0x82F63B78


class TensorBoardTracker:
    """Writes every metric of a step as a scalar of the same name to a new event file in ``directory``.

    Scalars of TensorBoard are 32-bit floats: what is beyond their range becomes infinite. Each step reaches the
    operating system before ``log`` returns. Where ``directory`` holds event files of an earlier part of the run,
    TensorBoard is told to forget what they say about the first step logged here and later ones.
    """

    def __init__(self, directory: str | Path, clock: Callable[[], float] = time.time) -> None:
        self.directory = Path(directory)
        self._clock = clock
        self.directory.mkdir(parents=True, exist_ok=True)
        self._continues = any(self.directory.glob("*tfevents*"))
        self.path = self._unused_path()
        self._file = self.path.open("xb", buffering=0)
        self._write(_event(clock(), None, _text(3, "brain.Event:2")))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        step_record(step, metrics)  # refuses what is no number, as metrics.jsonl does
        now = self._clock()
        if self._continues:
            self._continues = False
            self._write(_event(now, step, _bytes(7, _varint_field(1, 1))))  # session_log: START
        values = b"".join(
            _bytes(1, _text(1, key) + _key(2, 5) + _float32(float(value))) for key, value in metrics.items()
        )
        self._write(_event(now, step, _bytes(5, values)))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        write_all(self._file, length + _checksum(length) + event + _checksum(event), self.path)

    def _unused_path(self) -> Path:
        # TensorBoard reads the files of a directory in the order of their names: the time comes first.
        stem = f"events.out.tfevents.{int(self._clock()):010d}.{os.getpid()}"
        number = 0
        while (path := self.directory / f"{stem}.{number}").exists():
            number += 1
        return path


def _event(wall_time: float, step: int | None, rest: bytes) -> bytes:
    at = b"" if step is None else _varint_field(2, step)
    return _key(1, 1) + struct.pack("<d", wall_time) + at + rest


def _key(field: int, wire_type: int) -> bytes:
    return bytes([field << 3 | wire_type])  # all our field numbers are below 16


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _varint_field(field: int, number: int) -> bytes:
    return _key(field, 0) + _varint(number)


def _bytes(field: int, data: bytes) -> bytes:
    return _key(field, 2) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CASTAGNOLI if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _crc_table()


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and shifted as TFRecord has it, so that a CRC over data that holds CRCs is sound."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
