"""Sources into a shared object and its functions: naming, refusals, two builders at once, and one pool of threads."""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from roseinfer.config.options import RunnerConfig
from roseinfer.errors import ConfigError
from roseinfer.model.kernels import library
from roseinfer.model.kernels.library import (
    LEVELS,
    SOURCE_DIR,
    Kernels,
    build_kernels,
    digest,
    find_built,
    find_compiler,
    kernels_directory,
    levels_here,
    levels_of,
    load_kernels,
    machine,
    processor_flags,
)
from tests.conftest import BuiltKernels, require_tool

AVX2 = LEVELS["avx2"]
AMX = "amx_tile amx_bf16 amx_int8"
EXPORT = '#define EXPORT extern "C" __attribute__((visibility("default")))\n'
INIT = f"{EXPORT}EXPORT int roseinfer_init() {{ return 0; }}\n"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources that compiles at once, in the place of ours."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "init.cpp").write_text(INIT)
    (folder / "double.cpp").write_text(f"{EXPORT}EXPORT void twice(int* x) {{ *x *= 2; }}\n")
    monkeypatch.setattr(library, "SOURCE_DIR", folder)
    return folder


@pytest.fixture
def compiler() -> str:
    return find_compiler(require_tool("g++"))


@pytest.fixture
def has_avx2() -> None:
    if AVX2 not in levels_here():
        pytest.skip("this processor has no level of the kernels")


def processor_with(flags: str, tmp_path: Path) -> frozenset[str]:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    return processor_flags(tmp_path / "cpuinfo")


ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: {}\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
CORTEX_A72 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
NEOVERSE_N1 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
NEOVERSE_V1 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 "
    "sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs paca pacg dcpodp svei8mm svebf16 i8mm bf16 dgh rng"
)


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ("fp", []),
        (CORTEX_A72, ["neon"]),
        (NEOVERSE_N1, ["neon", "neon_dotprod"]),
        (NEOVERSE_V1.replace(" i8mm", ""), ["neon", "neon_dotprod"]),
        (NEOVERSE_V1, ["neon", "neon_dotprod", "neon_i8mm"]),
    ],
)
def test_levels_of_arm(features: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(ARM.format(features))
    flags = processor_flags(tmp_path / "cpuinfo")
    monkeypatch.setattr(library, "machine", lambda: "aarch64")
    monkeypatch.setattr(library, "processor_flags", lambda: flags)
    assert [level.name for level in levels_here()] == names


def test_a_level_of_another_architecture_needs_its_compiler(sources: Path, tmp_path: Path) -> None:
    level = next(level for level in LEVELS.values() if level.machine != machine())
    with pytest.raises(
        ConfigError, match=rf"^g\+\+ compiles for {machine()}, and {level.name} is .* CXX, for instance"
    ):
        build_kernels(level, tmp_path / "out", find_compiler(require_tool("g++")))
    cross_compiler = require_tool(f"{level.machine}-linux-gnu-g++")
    path, _ = build_kernels(level, tmp_path / "out", cross_compiler)
    with pytest.raises(OSError, match=path.name):
        Kernels(level.name, path)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("sse2", []),
        ("avx2 fma f16c", ["avx2"]),
        ("avx2 fma f16c avx512f avx512bw avx512dq", ["avx2"]),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl", ["avx2", "avx512"]),
        ("avx2 fma f16c avx_vnni", ["avx2", "avx2_vnni"]),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni", ["avx2", "avx512", "avx512_vnni"]),
        (
            "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_vnni",
            ["avx2", "avx512", "avx512_vnni", "avx512_bf16"],
        ),
        (
            f"avx_vnni avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_vnni {AMX}",
            [level.name for level in levels_of("x86_64")],
        ),
    ],
)
def test_a_level_needs_all_its_instructions(flags: str, names: list[str], tmp_path: Path) -> None:
    processor = processor_with(flags, tmp_path)
    assert [level.name for level in LEVELS.values() if not level.lacking(processor)] == names


def test_a_system_that_does_not_tell_has_no_level(tmp_path: Path) -> None:
    assert processor_flags(tmp_path / "none") == frozenset()


def test_flags_are_the_same_on_every_machine() -> None:
    for level in LEVELS.values():
        assert not {"-march=native", "-mtune=native", "-ffast-math"} & set(level.compiler_flags)


def test_a_build_is_found_until_a_source_or_a_header_changes(
    sources: Path, tmp_path: Path, compiler: str, has_avx2: None
) -> None:
    counts: list[int] = []
    path, is_new = build_kernels(AVX2, tmp_path / "out", compiler, counts.append)
    assert (is_new, counts) == (True, [1, 2])
    assert path.name.startswith(f"avx2-{digest(AVX2)}-")
    assert build_kernels(AVX2, tmp_path / "out", compiler, counts.append) == (path, False)
    assert counts == [1, 2]
    assert find_built(AVX2, tmp_path / "out") == path
    assert [*(tmp_path / "out").iterdir()] == [path], "nothing but the object is left"
    (sources / "new.h").write_text("#define X 1\n")
    assert find_built(AVX2, tmp_path / "out") is None
    assert load_kernels(RunnerConfig(kernels_dir=str(tmp_path / "out"))) is None


def test_a_build_that_was_cut_off_is_made_again(sources: Path, tmp_path: Path, compiler: str, has_avx2: None) -> None:
    """As of a disk that was full of late, or a machine that lost power: the file has the right name."""
    path, _ = build_kernels(AVX2, tmp_path / "out", compiler)
    whole = path.read_bytes()
    for left in (0, 63, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:left])
        assert build_kernels(AVX2, tmp_path / "out", compiler) == (path, True)
    assert Kernels("avx2", path).has("twice")


def test_functions_are_those_of_the_object(sources: Path, tmp_path: Path, compiler: str, has_avx2: None) -> None:
    build_kernels(AVX2, tmp_path / "out", compiler)
    kernels = load_kernels(RunnerConfig(kernels_dir=str(tmp_path / "out")))
    assert kernels is not None
    assert kernels.level == "avx2"
    assert kernels.has("twice")
    assert not kernels.has("thrice")
    number = ctypes.c_int(21)
    kernels.function("twice", ctypes.c_void_p)(ctypes.byref(number))
    assert number.value == 42


def test_auto_takes_the_highest_level_that_is_built(
    sources: Path, tmp_path: Path, compiler: str, has_avx2: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes down where the system refuses a level, as some do with AMX; a level that was named is not exchanged."""
    twin = library.Level("avx512", AVX2.instructions)  # runs here, whatever the processor
    monkeypatch.setitem(LEVELS, "avx512", twin)
    monkeypatch.setattr(library, "levels_here", lambda: [AVX2, twin])
    for folder, refuses, expected in (("yes", 0, "avx512"), ("no", 1, "avx2")):
        out = tmp_path / folder
        build_kernels(AVX2, out, compiler)
        (sources / "init.cpp").write_text(INIT.replace("return 0", f"return {refuses}"))
        refusing, _ = build_kernels(twin, out, compiler)
        (sources / "init.cpp").write_text(INIT)
        os.replace(refusing, out / f"avx512-{digest(twin)}-00000000.so")
        found = load_kernels(RunnerConfig(kernels_dir=str(out)))
        assert found is not None
        assert found.level == expected
    with pytest.raises(ConfigError, match="does not let this process use avx512"):
        load_kernels(RunnerConfig(kernels="avx512", kernels_dir=str(out)))


def test_off_loads_nothing(built_kernels: BuiltKernels, has_avx2: None) -> None:
    assert load_kernels(RunnerConfig(kernels="off", kernels_dir=str(built_kernels("avx2")))) is None


def test_a_named_level_that_is_not_built_names_the_command(tmp_path: Path, has_avx2: None) -> None:
    with pytest.raises(ConfigError, match="run `roseinfer kernels build --level avx2`") as refusal:
        load_kernels(RunnerConfig(kernels="avx2", kernels_dir=str(tmp_path)))
    assert refusal.value.param == "runner.kernels"


def test_a_level_that_the_processor_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "processor_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(ConfigError, match=r"This processor has no .*amx_int8, which amx needs") as refusal:
        load_kernels(RunnerConfig(kernels="amx", kernels_dir=str(tmp_path)))
    assert refusal.value.param == "runner.kernels"
    assert load_kernels(RunnerConfig(kernels_dir=str(tmp_path))) is None


def test_a_file_that_is_no_library_is_refused(tmp_path: Path, has_avx2: None, caplog: pytest.LogCaptureFixture) -> None:
    """And where the level was not named, it is logged: what serves then is slower."""
    damaged = tmp_path / f"avx2-{digest(AVX2)}-00000000.so"
    damaged.write_bytes(b"half a file")
    with pytest.raises(ConfigError, match="avx2 kernels do not load"):
        load_kernels(RunnerConfig(kernels="avx2", kernels_dir=str(tmp_path)))
    assert load_kernels(RunnerConfig(kernels_dir=str(tmp_path))) is None
    (passed_over,) = caplog.records
    assert vars(passed_over).items() >= {"levelname": "WARNING", "kernels": "avx2", "path": str(damaged)}.items()


def test_no_compiler_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^No C\+\+ compiler is on the PATH \(g\+\+, clang\+\+, c\+\+\)"):
        find_compiler()
    with pytest.raises(ConfigError, match=r"\(icpx\)"):
        find_compiler("icpx")


def test_what_the_compiler_refuses_is_printed(sources: Path, tmp_path: Path, compiler: str) -> None:
    (sources / "double.cpp").write_text("int f() { return missing; }\n")
    with pytest.raises(ConfigError, match=r"g\+\+ did not compile the kernels: .*double.cpp.*missing"):
        build_kernels(AVX2, tmp_path / "out", compiler)
    assert [*(tmp_path / "out").iterdir()] == []


def test_a_directory_that_cannot_be_written_is_named(sources: Path, tmp_path: Path, compiler: str) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ConfigError, match=str(tmp_path / "out")) as refusal:
        build_kernels(AVX2, tmp_path / "out", compiler)
    assert refusal.value.param == "runner.kernels_dir"


def test_two_builders_and_a_reader_at_once(sources: Path, tmp_path: Path, compiler: str, has_avx2: None) -> None:
    """The object is whole from the moment when it can be found."""
    out = tmp_path / "out"
    barrier, results, is_over, read = threading.Barrier(2), [], threading.Event(), []

    def build() -> None:
        barrier.wait()
        results.append(build_kernels(AVX2, out, compiler)[0])

    def watch() -> None:
        while not is_over.is_set():
            path = find_built(AVX2, out)
            if path is not None:
                read.append(Kernels("avx2", path).level)

    threads = [threading.Thread(target=build) for _ in range(2)]
    reader = threading.Thread(target=watch)
    for thread in (*threads, reader):
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    reader.join()
    assert len(results) == 2
    assert results[0] == results[1]
    assert [*out.iterdir()] == [results[0]]
    assert set(read) <= {"avx2"}


def test_kernels_lie_in_the_users_cache_unless_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernels_directory(None) == tmp_path / ".cache" / "roseinfer" / "kernels"
    assert kernels_directory("~/mine") == tmp_path / "mine"


CHILD = """
import sys
import torch
from roseinfer.config.options import RunnerConfig
from roseinfer.model.attention.base import AttentionSpec, PackedTokens
from roseinfer.model.attention.registry import choose_attention
from roseinfer.model.kernels.library import load_kernels
from roseinfer.model.attention.kv_cache import KVCache
from roseinfer.model.device import Placement
import numpy as np

torch.set_num_threads(2)
torch.randn(512, 512) @ torch.randn(512, 512)
torch.randn(1 << 20).exp()
kernels = load_kernels(RunnerConfig(kernels_dir=sys.argv[1]))
spec = AttentionSpec(8, 8, 64, 1.0, (None,))
cache = KVCache(spec, 8, 16, Placement(torch.device("cpu"), torch.float32))
attention = choose_attention("native", cache, spec, kernels)
tokens = PackedTokens(np.zeros(64, np.int32), np.arange(64, dtype=np.int32), np.array([0, 64], np.int32),
                      np.arange(8, dtype=np.int32)[None], 64, 64)
attention.prepare(tokens)(0, *torch.randn(3, 64, 8, 64))
print(open("/proc/self/maps").read())
"""


def test_kernels_and_torch_share_one_openmp_runtime(built_kernels: BuiltKernels, has_avx2: None) -> None:
    """Two would each have a pool of threads, and wait for each other on the same cores."""
    kernels_dir = built_kernels("avx2")
    command = [sys.executable, "-c", CHILD, str(kernels_dir)]
    maps = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    mapped = {line[line.index("/") :] for line in maps if "/" in line}
    assert any(path.startswith(str(kernels_dir)) for path in mapped)
    runtimes = {path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    assert len(runtimes) == 1


SHARING = """
#include "team.h"

EXPORT void share(int64_t num_jobs, int64_t num_units, int64_t pause_us, int32_t* counts, int32_t* threads) {
    Team::open(num_jobs, [&](int64_t job) {
        int32_t* of_job = counts + job * num_units;
        Team::share_out(num_units, true, [&](Pieces& pieces) {
            for (int64_t unit; pieces.take(&unit);) {
                __atomic_fetch_add(of_job + unit, 1, __ATOMIC_RELAXED);
                threads[unit] = omp_get_thread_num();
                if (pause_us) usleep(pause_us);
            }
        });
        for (int64_t unit = 0; unit < num_units; ++unit) of_job[unit] += of_job[unit] == 1;  // done when it returns
    });
}
"""


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_each_unit_is_done_once_by_whichever_thread_has_a_core(sources: Path, tmp_path: Path, num_threads: int) -> None:
    shutil.copy(SOURCE_DIR / "team.h", sources)
    (sources / "init.cpp").write_text(f"#include <unistd.h>\n{INIT}{SHARING}")
    level = levels_here()[-1]
    kernels = Kernels(level.name, build_kernels(level, tmp_path / "out", find_compiler())[0])
    share = kernels.function("share", *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2)
    torch.set_num_threads(num_threads)
    for num_jobs, num_units, pause_us in ((3000, 5, 0), (300, 64, 0), (1, 24, 3000)):
        counts, threads = np.zeros((num_jobs, num_units), np.int32), np.full(num_units, -1, np.int32)
        share(num_jobs, num_units, pause_us, counts.ctypes.data, threads.ctypes.data)
        assert (counts == 2).all()
    assert len(set(threads.tolist())) == num_threads, "all helped with units that take long"
