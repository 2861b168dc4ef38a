"""The conformance suite passes on CPU, finds a backend that is wrong, and survives a rank that dies."""

import os
import subprocess
import sys

import pytest

from accel import AcceleratorError
from accel.backends.cpu import CpuAccelerator
from accel.conformance import programs
from accel.conformance.ranks import RankFailure, RankPool
from accel.conformance.runner import run_conformance, subject_names

pytestmark = pytest.mark.slow


def test_the_cpu_passes_and_every_skip_names_what_is_missing():
    command = [sys.executable, "-m", "accel", "conformance", "--accelerator", "cpu", "--world-size", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    skips = [line for line in done.stdout.splitlines() if line.startswith("SKIP")]
    assert skips
    assert all("(needs " in line for line in skips)
    assert " 0 FAIL" in done.stdout


class WrongAccelerator(CpuAccelerator):
    """Says that seeds work, and ignores them."""

    def manual_seed(self, seed):
        return

    def check_index(self, index):
        return index


def test_a_backend_that_is_wrong_fails_the_checks_it_should():
    report = run_conformance(WrongAccelerator(), 1, ["devices", "random_numbers"])
    failed = {outcome.check for outcome in report.outcomes if outcome.result == "FAIL"}
    assert failed == {"an index outside the range is refused", "a seed repeats"}
    assert not report.passed


def test_an_unknown_subject_lists_the_known_ones():
    with pytest.raises(AcceleratorError, match="choose among capabilities"):
        run_conformance(CpuAccelerator(), 1, ["nonsense"])
    assert "process_groups" in subject_names()


class Unstartable(CpuAccelerator):
    """Can be selected, and then not be used."""

    name = "unstartable"

    def set_device(self, index):
        raise AttributeError("module 'torch.acme' has no attribute 'set_device'")


def test_ranks_that_cannot_begin_are_not_started_for_every_check_again(monkeypatch):
    pool = RankPool(Unstartable(), 2)
    try:
        with pytest.raises(RankFailure, match=r"rank 1 cannot begin: (.|\n)*no attribute 'set_device'"):
            pool.run(complain)
        monkeypatch.setattr(subprocess, "Popen", None)
        with pytest.raises(RankFailure, match="no attribute 'set_device'"):
            pool.run(complain)
    finally:
        pool.close()


def die(accelerator, rank, world_size):
    if rank == 1:
        os._exit(7)
    return rank


def complain(accelerator, rank, world_size):
    if rank == 0:
        raise ValueError("rank zero is unhappy")
    return rank


def test_a_rank_that_raises_or_dies_is_named_and_the_next_run_starts_afresh():
    pool = RankPool(CpuAccelerator(), 2)
    try:
        with pytest.raises(RankFailure, match=r"rank 0:(.|\n)*rank zero is unhappy"):
            pool.run(complain)
        with pytest.raises(RankFailure, match="rank 1: the process ended with status 7"):
            pool.run(die)
        pool.run(programs.subgroups)
    finally:
        pool.close()
