"""What listings of known content say: the kernels are written in inline PTX, so that every count is known."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from impls.support import machine_code

LISTINGS = Path(__file__).parent / "listings"

#: Per kernel of sm_90a.cu, what its inline PTX makes certain; other families depend on the compiler.
WRITTEN = {
    "product": {"wgmma": 1, "global_store": 32},
    "tma": {
        "tma_load": 1,
        "tma_multicast": 1,
        "tma_store": 1,
        "tma_reduce": 1,
        "cluster": 2,
        "grid_dependency": 1,
        "shared_load": 1,
    },
    "roles": {"setmaxnreg": 2, "ex2": 1, "ffma": 1},
    "older": {"cp_async": 1, "mma": 1, "ldmatrix": 1, "barrier": 1, "global_store": 2},
    "indexed": {"local_store": 8, "local_load": 1},
}
#: Families that no kernel may be said to hold unless WRITTEN says so.
TELLING = {"wgmma", "mma", "tma_load", "tma_store", "tma_reduce", "cp_async", "mbarrier", "setmaxnreg", "cluster"} | {
    "local_load",
    "local_store",
    "ex2",
    "tcgen05",
}


def check(kernels: dict[str, dict]) -> None:
    assert set(kernels) == set(WRITTEN)
    for name, families in WRITTEN.items():
        found = kernels[name]["instructions"]
        assert {f: found.get(f, 0) for f in families} == families, name
        extra = (set(found) & TELLING) - set(families)
        assert extra == ({"mbarrier"} if name == "tma" else set()), name
    assert kernels["product"]["opcodes"] == {"HGMMA.64x64x16.F32.BF16": 1}
    assert kernels["older"]["opcodes"] == {"HMMA.16816.F32.BF16": 1}
    assert kernels["older"]["widths"] == {"global_store.128": 1, "global_store.32": 1}
    # An array of 8 floats in local memory; 128 float4 and 8 bytes of barrier in shared memory, and 1 KiB reserved.
    assert kernels["indexed"]["stack_bytes"] == 32
    assert all(kernels[name]["stack_bytes"] == 0 for name in set(WRITTEN) - {"indexed"})
    assert kernels["older"]["static_shared_bytes"] == 1024 + 128 * 16
    assert kernels["product"]["registers"] >= 32  # its accumulators


def test_sass_of_every_technique() -> None:
    kernels = machine_code.of_sass((LISTINGS / "sm_90a.sass").read_text())
    check(kernels)
    # 168 = 65536 registers / 384 threads, rounded down to a multiple of 8: where setmaxnreg starts from.
    assert kernels["roles"]["registers"] == 168


def test_encodings_do_not_matter() -> None:
    listing = (
        "\t\tFunction : k\n"
        "        /*0000*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;  "
        "/* 0x00e0000004187df0 */\n"
        "                                                                        /* 0x000fe20000041818 */\n"
        "        /*0010*/              @!PT LDS RZ, [RZ] ;\n"
        "        /*0020*/             @!UP0 UTMALDG.3D [UR8], [UR4], desc[UR6] ;\n"
        "        /*0030*/               @P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;\n"
        "        /*0040*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;\n"
        "        /*0050*/                   HFMA2.MMA R5, -RZ, RZ, 1.9375, 0 ;\n"
    )
    kernel = machine_code.of_sass(listing)["k"]
    assert kernel["instructions"] == {"wgmma": 1, "tma_load": 1, "global_load": 2}
    assert kernel["opcodes"] == {"HGMMA.64x256x16.F32.BF16": 1, "UTMALDG.3D": 1}
    assert kernel["widths"] == {"global_load.128": 1, "global_load.16": 1}


def test_long_names_are_cut_and_stay_apart() -> None:
    names = ["_Z" + "a" * 400 + end for end in ("x", "y")]
    kernels = machine_code.of_sass("".join(f"\t\tFunction : {name}\n" for name in names))
    assert len(kernels) == 2
    assert all(len(name) <= 120 for name in kernels)


def test_ptx() -> None:
    text = (LISTINGS / "sm_90a.ptx").read_text()
    facts = machine_code.of_ptx(text + "\n// wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 in a comment\n")
    assert facts["target"] == "sm_90a"
    assert facts["shapes"] == {
        "wgmma.mma_async": {"m64n64k16.f32.bf16.bf16": 1},
        "mma.sync": {"m16n8k16.row.col.f32.bf16.bf16.f32": 1},
        "setmaxnreg": {"dec 40": 1, "inc 232": 1},
        "griddepcontrol": {"wait": 1},
    }
    assert facts["counts"] == {
        "cp.async.bulk.tensor load": 1,
        "cp.async.bulk.tensor multicast": 1,
        "cp.async.bulk.tensor store": 1,
        "cp.reduce.async.bulk.tensor": 1,
        "cp.async": 1,
        "mbarrier": 3,
        "barrier.cluster": 2,
        "ldmatrix": 1,
        "ex2.approx": 1,
    }


def test_amdgcn() -> None:
    facts = machine_code.of_amdgcn((LISTINGS / "gfx942.amdgcn").read_text())
    # Four wavefronts share a 64x64x64 product in instructions of 32x32x8: each has one tile and 8 steps.
    assert facts["opcodes"] == {"v_mfma_f32_32x32x8_bf16": 64 // 8}
    # 64 x 64 results over 256 threads, one exponential each.
    assert facts["instructions"]["exp"] == 16
    assert facts["instructions"]["global_load"] == 2 * 64 * 64 // 256
    assert facts["kernels"] == {
        "product": {
            "vgprs": 116,
            "sgprs": 14,
            "lds_bytes": 0,
            "scratch_bytes": 0,
            "vgpr_spills": 0,
            "sgpr_spills": 0,
        }
    }


def test_without_tools_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "_places", lambda: ())
    code = machine_code.inspect(b"", ptx=".target sm_90a\n")
    assert "cuobjdump" in code.facts["unread"]
    assert "kernels" not in code.facts
    assert code.facts["ptx"]["target"] == "sm_90a"
    assert code.artefacts("k") == {"k.ptx": ".target sm_90a\n"}


def _tools() -> str | None:
    """Why the disassembler cannot be used here."""
    try:
        for name in ("cuobjdump", "nvdisasm"):
            machine_code._tool(name)
    except machine_code.ToolTrouble as trouble:
        return str(trouble)
    return None


def test_what_is_no_cubin_is_said() -> None:
    if reason := _tools():
        pytest.skip(reason)
    assert "does not disassemble" in machine_code.inspect(b"no code").facts["unread"]


def test_a_fresh_cubin(tmp_path: Path) -> None:
    if reason := _tools():
        pytest.skip(reason)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("There is no nvcc here.")
    cubin = tmp_path / "k.cubin"
    subprocess.run(
        [nvcc, "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-o", cubin, LISTINGS / "sm_90a.cu"], check=True
    )
    code = machine_code.inspect(cubin.read_bytes(), dynamic_shared_bytes=4096)
    assert "unread" not in code.facts
    check(code.facts["kernels"])
    assert code.facts["kernels"]["tma"]["dynamic_shared_bytes"] == 4096
    assert set(code.artefacts("k")) == {"k.sass"}
    assert machine_code.of_sass(code.artefacts("k")["k.sass"]).keys() == code.facts["kernels"].keys()  # type: ignore[arg-type]
