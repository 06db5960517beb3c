"""GEMM and attention as Relax functions: operators only, no word of how they are computed."""

from __future__ import annotations

import math

import numpy as np
import tvm
from tvm import relax

from impls.workloads.attention import Attention
from impls.workloads.base import TensorSpec
from impls.workloads.gemm import Gemm

# TVM's dtypes by the workloads'.
DTYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "i8": "int8",
    "i32": "int32",
}


def parameter(name: str, spec: TensorSpec) -> relax.Var:
    """A function parameter of a workload's tensor."""
    return relax.Var(name, relax.TensorType(spec.shape, DTYPES[spec.dtype]))


def gemm(case: Gemm) -> tvm.IRModule:
    """``main``: A, B [, bias or residual] -> C."""
    names = case.input_specs()
    builder, wide = relax.BlockBuilder(), "int32" if case.dtype == "i8" else "float32"
    parameters = {name: parameter(name, spec) for name, spec in names.items()}
    with builder.function("main", list(parameters.values())):
        with builder.dataflow():
            operands = []
            for name, kept in (("A", case.layout[0] == "n"), ("B", case.layout[1] == "n")):
                operand = parameters[name]
                if not kept:
                    axes = list(range(len(names[name].shape)))
                    operand = builder.emit(relax.op.permute_dims(operand, [*axes[:-2], axes[-1], axes[-2]]))
                operands.append(operand)
            c = builder.emit(relax.op.matmul(*operands, out_dtype=wide))
            for name in ("bias", "residual"):
                if name in names:
                    addend = parameters[name]
                    if case.out != case.dtype or case.dtype not in ("f32", "i8"):
                        addend = builder.emit(relax.op.astype(addend, wide))
                    c = builder.emit(relax.op.add(c, addend))
            if case.epilogue == "bias+relu":
                c = builder.emit(relax.op.nn.relu(c))
            elif case.epilogue == "bias+gelu":
                c = builder.emit(relax.op.nn.gelu_tanh(c))
            if DTYPES[case.out] != wide:
                c = builder.emit(relax.op.astype(c, DTYPES[case.out]))
            result = builder.emit_output(c)
        builder.emit_func_output(result)
    return builder.finalize()


def attention(case: Attention) -> tvm.IRModule:
    """The functions that a case's direction needs, each of the tensors of its arguments.

    ``main`` takes the case's inputs and gives its outputs. Backward it takes what ``residuals`` (Q, K, V) gives
    besides: the weights and O, both by key head.

    The query heads that share a key head are rows of one product: ``group`` x Sq of them. Scores stay in f32; the
    weights and their gradient are rounded to the case's dtype for the products that follow.
    """
    inputs = case.input_specs()
    builder = relax.BlockBuilder()
    graph = _AttentionGraph(case, builder)
    parameters = {name: parameter(name, spec) for name, spec in inputs.items()}
    if case.direction == "bwd":
        weights = TensorSpec((case.batch, case.hkv, case.group * case.sq, case.sk), case.dtype)
        rows = TensorSpec((case.batch, case.hkv, case.group * case.sq, case.d), case.dtype)
        saved = [parameter("weights", weights), parameter("o_rows", rows)]
        qkv = [parameter(name, inputs[name]) for name in ("Q", "K", "V")]
        with builder.function("residuals", qkv):
            with builder.dataflow():
                result = builder.emit_output(relax.Tuple(graph.forward(*qkv)))
            builder.emit_func_output(result)
        with builder.function("main", [*parameters.values(), *saved]):
            with builder.dataflow():
                result = builder.emit_output(relax.Tuple(graph.backward(*parameters.values(), *saved)))
            builder.emit_func_output(result)
        return builder.finalize()
    with builder.function("main", list(parameters.values())):
        with builder.dataflow():
            weights, o_rows = graph.forward(*list(parameters.values())[:3])
            output = graph.queries_from_rows(o_rows)
            if case.direction == "fwdbwd":
                output = relax.Tuple([output, *graph.backward(*parameters.values(), weights, o_rows)])
            result = builder.emit_output(output)
        builder.emit_func_output(result)
    return builder.finalize()


class _AttentionGraph:
    """Emits a case's operators. Tensors ``by key head`` have the axes (batch, key head, row, D or Sk)."""

    def __init__(self, case: Attention, builder: relax.BlockBuilder) -> None:
        self._case = case
        self._emit = builder.emit
        self._dtype = DTYPES[case.dtype]
        self._scale = relax.const(1 / math.sqrt(case.d), "float32")

    def forward(self, q: relax.Expr, k: relax.Expr, v: relax.Expr) -> list[relax.Expr]:
        """The weights and O, by key head."""
        case, op, emit = self._case, relax.op, self._emit
        scores = self._product(self._rows(q), self._transposed(self._keys(k)))
        scores = emit(op.multiply(scores, self._scale))
        if case.mask != "full":
            scores = emit(op.add(scores, relax.const(np.tile(_mask(case), (case.group, 1)), "float32")))
        weights = self._rounded(emit(op.nn.softmax(scores, axis=-1)))
        return [weights, self._rounded(self._product(weights, self._keys(v)))]

    def backward(
        self, q: relax.Expr, k: relax.Expr, v: relax.Expr, d_o: relax.Expr, weights: relax.Expr, o_rows: relax.Expr
    ) -> list[relax.Expr]:
        """dQ, dK, dV, each in its tensor's layout (Dao et al., FlashAttention, 2022, appendix B.2)."""
        op, emit = relax.op, self._emit
        q_rows, keys, values, d_rows = self._rows(q), self._keys(k), self._keys(v), self._rows(d_o)
        d_values = self._product(self._transposed(weights), d_rows)
        per_row = emit(op.multiply(self._wide(d_rows), self._wide(o_rows)))
        d_weights = self._product(d_rows, self._transposed(values))
        d_scores = emit(op.subtract(d_weights, emit(op.sum(per_row, axis=-1, keepdims=True))))
        d_scores = emit(op.multiply(emit(op.multiply(d_scores, self._wide(weights))), self._scale))
        d_scores = self._rounded(d_scores)
        d_queries = self._product(d_scores, keys)
        d_keys = self._product(self._transposed(d_scores), q_rows)
        return [
            self.queries_from_rows(self._rounded(d_queries)),
            emit(op.permute_dims(self._rounded(d_keys), [0, 2, 1, 3])),
            emit(op.permute_dims(self._rounded(d_values), [0, 2, 1, 3])),
        ]

    def queries_from_rows(self, rows: relax.Expr) -> relax.Expr:
        """By key head -> (B, Sq, Hq, D)."""
        case, op, emit = self._case, relax.op, self._emit
        split = emit(op.reshape(rows, (case.batch, case.hkv, case.group, case.sq, case.d)))
        moved = emit(op.permute_dims(split, [0, 3, 1, 2, 4]))
        return emit(op.reshape(moved, (case.batch, case.sq, case.hq, case.d)))

    def _rows(self, queries: relax.Expr) -> relax.Expr:
        """(B, Sq, Hq, D) -> by key head."""
        case, op, emit = self._case, relax.op, self._emit
        split = emit(op.reshape(queries, (case.batch, case.sq, case.hkv, case.group, case.d)))
        moved = emit(op.permute_dims(split, [0, 2, 3, 1, 4]))
        return emit(op.reshape(moved, (case.batch, case.hkv, case.group * case.sq, case.d)))

    def _keys(self, keys: relax.Expr) -> relax.Expr:
        """(B, Sk, Hkv, D) -> by key head."""
        return self._emit(relax.op.permute_dims(keys, [0, 2, 1, 3]))

    def _product(self, x: relax.Expr, y: relax.Expr) -> relax.Expr:
        return self._emit(relax.op.matmul(x, y, out_dtype="float32"))

    def _transposed(self, x: relax.Expr) -> relax.Expr:
        return self._emit(relax.op.permute_dims(x, [0, 1, 3, 2]))

    def _wide(self, x: relax.Expr) -> relax.Expr:
        return x if self._dtype == "float32" else self._emit(relax.op.astype(x, "float32"))

    def _rounded(self, x: relax.Expr) -> relax.Expr:
        return x if self._dtype == "float32" else self._emit(relax.op.astype(x, self._dtype))


def _mask(case: Attention) -> np.ndarray:
    """What is added to the scores of one head: 0 where a key is seen, the least f32 where it is not."""
    last = np.arange(case.sq)[:, None] + case.sk - case.sq
    keys = np.arange(case.sk)[None, :]
    seen = keys <= last
    if case.mask == "window":
        seen &= keys > last - case.window
    return np.where(seen, np.float32(0), np.finfo(np.float32).min).astype(np.float32)
