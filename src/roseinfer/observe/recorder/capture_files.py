"""The directories of captures and profiles: their names, what is in them, and the room that is made for them."""

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

from roseinfer.config.options import Config
from roseinfer.observe.recorder.recording import Recording

MANIFEST_NAME = "manifest.json"
RECORDING_NAME = "recording.npz"
TRACE_NAME = "trace.json"
MIB = 1 << 20

_SECTIONS = ("model", "cache", "scheduler", "runner", "engine")  # nothing in them is a secret or leads to one
_PACKAGES = ("torch", "numpy", "triton")
_DRIVER = Path("/proc/driver/nvidia/version")
_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}Z-(breach|profile)-[0-9a-f]{6}")  # so the order of names is that of time


def new_directory(parent: Path, kind: str) -> Path:
    """Returns a path that does not exist yet; `kind` is `breach` or `profile`."""
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    return parent.absolute() / f"{moment}-{kind}-{secrets.token_hex(3)}"


def profile_directory(capture_dir: str, max_mib: float) -> Path:
    """Returns where a profile asked for by hand goes: beside the captures or, without a place for them, in /tmp.

    Beside the captures it counts as one of them, so room is made for it first.
    """
    if capture_dir:
        with contextlib.suppress(OSError):  # no directory yet, or one that a breach is just deleting from
            make_room(Path(capture_dir), max_mib * MIB)
    return new_directory(Path(capture_dir or tempfile.gettempdir()), "profile")


def manifest_facts(config: Config, version: str) -> dict[str, Any]:
    """Returns what a manifest says of the server itself: model, configuration without secrets, versions."""
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


def write_capture(directory: Path, recording: Recording, manifest: Mapping[str, Any]) -> None:
    """Writes a capture, its manifest last and whole: a directory that has one is complete. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    recording.save(directory / RECORDING_NAME)
    _write_manifest(directory, manifest)


def write_profile_manifest(server: Mapping[str, Any], directory: Path, num_steps: int) -> None:
    """Writes the manifest of a profile asked for by hand, with the keys of a breach's, once its trace is written.

    `server` is what `manifest_facts` says. Raises OSError.
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
    """Returns what a manifest says of a profile that was written."""
    return {"num_steps": num_steps, "trace": TRACE_NAME}


def _write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    scratch = directory / f".{MANIFEST_NAME}.part"
    try:
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        scratch.replace(directory / MANIFEST_NAME)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def make_room(parent: Path, max_bytes: float) -> list[Path]:
    """Deletes the oldest captures until the rest fits, but never the newest; returns what went. Raises OSError."""
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
