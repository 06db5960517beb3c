"""CUTLASS C++ without a GPU: what is written, what is compiled and cached, what is refused and chosen."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from impls.contract import Device
from impls.cutlass import build, cpp, cpp_choices
from impls.cutlass.cpp_choices import Choice, Kernel
from impls.cutlass.kernels import cpp_library
from impls.cutlass.kernels.cpp_source import source
from impls.support import tuned
from impls.support.h200 import H200
from impls.workloads.base import parse_case
from impls.workloads.gemm import Gemm

KERNEL = Kernel("bf16", "f32", "bf16", True, False, "none", 128, 256, 64, 2, 1)


def gemm(spec: str) -> Gemm:
    case = parse_case(f"gemm:{spec}")
    assert isinstance(case, Gemm)
    return case


# --- the source -----------------------------------------------------------------------------------------------------


def test_the_source_says_what_the_case_is() -> None:
    text = source(cpp_choices.kernel(gemm("512x512x512:f16:tn:out=f32"), Choice(128, 192, 64, 1, 2)))
    for line in (
        "using ElementA = cutlass::half_t;",
        "using ElementD = float;",
        # A is stored (K, M): its rows are contiguous along M. B is stored (K, N).
        "using LayoutA = cutlass::layout::ColumnMajor;",
        "using LayoutB = cutlass::layout::RowMajor;",
        "using LayoutD = cutlass::layout::RowMajor;",
        "using TileShape = Shape<_128, _192, _64>;",
        "using ClusterShape = Shape<_1, _2, _1>;",
    ):
        assert line in text.splitlines()


def test_a_swapped_kernel_multiplies_the_transposed() -> None:
    case, choice = gemm("16x4096x8192:bf16:nt:bias"), Choice(64, 16, 128, schedule="pingpong", swapped=True)
    assert cpp_choices.sizes(case, choice) == (4096, 16, 8192)
    text = source(cpp_choices.kernel(case, choice))
    # C (M, N) row-major is C^T (N, M) column-major; the bias, along the case's N, runs down its rows.
    assert "using LayoutD = cutlass::layout::ColumnMajor;" in text
    assert "Sm90ColBroadcast" in text and "Sm90RowBroadcast" not in text
    # nn: B (K, N) is the swapped A, contiguous along the swapped M; A (M, K) the swapped B, contiguous along K.
    kernel = cpp_choices.kernel(gemm("16x4096x8192:bf16"), choice)
    assert (kernel.a_k_major, kernel.b_k_major) == (False, True)


@pytest.mark.parametrize(
    ("epilogue", "functions"),
    [
        ("none", ["Identity"]),
        ("bias", ["plus"]),
        ("bias+relu", ["plus", "ReLu"]),
        ("bias+gelu", ["plus", "TanhGelu"]),
        ("residual", ["plus"]),
    ],
)
def test_an_epilogue_is_a_tree(epilogue: str, functions: list[str]) -> None:
    text = source(replace(KERNEL, epilogue=epilogue))
    assert re.findall(r"Sm90Compute<(?:\w+::)*(\w+),", text) == functions
    # C is read for a residual only.
    assert f"using ElementC = {'ElementD' if epilogue == 'residual' else 'void'};" in text
    # Rounded once, at the last step.
    assert text.count("ElementD, ElementCompute, Round>") == 1


def test_every_source_is_whole() -> None:
    epilogues = ("none", "bias", "bias+relu", "bias+gelu", "residual")
    for epilogue, schedule, swapped, stream_k in itertools.product(
        epilogues, ("cooperative", "pingpong", "cp_async"), (False, True), (False, True)
    ):
        one = replace(KERNEL, epilogue=epilogue, schedule=schedule, swapped=swapped, stream_k=stream_k)
        for kernel in (one, replace(one, grouped=True)):
            text = source(kernel)
            assert "@" not in text
            assert text.count("{") == text.count("}") and text.count("(") == text.count(")")
            functions = {"facts", "prepared_bytes", "workspace_bytes", "can_implement", "prepare", "run"}
            assert set(re.findall(r'^extern "C" \w+ (\w+)\(', text, re.MULTILINE)) == functions


def test_f8_promotes_unless_it_is_fast() -> None:
    f8 = replace(KERNEL, dtype="f8e4m3", b_k_major=True, k=128)
    assert "FP8FastAccum" in source(replace(f8, acc="fast"))
    promoted = source(f8)
    assert "FP8FastAccum" not in promoted and "warpspecialized_fp8.hpp" in promoted
    # By cp.async CUTLASS never promotes, and has no schedule of that name.
    assert "FP8FastAccum" not in source(replace(f8, acc="fast", schedule="cp_async"))


def test_other_widths_of_wgmma_are_declared() -> None:
    define = "#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED\n"
    first_include = "#include <cstdio>"
    wide = source(replace(KERNEL, m=256, n=208))
    assert define in wide and wide.index(define) < wide.index(first_include)
    assert all(define not in source(replace(KERNEL, n=n)) for n in (16, 64, 128, 192, 256))


# --- the cache ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGEMARK_CACHE", str(tmp_path))
    return tmp_path / "cutlass"


def test_a_library_is_named_by_all_that_it_is_made_of(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {
        "dtype": "f16",
        "acc": "f16",
        "out": "f32",
        "a_k_major": False,
        "b_k_major": True,
        "epilogue": "bias",
        "m": 256,
        "n": 128,
        "k": 128,
        "cluster_m": 1,
        "cluster_n": 2,
        "schedule": "pingpong",
        "stream_k": True,
        "swapped": True,
        "grouped": True,
    }
    assert set(changed) == set(KERNEL.__dataclass_fields__)
    files = {build.library(replace(KERNEL, **{name: value})) for name, value in changed.items()}
    assert len(files | {build.library(KERNEL)}) == len(changed) + 1
    assert build.library(KERNEL).parent == cache
    # How blocks walk is decided at launch: the same library.
    case, choice = gemm("512x512x512:bf16"), Choice(128, 256, 64, 2, 1)
    walked = replace(choice, raster="n", swizzle=8)
    assert cpp_choices.kernel(case, walked) == cpp_choices.kernel(case, choice) == KERNEL
    before = build.library(KERNEL)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-lineinfo"))
    assert build.library(KERNEL) != before


def fake_headers(tmp_path: Path, version: str) -> Path:
    major, minor, patch = version.split(".")
    file = tmp_path / "include" / "cutlass" / "version.h"
    file.parent.mkdir(parents=True)
    file.write_text(f"#define CUTLASS_MAJOR {major}\n#define CUTLASS_MINOR {minor}\n#define CUTLASS_PATCH {patch} \n")
    return tmp_path


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """A script in nvcc's place: a line per call into ``calls``, then what ``behaviour`` holds."""
    home = tmp_path / "toolkit"
    (home / "bin").mkdir(parents=True)
    script = home / "bin" / "nvcc"
    script.write_text(
        f'#!/bin/sh\necho "$*" >> {home}/calls\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done\n'
        f". {home}/behaviour\n"
    )
    script.chmod(0o755)
    (home / "behaviour").write_text("echo built > $out\n")
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("CUTLASS_PATH", str(fake_headers(tmp_path / "headers", build.CUTLASS)))
    return home


def test_it_is_compiled_once(compiler: Path, cache: Path) -> None:
    file = build.ensure(KERNEL)
    assert file.read_text() == "built\n"
    assert build.ensure(KERNEL) == file
    assert len((compiler / "calls").read_text().splitlines()) == 1
    assert [p.name for p in cache.iterdir()] == [file.name]
    assert "arch=compute_90a,code=sm_90a" in (compiler / "calls").read_text()


def test_several_are_compiled_and_every_one_is_told(compiler: Path) -> None:
    kernels = [replace(KERNEL, n=n) for n in (64, 128, 192)]
    build.ensure(kernels[0])
    said: list[str] = []
    assert build.build([*kernels, kernels[2]], 2, said.append) == {}
    assert [line.split()[0] for line in said] == ["[1/2]", "[2/2]"]
    assert all(build.library(kernel).exists() for kernel in kernels)


def test_what_nvcc_says_is_passed_on(compiler: Path, cache: Path) -> None:
    (compiler / "behaviour").write_text('echo "x.cu(7): error: no such tile" >&2; exit 2\n')
    said: list[str] = []
    failed = build.build([KERNEL], 1, said.append)
    assert "x.cu(7): error: no such tile" in failed[KERNEL]
    assert "failed" in said[0] and KERNEL.name in said[0]
    assert not list(cache.iterdir())


def test_serialized_wgmma_is_no_library(compiler: Path, cache: Path) -> None:
    warning = (
        "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline in the function 'gemm'"
    )
    (compiler / "behaviour").write_text(f'echo built > $out; echo "{warning}"\n')
    with pytest.raises(build.BuildError, match=r"C7511.*smaller tile"):
        build.ensure(KERNEL)
    assert not list(cache.iterdir())


def test_without_nvcc_it_says_what_to_do(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTLASS_PATH", str(fake_headers(tmp_path / "headers", build.CUTLASS)))
    monkeypatch.setattr(build, "nvcc", _raise("There is no nvcc here: install the CUDA toolkit."))
    with pytest.raises(build.BuildError, match=r"\.so is not in the cache.*no nvcc.*nox -s build"):
        build.ensure(KERNEL)


def _raise(message: str):
    def function() -> None:
        raise build.BuildError(message)

    return function


def test_nvcc_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if not Path("/usr/local/cuda/bin/nvcc").is_file():
        with pytest.raises(build.BuildError, match="no nvcc"):
            build.nvcc()
    script = tmp_path / "nvcc"
    script.touch(mode=0o755)
    assert build.nvcc() == script


def test_without_headers_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(build.BuildError, match=r"nvidia-cutlass==4\.2\.0\.0"):
        build.headers()
    monkeypatch.delenv("CUTLASS_PATH")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(build.BuildError, match="no CUTLASS headers here"):
        build.headers()


def test_only_the_shapes_that_a_tile_can_use_are_read(tmp_path: Path) -> None:
    def shape(name: str, body: str) -> str:
        return f"template <int a>\nstruct {name}\n{{\n  {body}\n  void f() {{\n  }}\n}};\n"

    arch, atom = (tmp_path / "whole" / "cute" / folder for folder in ("arch", "atom"))
    for folder in (arch, atom):
        folder.mkdir(parents=True)
    widths = (16, 64, 104, 208)
    (arch / "mma_sm90_gmma.hpp").write_text(
        "enum class Major { K };\n" + "".join(shape(f"MMA_64x{n}x16_F32BF16BF16_SS", f"int of_{n};") for n in widths)
    )
    (arch / "mma_sm90_gmma_sparse.hpp").write_text(shape("GMMA_64x208x32_F32BF16BF16_SS", "int sparse;"))
    (atom / "mma_traits_sm90_gmma.hpp").write_text(
        "".join(shape(f"MMA_Traits<SM90_64x{n}x16_F32BF16BF16_SS<a>>", f"int of_{n};") for n in widths)
    )
    build.thin(tmp_path / "whole", 208, tmp_path / "thin")
    for name in ("arch/mma_sm90_gmma.hpp", "atom/mma_traits_sm90_gmma.hpp"):
        text = (tmp_path / "thin" / "cute" / name).read_text()
        # 208 = 13 x 16 = 2 x 104; it is no multiple of 64.
        assert re.findall(r"of_(\d+)", text) == ["16", "104", "208"]
        assert re.search(r"64x64x16_F32BF16BF16_SS(<a>>)?\n\{\};", text)
        assert text.count("template <int a>") == text.count("struct ") == len(widths)
    assert "enum class Major { K };" in (tmp_path / "thin" / "cute" / "arch" / "mma_sm90_gmma.hpp").read_text()
    assert "int sparse" not in (tmp_path / "thin" / "cute" / "arch" / "mma_sm90_gmma_sparse.hpp").read_text()


def test_headers_of_another_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTLASS_PATH", str(fake_headers(tmp_path, "3.9.1")))
    with pytest.raises(build.BuildError, match=r"is CUTLASS 3\.9\.1"):
        build.headers()


def test_all_that_tuning_chose_is_compiled(kept: Path) -> None:
    # cutlass.cpp's own; without a cluster; without TMA. It is not ping-pong.
    own = cpp_choices.kernel(gemm("4096x4096x4096:bf16"), Choice(128, 256, 64, 2, 1))
    alone = replace(own, cluster_m=1)
    assert build.chosen(H200.name) == [own, alone, replace(alone, schedule="cp_async")]


# --- choices --------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What tuning kept: one case."""
    file = tmp_path / "h200.json"
    choice = Choice(128, 256, 64, 2, 1, raster="n", swizzle=8).config()
    chosen = {"cutlass.cpp": {"gemm:4096x4096x4096:bf16": {"choice": choice, "time_us": 1.0, "seconds": 2.0}}}
    file.write_text(json.dumps({"versions": {}, "choices": chosen}))
    monkeypatch.setattr(tuned, "file", lambda stack, device_name: file)
    return file


def test_a_choice_serves_its_neighbours(kept: Path) -> None:
    near, origin = cpp_choices.choose(gemm("4096x2048x4096:f16:nt"), H200.name)
    assert (near.m, near.n, near.raster, origin) == (128, 256, "n", "tuned for gemm:4096x4096x4096:bf16 in 2.0 s")
    # 64^3 is eighteen doublings away; f8 takes other instructions.
    for far in ("64x64x64:bf16", "4096x4096x4096:f8e4m3:nt"):
        assert cpp_choices.choose(gemm(far), H200.name)[1] == "rule"


@pytest.mark.parametrize("dtype", ["f16", "bf16", "tf32", "f8e4m3", "f8e4m3:acc=fast", "i8"])
@pytest.mark.parametrize("shape", ["16x8192x8192", "8192x8192x8192", "144x208x176", "g128+256x512x512"])
def test_every_choice_leaves_registers(dtype: str, shape: str) -> None:
    case = gemm(f"{shape}:{dtype}:nt")
    for choice in (cpp_choices.rule(case), *cpp_choices.space(case)):
        assert cpp_choices.fits(case, choice), choice
    # A thread of one warpgroup would hold 256 accumulators.
    assert not cpp_choices.fits(gemm("64x64x64:bf16"), Choice(128, 256, 64, schedule="pingpong"))
    # 208 of each of two.
    assert cpp_choices.fits(gemm("64x64x64:bf16:nt"), Choice(256, 208, 64))
    assert not cpp_choices.fits(gemm("g64+64x64x64:bf16:nt"), Choice(256, 208, 64))
    assert not cpp_choices.fits(gemm("64x64x64:f8e4m3:nt"), Choice(256, 208, 128))
    # Of tf32 that is not nt, A takes registers too.
    assert cpp_choices.fits(gemm("64x64x64:tf32:nt"), Choice(256, 192, 32))
    assert not cpp_choices.fits(gemm("64x64x64:tf32"), Choice(256, 192, 32, swapped=True))
    assert cpp_choices.fits(gemm("64x64x64:tf32"), Choice(128, 256, 32, swapped=True))


def test_what_is_stored_along_n_comes_in_whole_lines() -> None:
    # nn: B, stored along N, would lie in the width of 208 in 13 pieces of 32 bytes; transposed it lies in the height.
    for layout, transposed in (("nn", True), ("nt", False), ("tt", False)):
        by_width = {c.n: c.swapped for c in cpp_choices.space(gemm(f"8192x8192x8192:bf16:{layout}"))}
        assert by_width[208] is by_width[176] is by_width[160] is transposed
        assert by_width[256] is by_width[192] is by_width[128] is False
    # Neither operand has K contiguous; groups are not transposed.
    for neither in ("8192x8192x8192:bf16:tn", "g512+512x4096x4096:bf16"):
        assert {c.n for c in cpp_choices.space(gemm(neither))} == {256, 192, 128}


def test_a_neighbour_of_another_layout_takes_the_width_its_own_way(kept: Path) -> None:
    choice = Choice(256, 208, 64, 1, 2, swapped=True).config()
    few = Choice(64, 16, 128, schedule="pingpong", swapped=True).config()
    tried = {"gemm:8192x8192x8192:bf16": choice, "gemm:16x8192x8192:bf16:nt": few}
    chosen = {case: {"choice": one, "seconds": 2.0} for case, one in tried.items()}
    kept.write_text(json.dumps({"versions": {}, "choices": {"cutlass.cpp": chosen}}))
    for layout, swapped in (("nn", True), ("nt", False), ("tt", False)):
        near, _ = cpp_choices.choose(gemm(f"8192x8192x4096:bf16:{layout}"), H200.name)
        assert (near.n, near.swapped) == (208, swapped)
    assert cpp_choices.choose(gemm("8192x8192x4096:bf16:tn"), H200.name)[1] == "rule"
    assert cpp_choices.choose(gemm("8x8192x8192:bf16:nt"), H200.name)[0].swapped


def test_one_technique_is_switched_off() -> None:
    case = gemm("4096x4096x4096:bf16:nt")
    choice = Choice(64, 256, 64, 2, 1, "pingpong", raster="m", swizzle=4)
    assert cpp_choices.without("cluster", case, choice) == replace(choice, cluster_m=1)
    # Two warpgroups that share a tile have 64 rows each.
    assert cpp_choices.without("ping-pong", case, choice) == replace(choice, schedule="cooperative", m=128)
    assert cpp_choices.without("TMA", case, choice) == replace(choice, schedule="cp_async", m=128, cluster_m=1)
    alone = Choice(128, 128, 64)
    assert cpp_choices.without("cluster", case, alone) is None
    assert cpp_choices.without("ping-pong", case, alone) is None
    # By cp.async a thread has registers for 128 accumulators.
    large = Choice(256, 208, 64, 1, 2)
    assert cpp_choices.without("cluster", case, large) == replace(large, cluster_n=1)
    assert cpp_choices.without("TMA", case, large) == Choice(256, 128, 64, schedule="cp_async")


def test_variants_take_what_they_can_switch_off(kept: Path) -> None:
    case = gemm("4096x4096x4096:bf16")
    assert cpp.NoCluster().refuses(case, H200) is None
    assert "no ping-pong to switch off" in (cpp.NoPingPong().refuses(case, H200) or "")
    assert cpp.NoCluster().choose(case, H200.name)[0].cluster_m == 1


def test_refusals() -> None:
    def reason(spec: str, device: Device = H200) -> str | None:
        return cpp.Collective().refuses(gemm(spec), device)

    assert reason("512x512x512:bf16") is None
    assert "f32" in (reason("512x512x512:f32") or "")
    assert "layout nt" in (reason("512x512x512:i8") or "")
    assert reason("512x512x512:i8:nt") is None
    # 1001 bf16 are 2002 bytes, no multiple of 16.
    assert "16 bytes" in (reason("512x512x1001:bf16") or "")
    assert "sm_80" in (reason("512x512x512:bf16", replace(H200, arch="sm_80")) or "")
    for by_tma in ("g128+256x512x512:bf16", "512x512x512:f8e4m3:nt"):
        assert "TMA only" in (cpp.CpAsync().refuses(gemm(by_tma), H200) or "")
    assert cpp.CpAsync().refuses(gemm("512x512x512:f8e4m3:nt:acc=fast"), H200) is None


def test_stream_k_moves_partial_sums() -> None:
    case, choice = gemm("16x8192x8192:bf16:nt"), Choice(128, 16, 128, stream_k=True, swapped=True)
    # 64 tiles of 128 x 16 sums of 4 bytes.
    assert cpp_choices.partial_bytes(case, choice) == 64 * 128 * 16 * 4
    assert cpp_choices.partial_bytes(case, replace(choice, stream_k=False)) == 0
    # 2048 tiles, of which two waves of 132 are shared out; all of them where every one is split.
    square, large = gemm("8192x8192x8192:bf16"), Choice(128, 256, 64, stream_k=True)
    assert cpp_choices.partial_bytes(square, large) == 2 * 132 * 128 * 256 * 4
    assert cpp_choices.partial_bytes(square, replace(large, splits=2)) == 8192 * 8192 * 4


def test_the_record_tells_the_three_levels() -> None:
    facts = {"instruction": [64, 256, 16], "stages": 4, "consumer_warpgroups": 2}
    told = cpp_choices.described(gemm("512x512x512:bf16"), Choice(128, 256, 64, 2, 1), facts)
    assert told["levels"]["tile"].startswith("128x256x64, 4 stages, clusters of 2x1")
    assert told["levels"]["instruction"] == "wgmma m64n256k16 bf16"
    assert {"TMA load", "TMA multicast", "cluster", "wgmma", "mbarrier"} <= set(told["primitives"])
    plain = cpp_choices.described(gemm("512x512x512:bf16"), Choice(128, 256, 64, schedule="cp_async"), facts)
    assert "cp.async" in plain["primitives"] and "TMA load" not in plain["primitives"]


# --- the library ----------------------------------------------------------------------------------------------------


def test_the_call_is_laid_out_as_in_c() -> None:
    fields = re.search(r"struct Call \{(.*?)\};", source(KERNEL), re.DOTALL)
    assert fields is not None
    names = [
        name
        for line in fields[1].splitlines()
        if (declared := re.match(r"\s*(?:void const\*|void\*|int const\*|int) ([\w, ]+);", line))
        for name in declared[1].split(", ")
    ]
    assert names == [name for name, _ in cpp_library.Call._fields_]
    # Six pointers, eight ints.
    assert ctypes.sizeof(cpp_library.Call) == 6 * 8 + 8 * 4


@pytest.mark.slow
def test_a_real_library_knows_its_sizes() -> None:
    """Compiles for a minute unless it is in the cache; no GPU."""
    try:
        file = build.ensure(KERNEL)
    except build.BuildError as error:
        pytest.skip(f"no library: {error}")
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    runtimes = [found for part in ("lib64", "lib") for found in (home / part).glob("libcudart.so.1?")]
    if not runtimes:
        pytest.skip(f"no CUDA runtime in {home} to load the library with")
    ctypes.CDLL(str(runtimes[0]))
    library = cpp_library.opened(file)
    sizes = {"m": 512, "n": 1024, "batch": 1, "swizzle": 1, "multiprocessors": 132}
    assert library.can_implement(cpp_library.Call(k=4096, **sizes))
    # Rows of 100 bf16 are 200 bytes: TMA wants multiples of 16.
    assert not library.can_implement(cpp_library.Call(k=100, **sizes))
    assert library.workspace_bytes(cpp_library.Call(k=4096, **sizes)) == 0
    assert library.facts["instruction"] == [64, 256, 16]
    # Two consumer warpgroups and a producer's; 227 KiB are the most that a block may have.
    assert library.facts["threads"] == 3 * 128
    assert 4 * 64 * (128 + 256) * 2 <= library.facts["shared_bytes"] <= 227 * 1024
