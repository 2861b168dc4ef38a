"""What must be on disk, and what must not."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from samples.errors import InputError
from samples.slices import parse_file_spec
from train.config.run import RunConfig

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # organisation/model


def model_and_prompt_problems(config: RunConfig) -> Iterator[str]:
    checkpoint, prompts = config.model.hf_checkpoint, config.data.prompt_data
    replays = config.debug.replays  # then nothing is asked of the model, and the prompts may be gone
    source = config.data.data_source_path
    if checkpoint is not None and not prompts and source is None and not replays:
        yield f"--hf-checkpoint {checkpoint} needs prompts: give --prompt-data FILE.jsonl"
    if source is not None and checkpoint is None:
        yield f"--data-source-path {source} needs a model: give --hf-checkpoint DIR"
    if prompts and checkpoint is None:
        yield f"--prompt-data {prompts[0]} needs a model: give --hf-checkpoint DIR"
    if checkpoint is not None:
        yield from checkpoint_problems("--hf-checkpoint", checkpoint)
    for spec in () if replays else prompts:
        yield from prompt_file_problems("--prompt-data", spec)
    code = config.reward.user_code_dir
    if code is not None and not Path(code).is_dir():
        yield f"--user-code-dir {code}: {_not_there(Path(code), 'directory')}"


def output_problems(config: RunConfig) -> Iterator[str]:
    for option, given in (("--output-dir", config.output.output_dir), ("--save-hf", config.output.save_hf)):
        if given is not None and os.path.exists(given) and not os.path.isdir(given):
            yield f"{option} {given}: is a file; give a directory"
    model, export = config.model.hf_checkpoint, config.output.save_hf
    if export is None:
        return
    target = Path(export).resolve()
    if model is not None and target == Path(model).resolve():
        yield f"--save-hf {export} would write over --hf-checkpoint; give another directory"
    elif model is not None and Path(model).resolve() in target.parents:
        yield f"--save-hf {export} would write into --hf-checkpoint {model}; give another directory"
    elif config.output.output_dir is not None and target == Path(config.output.output_dir).resolve():
        yield f"--save-hf {export} is --output-dir, which holds the run; give a directory in it, such as {export}/model"
    elif config.checkpoint.load is not None:
        return  # it may hold the model of this run's earlier part: looked at together with the checkpoint
    elif os.path.isdir(export) and os.access(export, os.R_OK) and any(Path(export).iterdir()):
        yield f"--save-hf {export}: is not empty; give a new directory, or remove this one"


def checkpoint_problems(option: str, path: str) -> Iterator[str]:
    """At most one line about a directory that should hold a Hugging Face model."""
    directory = Path(path)
    if not directory.is_dir():
        hint = ""
        if _HUB_NAME.fullmatch(path) and not directory.exists():
            hint = f"; a model of the hub is downloaded first: hf download {path} --local-dir DIR"
        yield f"{option} {path}: {_not_there(directory, 'directory')}{hint}"
        return
    config_file = directory / "config.json"
    if not config_file.is_file():
        yield f"{option} {path}: has no config.json; give the directory of a Hugging Face model"
        return
    try:
        described = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        yield f"{option} {path}: config.json cannot be read: {error}"
        return
    if not isinstance(described, dict) or "model_type" not in described:
        yield f"{option} {path}: config.json names no model_type; give the directory of a Hugging Face model"


def prompt_file_problems(option: str, spec: str) -> Iterator[str]:
    """At most one line about a prompt file that is not there; its rows are looked at later."""
    try:
        path = Path(parse_file_spec(spec, option)[0])
    except InputError as error:
        yield str(error)
        return
    if not path.is_file():
        yield f"{option} {spec}: {_not_there(path, 'file')}"


def _not_there(path: Path, wanted: str) -> str:
    """Why a path is not what it should be."""
    if path.exists():
        return f"is no {wanted}"
    place = "" if path.is_absolute() else f" in {Path.cwd()}"
    return f"no such {wanted}{place}"
