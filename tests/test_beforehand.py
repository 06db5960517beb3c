"""Every compiler gets the cases that its implementations take, and runs in the environment that has what it needs."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

from benchmarks import beforehand
from benchmarks.beforehand import COMPILERS, commands
from impls.workloads.base import parse_case

BF16, I8, FORWARD = "gemm:256x256x256:bf16", "gemm:256x256x256:i8:nt", "attention:b1h2s512d64:bf16"
CASES = {parse_case(case): () for case in (BF16, I8, FORWARD, "attention:b1h2s512d64:f32")}


def test_a_compiler_gets_what_its_implementation_takes() -> None:
    ran = {(command[2], *command[3:]): command[0] for command in commands(CASES, "harness", "dsl", False)}
    assert ran == {
        ("impls.cutlass.build", BF16, I8): "harness",
        ("impls.cutlass.compile_gemm", BF16): "dsl",
        ("impls.cutlass.compile_attention", FORWARD): "dsl",
        ("impls.incumbents.kernels.record", FORWARD): "dsl",
        ("impls.incumbents.kernels.record", "--chosen", BF16): "dsl",
    }


def test_candidates_are_compiled_where_they_are_asked_for() -> None:
    ran = [command[2:] for command in commands({parse_case(BF16): ()}, "harness", "dsl", True)]
    assert ["impls.cutlass.compile_gemm", "--candidates", BF16] in ran
    assert ["impls.incumbents.kernels.record", BF16] in ran


def test_nothing_is_compiled_for_what_a_case_file_leaves_out(tmp_path, monkeypatch) -> None:
    """Two files, one of which leaves all of CUTLASS out of one case: the other still wants CuTe's."""
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text(f'about = "one"\n[[case]]\nid = "{BF16}"\nwithout = ["cutlass.*", "incumbents.quack"]\n')
    other.write_text(f'about = "other"\n[[case]]\nid = "{BF16}"\nwithout = ["cutlass.cpp*", "incumbents.quack"]\n')
    ran: list[list[str]] = []
    monkeypatch.setattr(beforehand.subprocess, "run", lambda c, **_: ran.append(c[2:]) or SimpleNamespace(returncode=0))
    for files, expected in (([one], []), ([one, other], [["impls.cutlass.compile_gemm", BF16]])):
        arguments = [part for file in files for part in ("--cases", str(file))]
        monkeypatch.setattr("sys.argv", ["beforehand", "--dsl", "dsl", *arguments])
        ran.clear()
        assert beforehand.main() == 0 and ran == expected


def test_without_the_dsl_only_nvcc_compiles() -> None:
    assert [command[2] for command in commands(CASES, "harness", None, False)] == ["impls.cutlass.build"]


def test_every_compiler_is_a_module() -> None:
    for compiler in COMPILERS:
        assert importlib.util.find_spec(compiler.module) is not None
