"""Compiles the C++ kernels for the levels of instructions that processors have, finds what is built, and loads it.

A level is a set of instructions that the compiler may use everywhere in one shared object, so the processor must have
all of them. Levels of one architecture are in the order of their speed; `avx2_vnni` is of processors without AVX-512.

The object is in the user's cache, named by its level, a digest of sources and flags, and a digest of the compiler's
version. It gets that name when it is complete: two builders at once make the same file twice, and a reader never sees
half of one. It is linked to no OpenMP runtime: its symbols resolve to the one that torch has loaded, since two pools of
threads on the same cores would wait for each other. So import torch before loading it. A call releases the GIL.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roseinfer.config.options import RunnerConfig
from roseinfer.errors import ConfigError

_log = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "cpp"

COMPILERS = ("g++", "clang++", "c++")

_ELF_HEADER = struct.Struct("<4s36xQ10xHH2x")  # the magic; where the section headers are, their size and number
_CPU_INFO = Path("/proc/cpuinfo")
_MAPS = Path("/proc/self/maps")
_OPENMP = re.compile(r"/\S*/lib(?:g|i)?omp\d*(?:-\w+)?\.so\S*")

# No -ffast-math: infinities and NaN keep their meaning, and sums their order. No contraction: a product and a sum are
# fused where the source says so, and not where a compiler happened to inline it.
_COMMON_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
_X86_64, _AARCH64 = "x86_64", "aarch64"
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512_VNNI = (*_AVX512, "avx512vnni")
_AVX512_BF16 = (*_AVX512_VNNI, "avx512bf16")
_AMX = (*_AVX512_BF16, "amx-tile", "amx-bf16", "amx-int8")
_NEON = ("simd",)
_NEON_DOTPROD = (*_NEON, "dotprod")
_NEON_I8MM = (*_NEON_DOTPROD, "i8mm", "bf16")  # Armv8.6 brings both


OnProgress = Callable[[int], None]  # takes the number of files compiled so far
Note = Callable[[Any, tuple[Any, ...]], None]  # takes a function of ctypes, and what it was called with


@dataclass(frozen=True, slots=True)
class Level:
    """One set of instructions, in the compiler's names."""

    name: str
    instructions: tuple[str, ...]
    further_flags: tuple[str, ...] = ()  # of the compiler
    machine: str = _X86_64  # whose instructions they are

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        if self.machine == _AARCH64:
            revision = "armv8-a" if self.instructions == _NEON else "armv8.2-a"  # the first that may have the others
            return (*_COMMON_FLAGS, f"-march={revision}+{'+'.join(self.instructions)}", *self.further_flags)
        wide = ("-mprefer-vector-width=512",) if "avx512f" in self.instructions else ()
        return (*_COMMON_FLAGS, *(f"-m{name}" for name in self.instructions), *wide, *self.further_flags)

    def lacking(self, processor_flags: frozenset[str]) -> list[str]:
        """The instructions, in Linux's names, that a processor with these flags does not have."""
        names = [_LINUX_NAMES.get(name, name.replace("-", "_")) for name in self.instructions]
        return [name for name in names if name not in processor_flags]


LEVELS = {  # lowest first
    level.name: level
    for level in (
        Level("avx2", _AVX2),
        Level("avx2_vnni", (*_AVX2, "avxvnni")),
        Level("avx512", _AVX512),
        Level("avx512_vnni", _AVX512_VNNI),
        Level("avx512_bf16", _AVX512_BF16),
        Level("amx", _AMX),
        Level("neon", _NEON, machine=_AARCH64),
        Level("neon_dotprod", _NEON_DOTPROD, machine=_AARCH64),
        Level("neon_i8mm", _NEON_I8MM, machine=_AARCH64),
    )
}

MACHINES = tuple(dict.fromkeys(level.machine for level in LEVELS.values()))

# Instruction sets whose names in /proc/cpuinfo differ from the compiler's by more than a hyphen.
_LINUX_NAMES = {
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
    "avxvnni": "avx_vnni",
    "simd": "asimd",
    "dotprod": "asimddp",
}


def processor_flags(cpu_info: Path = _CPU_INFO) -> frozenset[str]:
    """The instruction sets of this processor in Linux's names; none where /proc/cpuinfo cannot be read."""
    try:
        lines = cpu_info.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    names = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(names, "").split())


def machine() -> str:
    """The architecture of this processor, as compilers call it."""
    return platform.machine()


def levels_of(machine: str) -> list[Level]:
    """The levels of an architecture, lowest first; none where there are no kernels for it."""
    return [level for level in LEVELS.values() if level.machine == machine]


def levels_here() -> list[Level]:
    """The levels that this processor can run, lowest first."""
    flags = processor_flags()
    return [level for level in levels_of(machine()) if not level.lacking(flags)]


def sources() -> list[Path]:
    """The files that are compiled."""
    return sorted(SOURCE_DIR.glob("*.cpp"))


def digest(level: Level) -> str:
    """Digest of the sources, headers and flags of a build, so that a build of other sources is not found."""
    parts = [" ".join(level.compiler_flags).encode()]
    for path in sorted((*sources(), *SOURCE_DIR.glob("*.h"))):
        parts += [path.name.encode(), path.read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def kernels_directory(configured: str | None) -> Path:
    """The directory of compiled kernels: as configured, or in the user's cache. Raises ConfigError without a home."""
    try:
        return Path(configured or "~/.cache/roseinfer/kernels").expanduser()
    except RuntimeError:
        problem = "This user has no home directory: set HOME, or name a directory."
        if configured:
            problem = f"There is no home directory for {configured}."
        raise ConfigError(problem, param="runner.kernels_dir") from None


def find_built(level: Level, kernels_dir: Path) -> Path | None:
    """The newest build of the present sources at this level, by any compiler."""
    built = kernels_dir.glob(f"{level.name}-{digest(level)}-*.so")
    return max(built, key=lambda path: path.stat().st_mtime_ns, default=None)


def is_whole(path: Path) -> bool:
    """Whether a shared object is there up to its section headers, which linkers write last."""
    try:
        with path.open("rb") as file:
            magic, start, size, number = _ELF_HEADER.unpack(file.read(_ELF_HEADER.size))
            return bool(magic == b"\x7fELF" and os.fstat(file.fileno()).st_size >= start + size * number)
    except (OSError, struct.error):
        return False


def find_compiler(named: str | None = None) -> str:
    """The path of the compiler called `named`, or of the first usual one. Raises ConfigError if there is none."""
    names = (named,) if named else COMPILERS
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise ConfigError(
            f"No C++ compiler is on the PATH ({', '.join(names)}): install one, for instance with `apt-get install "
            "g++`, or go on without compiled kernels, in plain torch and slower."
        )
    return path


def compiled_machine(compiler: str) -> str:
    """The architecture that a compiler compiles for."""
    return _run([compiler, "-dumpmachine"]).partition("-")[0]


def build_kernels(
    level: Level, kernels_dir: Path, compiler: str, on_progress: OnProgress = lambda *_: None
) -> tuple[Path, bool]:
    """The shared object of the present sources at this level, and whether it was compiled now.

    Raises ConfigError when the compiler is one for another architecture, when it fails, or when the directory cannot be
    written.
    """
    if (compiled := compiled_machine(compiler)) != level.machine:
        raise ConfigError(
            f"{Path(compiler).name} compiles for {compiled}, and {level.name} is a level of {level.machine}: name a "
            f"cross-compiler in CXX, for instance {level.machine}-linux-gnu-g++."
        )
    # Another version of the compiler may fuse other products.
    version = hashlib.sha256(_run([compiler, "--version"]).encode()).hexdigest()[:8]
    target = kernels_dir / f"{level.name}-{digest(level)}-{version}.so"
    if is_whole(target):
        return target, False
    try:
        kernels_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=kernels_dir) as work:
            shared_object = _compile(level, Path(work), compiler, on_progress)
            os.replace(shared_object, target)
    except OSError as error:
        raise ConfigError(f"{error.filename or kernels_dir}: {error.strerror}", param="runner.kernels_dir") from None
    return target, True


def _compile(level: Level, work: Path, compiler: str, on_progress: OnProgress) -> Path:
    """Compile as many sources at once as there are cores, and link the objects into one shared object."""
    files = sources()
    objects = [work / f"{path.stem}.o" for path in files]
    commands = [
        [compiler, *level.compiler_flags, "-c", str(path), "-o", str(made)]
        for path, made in zip(files, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(_run, command) for command in commands]
        try:
            for num_done, future in enumerate(as_completed(futures), 1):
                future.result()
                on_progress(num_done)
        except BaseException:  # Ctrl-C, or a file that does not compile: the others need not begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    shared_object = work / "kernels.so"
    _run([compiler, "-shared", *map(str, objects), "-o", str(shared_object)])
    return shared_object


def _run(command: Sequence[str]) -> str:
    """Standard output of a compiler run. Raises ConfigError with the compiler's first error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), lines[-1] if lines else f"exit {done.returncode}")
        raise ConfigError(f"{Path(command[0]).name} did not compile the kernels: {first}")
    return done.stdout


class Kernels:
    """The functions of one shared object, as `extern "C"` declares them."""

    def __init__(self, level: str, path: Path) -> None:
        """Raises OSError when the object cannot be loaded, or the system refuses the level's instructions."""
        for runtime in openmp_runtimes():
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)  # loaded already; this makes its symbols visible to others
        self.level = level
        self.name = path.stem  # of the sources, the flags and the compiler too
        self._note: Note | None = None
        self._library = ctypes.CDLL(str(path))
        if self._library.roseinfer_init():
            raise OSError(f"the system does not let this process use {level}")

    def has(self, name: str) -> bool:
        """Whether there is a function of this name at this level."""
        return hasattr(self._library, name)

    def function(self, name: str, *argtypes: Any) -> Callable[..., None]:
        """The function `name`, which returns nothing and takes arguments of these ctypes types."""
        function = self._library[name]
        function.argtypes = argtypes
        function.restype = None

        def call(*arguments: Any) -> None:
            function(*arguments)
            if self._note is not None:
                self._note(function, arguments)

        return call

    @contextmanager
    def noting(self, note: Note) -> Generator[None]:
        """Has `note` called after each call of a function."""
        self._note = note
        try:
            yield
        finally:
            self._note = None


def openmp_runtimes() -> list[str]:
    """The files of the OpenMP runtimes that this process has loaded: one, after torch is imported."""
    try:
        return sorted(set(_OPENMP.findall(_MAPS.read_text(encoding="utf-8"))))
    except OSError:
        return []


def load_kernels(config: RunnerConfig) -> Kernels | None:
    """The configured kernels, or None if they are off or `auto` finds none built. Import torch first.

    Raises ConfigError for a level that the configuration names and that cannot be used.
    """
    if config.kernels == "off":
        return None
    kernels_dir = kernels_directory(config.kernels_dir)
    if config.kernels != "auto":
        return _load_named(LEVELS[config.kernels], kernels_dir)
    for level in reversed(levels_here()):
        path = find_built(level, kernels_dir)
        if path is not None:
            try:
                return Kernels(level.name, path)
            except OSError as error:  # built elsewhere for another system, or damaged; a lower level may do
                _log.warning(
                    "compiled kernels do not load, and are passed over; if they are damaged, remove the file and run "
                    "`roseinfer kernels build`",
                    extra={"kernels": level.name, "path": str(path), "error": str(error)},
                )
    return None


def _load_named(level: Level, kernels_dir: Path) -> Kernels:
    if lacking := level.lacking(processor_flags()):
        raise ConfigError(
            f"This processor has no {', '.join(lacking)}, which {level.name} needs.", param="runner.kernels"
        )
    path = find_built(level, kernels_dir)
    if path is None:
        raise ConfigError(
            f"No {level.name} kernels are built in {kernels_dir}: run `roseinfer kernels build --level {level.name}`.",
            param="runner.kernels",
        )
    try:
        return Kernels(level.name, path)
    except OSError as error:
        raise ConfigError(f"The {level.name} kernels do not load: {error}.", param="runner.kernels") from None
