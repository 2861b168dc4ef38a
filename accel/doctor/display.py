"""The diagnosis as text for a terminal."""

from __future__ import annotations

import textwrap

from accel.doctor.diagnosis import BackendFacts, Diagnosis

WIDTH = 100


def render(diagnosis: Diagnosis) -> str:
    """Sections: the choice, backends with devices, versions, environment, contradictions with fixes."""
    chosen = diagnosis.selected or "NONE"
    lines = _wrapped(f"accelerator: {chosen} ({diagnosis.why})", indent="  ")
    lines += ["", "backends"]
    for backend in diagnosis.backends:
        lines += _backend(backend)
    lines += ["", "versions"]
    width = max(map(len, diagnosis.versions))
    lines += [f"  {label:<{width}}  {version or '-'}" for label, version in diagnosis.versions.items()]
    lines += ["", "environment"]
    lines += [f"  {name}={value}" for name, value in diagnosis.environment.items()] or ["  (nothing set)"]
    lines += ["", "contradictions"]
    for contradiction in diagnosis.contradictions:
        lines += _wrapped(f"  ! {contradiction.problem}", indent="    ")
        lines += _wrapped(f"    fix: {contradiction.fix}", indent="    ")
    if not diagnosis.contradictions:
        lines.append("  none found")
    return "\n".join(lines)


def _backend(backend: BackendFacts) -> list[str]:
    kind = ", emulated" if backend.emulated else ""
    priority = "" if backend.priority is None else f", priority {backend.priority}"
    if not backend.usable:
        return _wrapped(f"  {backend.name:<6} not usable{kind}{priority}: {backend.reason}", indent=" " * 9)
    runtime = f", {backend.runtime}" if backend.runtime else ""
    lines = [f"  {backend.name:<6} usable{kind}{priority}{runtime}, from {backend.origin}"]
    lines.append(f"         groups {backend.process_group_backend}, weight updates {backend.weight_update_backend}")
    lines += [
        f"         [{device.index}] {device.name}, id {device.uuid or device.physical}, "
        f"{_gib(device.free)} free of {_gib(device.total)}"
        for device in backend.devices
    ]
    lines += _wrapped(f"         can: {', '.join(name for name, has in backend.capabilities.items() if has)}", " " * 14)
    lines += _wrapped(f"         memory saver: {backend.memory_saver or 'usable'}", " " * 14)
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, replace_whitespace=False)


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**30:.1f} GiB"
