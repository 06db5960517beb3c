"""Runs in the stack's environment (it needs llvmlite) and prints, as JSON, what the compiled kernels are and do.

``listings``: per kernel, how often each mnemonic occurs in its machine code, for its own architecture.
``rates``: per instruction that this host has and number of threads, elements of C that differ from the workload's.
``exp``: per method and bound on |x|, the worst error in ulp of f32. ``team``: how often each member ran.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections import Counter

import llvmlite.binding as llvm
import numpy as np

from impls.ceilings.kernels import clock, exp, memory, rate
from impls.ceilings.kernels.instructions import INSTRUCTIONS
from impls.ceilings.kernels.jit import Native, host_features
from impls.ceilings.kernels.programs import RateProgram
from impls.ceilings.kernels.team import Team
from impls.workloads.ceiling import Ceiling

NEON = frozenset({"neon", "dotprod", "i8mm", "bf16"})


def listing(ir: str, features: frozenset[str]) -> dict[str, int]:
    """Mnemonics and how often they occur, compiled for a CPU with these features."""
    arm = bool(features & NEON)
    triple = "aarch64-unknown-linux-gnu" if arm else "x86_64-unknown-linux-gnu"
    module = llvm.parse_assembly(ir)
    module.triple = triple
    flags = ",".join(f"+{f}" for f in sorted(features | ({"neon"} if arm else {"avx2"})))
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu="", features=flags, opt=3)
    lines = machine.emit_assembly(module).splitlines()
    return Counter(line.split()[0].removeprefix("{vex}") or line.split()[1] for line in lines if line.startswith("\t"))


def listings() -> dict[str, dict[str, int]]:
    """Every kernel's listing."""
    found = {}
    for dtype, of_dtype in INSTRUCTIONS.items():
        for i in of_dtype:
            found[f"{dtype} {i.mnemonic} {'+'.join(sorted(i.features))}"] = listing(rate.rate_ir(i), i.features)
    for name, features in (("avx512", frozenset({"avx512f", "fma"})), ("neon", frozenset({"neon"}))):
        width = memory.vector_bytes(features)
        found[f"{name} read"] = listing(memory.read_ir(width), features)
        found[f"{name} copy"] = listing(memory.copy_ir("copy", width), features)
        found[f"{name} copy nontemporal"] = listing(memory.copy_ir("copy", width, nontemporal=True), features)
        method = exp.best_exponential(features)
        assert method is not None
        found[f"{name} exp"] = listing(exp.exp_ir(method), features)
    return found


def rates() -> dict[str, int]:
    """Elements of C that are wrong, by instruction and threads."""
    found = {}
    for dtype, of_dtype in INSTRUCTIONS.items():
        for instruction in of_dtype:
            if not instruction.features <= host_features():
                continue
            for threads in range(1, min(4, len(os.sched_getaffinity(0))) + 1):
                case = Ceiling("rate", dtype, repeats=64 * 7)
                inputs = case.inputs(threads)
                program = RateProgram(case, threads, instruction)
                loaded = program.load(inputs)
                program.poison(loaded)
                output = program.read_outputs(program.run(loaded))["C"]
                program.release()
                wrong = int((output != case.expected(inputs)["C"].value).sum())
                found[f"{dtype} {instruction.mnemonic} {'+'.join(sorted(instruction.features))} x{threads}"] = wrong
    return found


def exponentials() -> dict[str, dict[str, float]]:
    """Worst error in ulp by method and bound on |x|."""
    methods = {"fma": exp.Exponential("polynomial", 8, 2), "neon": exp.Exponential("polynomial", 4, 4)}
    methods["avx512f"] = exp.Exponential("table", 16, 4)
    found: dict[str, dict[str, float]] = {}
    for feature, method in methods.items():
        if feature not in host_features():
            continue
        native = Native(exp.exp_ir(method))
        call = native.function("exponential", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        found[method.method] = {}
        for bound in (8, 32, 87):
            x = np.linspace(-bound, bound, 1 << 20).astype(np.float32)
            y = np.empty_like(x)
            call(y.ctypes.data, x.ctypes.data, x.size)
            true = np.exp(x.astype(np.float64))
            found[method.method][str(bound)] = float((np.abs(y - true) / np.spacing(true.astype(np.float32))).max())
    return found


def team() -> list[int]:
    """A counter per member after 50 calls; and after the team was stopped, how many of its threads live."""
    ir = (
        "define void @count(ptr %n) {\n %v = load i64, ptr %n\n %w = add i64 %v, 1\n store i64 %w, ptr %n\n ret void\n}"
    )
    native = Native(ir)
    rows = np.zeros((len(os.sched_getaffinity(0)), 3), np.int64)
    members = Team(len(rows))
    for _ in range(50):
        members.run(native.address("count"), rows)
    members.stop()
    return [*rows[:, 0].tolist(), *rows[:, 1:].ravel().tolist()]


def chain() -> list[int]:
    """What the clock's chain of additions, started at 0, each of 1, ends with, and what it should."""
    native = Native(clock.clock_ir(os.uname().machine))
    row = np.ones(clock.WORDS, np.int64)
    native.function("clock", ctypes.c_void_p)(row.ctypes.data)
    return [int(row[4]), clock.ADDITIONS]


if __name__ == "__main__":
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()  # for inline assembly
    parts = {"listings": listings, "rates": rates, "exp": exponentials, "team": team, "chain": chain}
    print(json.dumps({name: part() for name, part in parts.items()}))
