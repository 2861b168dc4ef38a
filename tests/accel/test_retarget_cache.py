"""The cache of rewritten code: what it gives back, what it refuses, and what it does without."""

import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from accel.retarget.code_cache import CodeCache

STAMP = (1700000000.25, 120)


def compiled(value: object) -> object:
    return compile(f"x = {value!r}", "model.py", "exec")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CodeCache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return CodeCache.for_user("cpu", "0.16.1")


def directory_of(root: Path) -> Path:
    (directory,) = (root / "accelrl" / "retarget").iterdir()
    return directory


def test_code_comes_back_for_the_same_source_only(cache: CodeCache, tmp_path: Path) -> None:
    code = compiled(1)
    cache.store("pkg.model", "/src/model.py", STAMP, code)
    assert cache.load("pkg.model", "/src/model.py", STAMP) == code
    assert cache.load("pkg.model", "/src/model.py", (STAMP[0] + 0.5, STAMP[1])) is None
    assert cache.load("pkg.model", "/src/model.py", (STAMP[0], STAMP[1] + 1)) is None
    assert cache.load("pkg.model", "/elsewhere/model.py", STAMP) is None
    assert cache.load("pkg.other", "/src/model.py", STAMP) is None
    assert directory_of(tmp_path).stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o077 for path in directory_of(tmp_path).iterdir()] == [0]


def test_device_and_version_have_caches_of_their_own(cache: CodeCache) -> None:
    cache.store("pkg.model", "/src/model.py", STAMP, compiled(1))
    assert CodeCache.for_user("cpu", "0.16.1").load("pkg.model", "/src/model.py", STAMP) is not None
    assert CodeCache.for_user("musa", "0.16.1").load("pkg.model", "/src/model.py", STAMP) is None
    assert CodeCache.for_user("cpu", "0.16.2").load("pkg.model", "/src/model.py", STAMP) is None


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "directory"])
def test_damaged_file_is_compiled_again(cache: CodeCache, tmp_path: Path, damage: str) -> None:
    cache.store("pkg.model", "/src/model.py", STAMP, compiled("a long enough text"))
    (path,) = directory_of(tmp_path).iterdir()
    content = bytearray(path.read_bytes())
    content[-5] ^= 0xFF
    path.unlink()
    if damage == "directory":
        path.mkdir()
    else:
        path.write_bytes({"cut": content[:-9], "empty": b"", "flip": content}[damage])
    assert cache.load("pkg.model", "/src/model.py", STAMP) is None


def test_link_in_the_cache_is_not_followed(cache: CodeCache, tmp_path: Path) -> None:
    cache.store("pkg.model", "/src/model.py", STAMP, compiled(1))
    (path,) = directory_of(tmp_path).iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.load("pkg.model", "/src/model.py", STAMP) is None


def test_directory_open_to_others_is_not_used(
    cache: CodeCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.store("pkg.model", "/src/model.py", STAMP, compiled(1))
    directory = directory_of(tmp_path)
    directory.chmod(0o750)
    with caplog.at_level(logging.WARNING):
        again = CodeCache.for_user("cpu", "0.16.1")
    assert "0700" in caplog.text
    assert again.load("pkg.model", "/src/model.py", STAMP) is None
    again.store("pkg.new", "/src/new.py", STAMP, compiled(1))
    assert len(list(directory.iterdir())) == 1


def test_place_that_cannot_hold_a_cache_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "file").write_text("")
    for home in (str(tmp_path / "file"), "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        cache = CodeCache.for_user("cpu", "0.16.1")
        cache.store("pkg.model", "/src/model.py", STAMP, compiled(1))
        assert cache.load("pkg.model", "/src/model.py", STAMP) is None
    assert "compiles them again" in caplog.text
    assert not Path("relative").exists()


def test_directory_that_vanishes_is_done_without(
    cache: CodeCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory_of(tmp_path).rmdir()
    cache.store("pkg.model", "/src/model.py", STAMP, compiled(1))
    assert "cannot keep rewritten modules" in caplog.text
    assert cache.load("pkg.model", "/src/model.py", STAMP) is None


def test_setting_against_bytecode_files_is_kept(
    cache: CodeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    cache.store("pkg.model", "/src/model.py", STAMP, compiled(1))
    assert not list(directory_of(tmp_path).iterdir())


def test_readers_during_writing_see_all_or_nothing(cache: CodeCache, tmp_path: Path) -> None:
    codes = [compiled(f"{number}" * 2000) for number in range(4)]

    def write(number: int) -> None:
        cache.store("pkg.model", "/src/model.py", STAMP, codes[number % 4])

    def read(_: int) -> object:
        return cache.load("pkg.model", "/src/model.py", STAMP)

    with ThreadPoolExecutor(8) as pool:
        pool.map(write, range(200))
        seen = list(pool.map(read, range(400)))
    assert all(code is None or code in codes for code in seen)
    assert len(list(directory_of(tmp_path).iterdir())) == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith("tmp")]
