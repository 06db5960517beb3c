"""Runs in the stack's environment (it needs TVM) and prints, as JSON, what TVM made of our kernels.

``machine_code``: per case and CPU, how often each mnemonic occurs in the innermost loop. ``narrow``: worst error over
tolerance of cases compiled without AVX-512. ``unpacked``: the same of few rows. ``elements``: what reading and
rounding single elements gives. ``symbolic``: errors at several M, and compilations. ``fusion``: kernels that are left
of a graph. ``control_flow``: worst errors of Relax functions with branches and recursion. ``records``: worst error over
tolerance of every record.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import relax, te
from tvm.script import ir as I
from tvm.script import relax as R

from impls import registry
from impls.contract import Device
from impls.tvm import gemm as implementations
from impls.tvm import records
from impls.tvm.kernels import compiled, elements, graphs, host, pipeline
from impls.tvm.kernels import gemm as kernels
from impls.tvm.kernels.host import Host
from impls.workloads.attention import Attention
from impls.workloads.base import parse_case
from impls.workloads.gemm import Gemm

AVX512 = frozenset({"avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni"})


def gemm(case_id: str) -> Gemm:
    case = parse_case(case_id)
    assert isinstance(case, Gemm)
    return case


def cpu(features: frozenset[str]) -> Device:
    return Device("cpu", "", "x86_64", 2, 1 << 34, features)


def machine_code() -> dict[str, dict[str, int]]:
    found = {}
    for name, arch in (("znver4", "x86_64"), ("haswell", "x86_64"), ("neoverse-n1", "aarch64")):
        target = tvm.target.Target({"kind": "llvm", "mcpu": name, "mtriple": f"{arch}-unknown-linux-gnu"})
        features = frozenset(str(f) for f in tvm.target.codegen.llvm_get_cpu_features(target))
        machine = Host(target, features, host.vector_unit(arch, features), 1 << 20, 2)
        for dtype in ("f32", "bf16", "i8"):
            module, plan = kernels.scheduled(kernels.define(gemm(f"gemm:336x384x512:{dtype}"), machine))
            text = compiled.build(module, machine).mod.inspect_source("asm")
            body = innermost(text)
            mnemonics = Counter(line.split()[0] for line in body)
            mnemonics["spills"] = sum("rsp" in line or "[sp" in line for line in body)
            mnemonics["tile"] = plan.tiling.mr * plan.tiling.nv * plan.tiling.unroll
            found[f"{name} {dtype}"] = dict(mnemonics)
    return found


def innermost(assembly: str) -> list[str]:
    """Instructions of the loop with the most multiplications: from a label to the branch back to it."""
    lines = [line.strip() for line in assembly.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\.L\w+:", line)}
    loops = []
    for at, line in enumerate(lines):
        target = re.search(r"(\.L\w+)$", line)
        if target and re.match(r"(j|b|cb|tb)", line) and labels.get(target[1], at) < at:
            body = [x for x in lines[labels[target[1]] : at] if x and not x.startswith(".") and not x.endswith(":")]
            if not any(re.match(r"(j|b\.|cb|tb)", x) for x in body):
                loops.append(body)
    return max(loops, key=lambda body: sum(bool(re.match(r"vfmadd|vdp|vpdp|vpmulld|fmla|mla", x)) for x in body))


def worst(name: str, case_id: str, device: Device) -> float:
    """Largest error over its tolerance (of exact outputs: 0 or infinity) that an implementation makes."""
    case = parse_case(case_id)
    program = registry.find(name, case.workload).prepare(case, device)
    inputs = case.inputs(3)
    loaded = program.load(inputs)
    program.poison(loaded)
    outputs = program.read_outputs(program.run(loaded))
    ratios = []
    for output, expected in case.expected(inputs).items():
        error = np.abs(expected.select(outputs[output]).astype(np.float64) - expected.value)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios.append(np.where(error == 0, 0.0, error / expected.tolerance).max())
    return float(max(ratios))


def narrow() -> dict[str, float]:
    cases = [f"gemm:61x67x71:{dtype}{rest}" for dtype in ("f32", "bf16", "i8", "f8e4m3") for rest in ("", ":tt:bias")]
    found = {case: worst("tvm.tensorir", case, cpu(frozenset({"avx2", "fma"}))) for case in cases}
    scalar = "gemm:33x31x47:f32"
    return found | {f"{scalar} without AVX2": worst("tvm.tensorir", scalar, cpu(frozenset()))}


def unpacked() -> dict[str, Any]:
    """Few rows: error over tolerance, and whether the kernel without packing was chosen, as it should be or not."""
    shapes = {
        "1x64x64:bf16:nt": False,
        "1x48x1040:f32:nt:bias+gelu": False,
        "7x30x96:f32:nt:bias+relu": False,
        "b3x4x6x64:bf16:nt:residual": False,
        "16x6x32:f32:nt": False,
        "5x9x64:bf16:out=f32:nt": False,
        # K ends within a vector; too many rows; B by rows.
        "4x8x40:f32:nt": True,
        "17x8x64:f32:nt": True,
        "4x8x64:f32": True,
    }
    attention = {
        "b2h4kv2q1k37d64:bf16": False,
        "b1h4kv1q2k37d64:f32:causal": False,
        "b1h8kv1q1k130d128:bf16:window=40": False,
        "b1h2q4k50d96:f32:window=7": False,
        # D ends within a vector of words; too many rows; f16 has no words.
        "b1h2q1k37d80:bf16": True,
        "b1h2q9k37d64:f32": True,
        "b1h2q1k37d64:f16": True,
    }
    cases = {f"gemm:{shape}": packed for shape, packed in shapes.items()}
    cases |= {f"attention:{shape}": packed for shape, packed in attention.items()}
    found = {}
    for case_id, packed in cases.items():
        case = parse_case(case_id)
        config = registry.find("tvm.tensorir", case.workload).prepare(case, cpu(AVX512)).config
        found[case_id] = [worst("tvm.tensorir", case_id, cpu(AVX512)), config.get("packed", True) == packed]
    return found


def applied(expression: Callable[[Any], Any], values: np.ndarray, out: str) -> np.ndarray:
    """``expression`` of every value, compiled."""
    x = te.placeholder(values.shape, str(values.dtype), name="x")
    y = te.compute(values.shape, lambda i: expression(x[i]), name="y")
    built = tvm.compile(te.create_prim_func([x, y]), target=host.native(1).target)
    result = tvm.runtime.tensor(np.zeros(values.shape, out))
    built["main"](tvm.runtime.tensor(values), result)
    return result.numpy()


def same(got: np.ndarray, wanted: np.ndarray) -> int:
    """How many elements differ; NaN is NaN."""
    return int((~((got == wanted) | (np.isnan(got) & np.isnan(wanted)))).sum())


def single_elements() -> dict[str, float]:
    bytes_ = np.arange(256).astype(np.uint8)
    shorts = np.arange(1 << 16).astype(np.uint16)
    rng = np.random.default_rng(5)
    anything = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint64).astype(np.uint32)
    ties = (shorts.astype(np.uint32) << 16) | 0x8000
    floats = np.concatenate([anything, ties]).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = floats.astype(ml_dtypes.bfloat16).astype(np.float32)
    got = applied(lambda v: elements.rounded(v, "bf16"), floats, "uint16")
    arguments = np.linspace(-86.9, 87.9, 1 << 18).astype(np.float32)
    powers = applied(elements.exp, arguments, "float32").astype(np.float64)
    exact = np.exp(arguments.astype(np.float64))
    z = np.concatenate([np.linspace(-12, 12, 1 << 16), [-1e4, 1e4]]).astype(np.float32)
    wide = z.astype(np.float64)
    gelu = wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    return {
        "f8e4m3 read": same(
            applied(lambda v: elements.raised(v, "f8e4m3"), bytes_, "float32"),
            bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
        ),
        "bf16 read": same(
            applied(lambda v: elements.raised(v, "bf16"), shorts, "float32"),
            shorts.view(ml_dtypes.bfloat16).astype(np.float32),
        ),
        "bf16 rounded": same(got.view(ml_dtypes.bfloat16).astype(np.float32), rounded),
        "exp, relative error": float(np.abs(powers / exact - 1).max()),
        "exp(-100)": float(applied(elements.exp, np.float32([-100.0]), "float32")[0]),
        "gelu, error over |z|": float(
            (np.abs(applied(elements.gelu, z, "float32") - gelu) / np.maximum(np.abs(wide), 1e-30)).max()
        ),
    }


def symbolic() -> dict[str, Any]:
    implementations._symbolic.cache_clear()
    errors = {}
    for m in (1, 13, 14, 15, 200, 1031):
        case = f"gemm:{m}x70x33:f32:bias+relu"
        errors[str(m)] = worst("tvm.symbolic", case, cpu(AVX512))
    info = implementations._symbolic.cache_info()
    groups = worst("tvm.symbolic", "gemm:g0+17+3+48x64x96:f32", cpu(AVX512))
    return {"errors": errors, "compiled": info.misses, "reused": info.hits, "groups": groups}


def fusion() -> dict[str, list[str]]:
    machine = host.native(2)
    attention = parse_case("attention:b1h2s32d64:bf16:causal")
    assert isinstance(attention, Attention)
    modules = {
        "bias+gelu": graphs.gemm(gemm("gemm:64x64x64:bf16:nt:bias+gelu")),
        "residual": graphs.gemm(gemm("gemm:64x64x64:f32:residual")),
        "attention": graphs.attention(attention),
    }
    return {name: pipeline.kernels(pipeline.compile_module(module, machine)[0]) for name, module in modules.items()}


@I.ir_module
class Layers:
    """A layer applied ``n`` times (a loop by recursion), and one applied or not (a branch)."""

    @R.function
    def layer(x: R.Tensor((37, 64), "float32"), w: R.Tensor((64, 64), "float32")) -> R.Tensor((37, 64), "float32"):
        with R.dataflow():
            y = R.matmul(x, w)
            z = R.nn.relu(y)
            R.output(z)
        return z

    @R.function
    def repeat(
        n: R.Tensor((), "int64"), x: R.Tensor((37, 64), "float32"), w: R.Tensor((64, 64), "float32")
    ) -> R.Tensor((37, 64), "float32"):
        more = R.greater(n, R.const(0, "int64"))
        if more:
            y: R.Tensor((37, 64), "float32") = Layers.layer(x, w)
            r: R.Tensor((37, 64), "float32") = Layers.repeat(R.subtract(n, R.const(1, "int64")), y, w)
        else:
            r: R.Tensor((37, 64), "float32") = x
        return r

    @R.function
    def choose(
        flag: R.Tensor((), "bool"), x: R.Tensor((37, 64), "float32"), w: R.Tensor((64, 64), "float32")
    ) -> R.Tensor((37, 64), "float32"):
        if flag:
            r: R.Tensor((37, 64), "float32") = Layers.layer(x, w)
        else:
            r: R.Tensor((37, 64), "float32") = R.nn.relu(x)
        return r


def control_flow() -> dict[str, Any]:
    module, executable = pipeline.compile_module(Layers, host.native(2))
    run, tensor = relax.VirtualMachine(executable, tvm.cpu()), tvm.runtime.tensor
    rng = np.random.default_rng(7)
    x = rng.standard_normal((37, 64)).astype(np.float32)
    w = (rng.standard_normal((64, 64)) / 6).astype(np.float32)
    errors, wide = {}, x.astype(np.float64)
    for n in range(6):
        got = run["repeat"](tensor(np.array(n)), tensor(x), tensor(w)).numpy()
        errors[f"{n} times"] = float(np.abs(got - wide).max())
        if n == 5:
            errors["size"] = float(np.abs(got).max())
        wide = np.maximum(wide @ w.astype(np.float64), 0)
    for flag, wanted in ((True, np.maximum(x.astype(np.float64) @ w, 0)), (False, np.maximum(x, 0))):
        got = run["choose"](tensor(np.array(flag)), tensor(x), tensor(w)).numpy()
        errors[f"if {flag}"] = float(np.abs(got - wanted).max())
    return {"errors": errors, "kernels": pipeline.kernels(module)}


def replayed() -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    family = host.family()
    for case_id in records.load(family):
        found[case_id] = worst("tvm.metaschedule", case_id, cpu(AVX512))
    return found


if __name__ == "__main__":
    report = {
        "machine_code": machine_code(),
        "narrow": narrow(),
        "unpacked": unpacked(),
        "elements": single_elements(),
        "symbolic": symbolic(),
        "fusion": fusion(),
        "control_flow": control_flow(),
        "records": replayed(),
    }
    print(json.dumps(report))
