"""What is read of a kernel while it is compiled, with a stand-in for the compiler."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from impls.pallas.kernels import mosaic_code
from impls.support import machine_code

LISTING = (Path(__file__).parents[1] / "support" / "listings" / "sm_90a.sass").read_text()
PTX = ".version 9.0\n.target sm_90a\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1};\n"
REPORT = "ptxas info : Used 168 registers\n 8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"


def compile_as_mosaic_does(folder: Path, cubin: bytes) -> None:
    """Files in the folder that was asked for; the cubin in one of its own, for the toolkit's nvdisasm."""
    toolkit, to = Path(os.environ["MOSAIC_GPU_CUDA_ROOT"]), Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    assert (toolkit / "bin" / "ptxas").read_text() == "the real one"
    assert (toolkit / "nvvm" / "libdevice").read_text() == "a library"
    (to / "kernel.ptx").write_text(PTX)
    (to / "kernel.ptxas").write_text(REPORT)
    own = folder / "mosaic-gpu-x1y2"
    own.mkdir()
    (own / "kernel.bin").write_bytes(cubin)
    done = subprocess.run([toolkit / "bin" / "nvdisasm", "-ndf", "-c", own / "kernel.bin", "-hex"], check=False)
    assert done.returncode == 0
    assert not own.exists()


def test_the_cubin_that_is_loaded_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toolkit = tmp_path / "cuda"
    for name, text in (("bin/ptxas", "the real one"), ("bin/nvdisasm", "not called"), ("nvvm/libdevice", "a library")):
        (toolkit / name).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / name).write_text(text)
    seen: list[bytes] = []

    def disassemble(image: bytes) -> str:
        seen.append(image)
        return LISTING

    monkeypatch.setenv("MOSAIC_GPU_CUDA_ROOT", str(toolkit))
    monkeypatch.setattr(machine_code, "disassemble", disassemble)
    with mosaic_code.dumped() as code:
        compile_as_mosaic_does(tmp_path, b"\x7fELF and so on\n")
    assert seen == [b"\x7fELF and so on\n"]
    assert code.facts["kernels"] == machine_code.of_sass(LISTING)
    assert code.facts["ptx"]["shapes"]["wgmma.mma_async"] == {"m64n128k16.f32.bf16.bf16": 1}
    assert code.facts["spill_bytes"] == 16
    assert code.artefacts == {"mosaic.sass": LISTING, "mosaic.ptx": PTX}
    assert os.environ["MOSAIC_GPU_CUDA_ROOT"] == str(toolkit)
    assert "MOSAIC_GPU_DUMP_TO" not in os.environ


def test_no_cubin_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MOSAIC_GPU_CUDA_ROOT", raising=False)
    with mosaic_code.dumped() as code:
        (Path(os.environ["MOSAIC_GPU_DUMP_TO"]) / "kernel.ptx").write_text(PTX)
    assert code.facts["unread"] == "The compiler handed on no cubin."
    assert code.facts["ptx"]["target"] == "sm_90a"
    assert "MOSAIC_GPU_CUDA_ROOT" not in os.environ
