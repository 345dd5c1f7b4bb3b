"""Levels of the compiled kernels, and which of them this processor can run.

A level is a set of instructions that the compiler may use everywhere in one shared object, so the processor must have
all of them. Each level includes the ones before it.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "cpp"

_CPU_INFO = Path("/proc/cpuinfo")

# No -ffast-math: infinities and NaN keep their meaning, and sums their order. No contraction: a product and a sum are
# fused where the source says so, and not where a compiler happened to inline it.
_COMMON_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512_BF16 = (*_AVX512, "avx512bf16", "avx512vnni")
_AMX = (*_AVX512_BF16, "amx-tile", "amx-bf16", "amx-int8")


@dataclass(frozen=True, slots=True)
class Level:
    """One set of instructions, in the compiler's names."""

    name: str
    instructions: tuple[str, ...]

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        wide = ("-mprefer-vector-width=512",) if "avx512f" in self.instructions else ()
        return (*_COMMON_FLAGS, *(f"-m{name}" for name in self.instructions), *wide)

    def runs_on(self, processor_flags: frozenset[str]) -> bool:
        return all(_LINUX_NAMES.get(name, name.replace("-", "_")) in processor_flags for name in self.instructions)


LEVELS = {  # lowest first
    name: Level(name, instructions)
    for name, instructions in (("avx2", _AVX2), ("avx512", _AVX512), ("avx512_bf16", _AVX512_BF16), ("amx", _AMX))
}

# Instruction sets whose names in /proc/cpuinfo differ from the compiler's by more than a hyphen.
_LINUX_NAMES = {"avx512bf16": "avx512_bf16", "avx512vnni": "avx512_vnni"}


def processor_flags(cpu_info: Path = _CPU_INFO) -> frozenset[str]:
    """The instruction sets of this processor in Linux's names; none where /proc/cpuinfo cannot be read."""
    try:
        lines = cpu_info.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def levels_here() -> list[Level]:
    """The levels that this processor can run, lowest first."""
    flags = processor_flags()
    return [level for level in LEVELS.values() if level.runs_on(flags)]


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
    """The directory of compiled kernels: as configured, or in the user's cache."""
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "roseinfer" / "kernels"


def find_built(level: Level, kernels_dir: Path) -> Path | None:
    """The newest build of the present sources at this level, by any compiler."""
    built = kernels_dir.glob(f"{level.name}-{digest(level)}-*.so")
    return max(built, key=lambda path: path.stat().st_mtime_ns, default=None)
