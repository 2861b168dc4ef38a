"""Weights & Biases, when asked: online where that is possible, else recorded in the run's directory."""

from __future__ import annotations

import netrc
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

Mode = Literal["online", "offline", "disabled"]

_REACH_SECONDS = 3.0


class WandbTracker:
    """One run of Weights & Biases that holds the metrics of every step under their names, as 64-bit floats.

    Opening takes seconds and may wait for the network: give it to a ``BackgroundTracker``. The client's files lie in
    ``run_dir/wandb``. Nothing is sent besides the metrics and ``config``: no console output, no source code, no command
    line, no facts about the machine, no report of the client's own errors.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        project: str,
        name: str,
        group: str | None = None,
        team: str | None = None,
        notify: Callable[[str], None],
    ) -> None:
        files = run_dir / "wandb"
        files.mkdir(exist_ok=True)
        wandb = _imported(files)

        mode, why = choose_mode()
        self._run: Any = None
        if mode == "disabled":
            notify(f"wandb: disabled ({why})")
            return
        self._run = wandb.init(
            project=project,
            name=name,
            group=group,
            entity=team,
            dir=str(run_dir),
            config=dict(config),
            mode=mode,
            settings=wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                disable_git=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        if mode == "online":
            notify(f"wandb: {self._run.url}")
        else:
            notify(f"wandb: offline ({why}); to upload: wandb sync {Path(self._run.dir).parent}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is not None:
            self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def _imported(files: Path) -> Any:
    """The client, told to keep what it would put into the home directory and TMPDIR in ``files``.

    As it is imported it makes directories for temporary files, which it removes when the process ends, if that is not
    killed. Its settings stay where the user has them.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_CACHE_DIR", str(files / "cache"))
    os.environ.setdefault("WANDB_DATA_DIR", str(files / "data"))
    before, tempfile.tempdir = tempfile.tempdir, str(files)
    try:
        import wandb
    finally:
        tempfile.tempdir = before
    return wandb


def choose_mode(environment: Mapping[str, str] = os.environ) -> tuple[Mode, str]:
    """How to run, and why: ``WANDB_MODE``, or online when there is a login and the server can be reached."""
    asked = environment.get("WANDB_MODE", "").lower()
    if asked in ("online", "offline", "disabled"):
        return asked, f"WANDB_MODE={asked}"  # type: ignore[return-value]
    url = environment.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    host = urlsplit(url).hostname or ""
    if not _has_login(host, environment):
        return "offline", "no login: set WANDB_API_KEY or run 'wandb login'"
    if not _reachable(url):
        return "offline", f"{host} cannot be reached"
    return "online", f"{host} can be reached"


def _has_login(host: str, environment: Mapping[str, str]) -> bool:
    """Whether the client will find credentials by itself; without any, it would ask on the terminal."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    places = [environment["NETRC"]] if environment.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in map(os.path.expanduser, places):
        try:
            if netrc.netrc(path).authenticators(host) is not None:
                return True
        except (netrc.NetrcParseError, OSError):
            continue  # not there, or the client cannot read it either
    return False


def _reachable(url: str) -> bool:
    """Whether something listens at ``url``, or at the proxy that leads there."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    if proxy and not proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=_REACH_SECONDS).close()
    except OSError:
        return False
    return True
