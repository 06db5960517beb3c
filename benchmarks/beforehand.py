"""Compiles, on a machine without a GPU, what stacks compile before they see one: kernels for an H200's sm_90a.

``python -m benchmarks.beforehand --dsl PYTHON [--cases flagship] [CASE ...]`` (or ``nox -s build``) gives every
compiler the cases that its implementations take. What they make lies in ``<cache>/<stack>``, named for its sources;
what is there already is not made again, and ``benchmarks.bundle`` carries it to the node.

Owns which compiler serves which implementation, and what it runs in: CUTLASS' C++ the harness's environment with nvcc,
all that is written in CUTLASS' CuTe DSL the environment that has the DSL. Compilers belong to their stacks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from benchmarks.engine import cases as case_files
from benchmarks.engine.session import ROOT
from impls import registry
from impls.support.h200 import H200
from impls.workloads.base import Case, parse_case


@dataclass(frozen=True)
class Compiler:
    """A module that is run with cases.

    Attributes:
        module: the module.
        serves: the implementation, and its workload, whose cases it takes.
        dsl: it needs the CuTe DSL.
        few, all: arguments for what the cases run with, and for all that tuning would try.
    """

    module: str
    serves: tuple[str, str]
    dsl: bool = True
    few: tuple[str, ...] = ()
    all: tuple[str, ...] = ()


COMPILERS = (
    Compiler("impls.cutlass.build", ("cutlass.cpp", "gemm"), dsl=False),
    Compiler("impls.cutlass.compile_gemm", ("cutlass.cute", "gemm"), all=("--candidates",)),
    Compiler("impls.cutlass.compile_attention", ("cutlass.cute", "attention")),
    Compiler("impls.incumbents.kernels.record", ("incumbents.fa4", "attention")),
    Compiler("impls.incumbents.kernels.record", ("incumbents.quack", "gemm"), few=("--chosen",)),
)


def commands(wanted: Mapping[Case, Collection[str]], python: str, dsl: str | None, candidates: bool) -> list[list[str]]:
    """What to run.

    Args:
        wanted: the cases, and the names of the implementations that each leaves out.
        python: interpreter of the harness.
        dsl: interpreter that has the CuTe DSL; None leaves its compilers out.
        candidates: compile all that tuning would try, where a compiler can.
    """
    found = []
    for compiler in COMPILERS:
        implementation = registry.find(*compiler.serves)
        taken = [
            case.id
            for case, without in wanted.items()
            if implementation.name not in without and registry.refusal(implementation, case, H200) is None
        ]
        interpreter = dsl if compiler.dsl else python
        if taken and interpreter is not None:
            options = compiler.all if candidates else compiler.few
            found.append([interpreter, "-m", compiler.module, *options, *taken])
    return found


def main() -> int:
    """Run every compiler; the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dsl", metavar="PYTHON", help="an interpreter with the CuTe DSL, FlashAttention-4 and QuACK")
    parser.add_argument("--cases", action="append", default=[], help="case file (default flagship); may be repeated")
    parser.add_argument("--candidates", action="store_true", help="all that tuning would try, where it takes seconds")
    parser.add_argument("case", nargs="*", help="cases in place of a file's")
    arguments = parser.parse_intermixed_args()
    files = arguments.cases or ([] if arguments.case else ["flagship"])
    wanted: dict[Case, Collection[str]] = {}
    for entry in (entry for file in files for entry in case_files.load(file)):
        names = {i.name for i in registry.select(entry.without)} if entry.without else set()
        wanted[entry.case] = names.intersection(wanted.get(entry.case, names))
    wanted |= {parse_case(case): () for case in arguments.case}
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    failed = 0
    for command in commands(wanted, sys.executable, arguments.dsl, arguments.candidates):
        print(f"{command[2]}:", flush=True)
        failed += subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
