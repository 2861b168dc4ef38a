"""Reads the files that wandb writes while it is offline."""

import json
import struct


def history(path):
    """(rows of the history, kinds of records) of a wandb file: LevelDB's log format around protobuf records."""
    from wandb.proto import wandb_internal_pb2

    data, at, part, rows, kinds = path.read_bytes(), 7, b"", [], set()
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # the first or a middle piece of a record
            continue
        record = wandb_internal_pb2.Record.FromString(part)
        part = b""
        kinds.add(record.WhichOneof("record_type"))
        if record.WhichOneof("record_type") == "history":
            rows.append({(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item})
    return rows, kinds
