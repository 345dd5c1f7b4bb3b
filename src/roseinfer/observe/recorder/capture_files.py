"""A recording and what is known of a breach into one directory, and old directories into free space.

Knows only directories of its own naming: whatever else lies beside them is neither counted nor deleted.
"""

import contextlib
import importlib.metadata
import platform
import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from roseinfer.config.tree import Config
from roseinfer.observe.recorder.recording import Recording, StructArray

MANIFEST_NAME = "manifest.json"
RECORDING_NAME = "recording.npz"
TRACE_NAME = "trace.json"
MIB = 1 << 20

_SECTIONS = ("model", "cache", "scheduler", "runner", "engine")  # nothing in them is a secret or leads to one
_PACKAGES = ("torch", "numpy", "transformers", "triton")
_DRIVER = Path("/proc/driver/nvidia/version")
_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}Z-(breach|profile)-[0-9a-f]{6}")  # so the order of names is that of time


def new_directory(parent: Path, kind: str) -> Path:
    """A path that does not exist yet; `kind` is `breach` or `profile`."""
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    return parent.absolute() / f"{moment}-{kind}-{secrets.token_hex(3)}"


def profile_directory(capture_dir: str, max_mib: float) -> Path:
    """Where a profile that somebody asked for goes: beside the captures or, without a place for them, in /tmp.

    Beside the captures it counts as one of them, so there is made room for it first.
    """
    if capture_dir:
        with contextlib.suppress(OSError):  # no directory yet, or one that a breach is just deleting from
            make_room(Path(capture_dir), max_mib * MIB)
    return new_directory(Path(capture_dir or tempfile.gettempdir()), "profile")


def facts(config: Config, version: str) -> dict[str, Any]:
    """What a manifest says of the server itself: model, configuration without secrets, versions."""
    installed = {distribution.name for distribution in map(_find, _PACKAGES) if distribution is not None}
    driver = _DRIVER.read_text(encoding="ascii", errors="replace").partition("\n")[0] if _DRIVER.is_file() else None
    return {
        "model_name": config.served_model_name,
        "config": {name: msgspec.to_builtins(getattr(config, name)) for name in _SECTIONS},
        "versions": {
            "roseinfer": version,
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: importlib.metadata.version(name) for name in sorted(installed)},
            "nvidia_driver": driver,
        },
    }


def _find(package: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write(directory: Path, recording: Recording, manifest: Mapping[str, Any]) -> None:
    """The manifest comes last, and whole: a directory that has one is complete. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    recording.save(directory / RECORDING_NAME)
    _write_manifest(directory, manifest)


def write_profile_manifest(server: Mapping[str, Any], directory: Path, num_steps: int) -> None:
    """That of a profile that somebody asked for, whose trace has been written: `server` is what `facts` says.

    It has the keys of a breach's, so that whoever reads one reads the other. Raises OSError.
    """
    manifest = {
        "rule": None,
        "breached_at": None,
        "breached_monotonic_ns": None,
        "requests": [],
        **server,
        "recording": None,
        "profile": profile_of(num_steps),
    }
    _write_manifest(directory, manifest)


def profile_of(num_steps: int) -> dict[str, Any]:
    """What a manifest says of a profile that was written."""
    return {"num_steps": num_steps, "trace": TRACE_NAME}


def _write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    scratch = directory / f".{MANIFEST_NAME}.part"
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    scratch.replace(directory / MANIFEST_NAME)


def make_room(parent: Path, max_bytes: float) -> list[Path]:
    """Delete the oldest captures until the rest fits, but never the newest; returns what went. Raises OSError."""
    captures = sorted(path for path in parent.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
    sizes = {path: _size(path) for path in captures}
    total, gone = sum(sizes.values()), []
    for path in captures[:-1]:
        if total <= max_bytes:
            break
        shutil.rmtree(path)
        total -= sizes[path]
        gone.append(path)
    return gone


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def joined(before: Recording, after: Recording) -> Recording:
    """Everything that either of two recordings of one server knows, the later one's word counting."""
    requests = {request.serial: request for request in (*before.requests, *after.requests)}
    return Recording(
        meta=after.meta,
        requests=[requests[serial] for serial in sorted(requests)],
        steps=_joined(before.steps, after.steps, "step_id"),
        writes=_joined(before.writes, after.writes, "written_ns"),
        interruptions=_joined(before.interruptions, after.interruptions, "start_ns"),
    )


def _joined(before: StructArray, after: StructArray, field: str) -> StructArray:
    """Rows in the order of a field that grows with them."""
    if not len(after):
        return before
    return np.concatenate((before[before[field] < after[field][0]], after))
