"""GEMM: C = epilogue(A @ B), batched or grouped.

Owns a GEMM's shape, dtypes, layout and epilogue, and all that follows: FLOPs, bytes, inputs, reference, tolerance. How
sums may err is in ``rounding``.

What passes: products and sums in the accumulation type in any order, the bias or residual added in it or after, one
rounding to the output type; where there is an epilogue, also a rounding to the output type before and after each of its
steps, as unfused stacks do. What does not: inputs or partial sums rounded further (bf16 or tf32 for f32; partial sums
of a split K kept in the output type), algorithms of fewer multiplications (Strassen).

What cannot be seen: three tf32 products in place of an f32 one, and three bf16 ones from about K = 4000 (they come
within f32's tolerance); fast in place of promoted f8 sums below about K = 4000; the erf form of GELU where the
output has 16 bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from impls.workloads.base import Case, CaseError, Expected, TensorSpec
from impls.workloads.draws import integers, normals
from impls.workloads.dtypes import dtype, widened
from impls.workloads.parallel import each
from impls.workloads.rounding import ACCUMULATORS, UNDERFLOW, log_odds
from impls.workloads.sampling import pieces, tile_sample

LAYOUTS = ("nn", "nt", "tn", "tt")
EPILOGUES = ("none", "bias", "bias+relu", "bias+gelu", "residual")
# Accumulation and output types by input dtype, the default first.
ACCUMULATIONS = {
    "f32": ("f32",),
    "tf32": ("f32",),
    "f16": ("f32", "f16"),
    "bf16": ("f32",),
    "f8e4m3": ("f32", "fast"),
    "i8": ("i32",),
}
OUTPUTS = {
    "f32": ("f32",),
    "tf32": ("f32",),
    "f16": ("f16", "f32"),
    "bf16": ("bf16", "f32"),
    "f8e4m3": ("bf16", "f16", "f32"),
    "i8": ("i32",),
}
MOST_SIZE = 2**31 - 1
MOST_ELEMENTS = 2**40

# Largest |derivative| of the tanh form of GELU, reached at z = +-1.4142 (computed; tested).
GELU_LIPSCHITZ = 1.1291
# Random vectors of a Freivalds check: a wrong row is missed by one with probability 1/2 at most (Freivalds 1977).
_VECTORS = 4
# Converting, holding or comparing one element takes about as long as this many operations of a DGEMM (20 ns, 2 cores).
_OPERATIONS_PER_ELEMENT = 1024
# Elements converted to float64 at a time: 4 MiB, which the allocator hands out again without new pages.
_CHUNK = 1 << 19
# The same where each is used once only: half a MiB of f32, which stays in a core's cache.
_IN_CACHE = 1 << 17
# Shares of B that are summed up apart.
_SHARES = 64
# Bias and residual of i8 are whole numbers up to this.
_I8_ADDEND = 1 << 16


@dataclass(frozen=True)
class Gemm(Case):
    """``C[i, j] = epilogue(sum over k of A[i, k] B[k, j])``.

    Attributes:
        m, n, k: rows of C, columns of C, summed length. With groups m is the sum of the group sizes.
        dtype: of A and B.
        batch: number of independent products of this shape; 1 has no leading axis.
        groups: rows of each group (a group may be empty), which share A's and C's rows and have a B each; None without.
        acc: accumulation: ``f32``, ``f16``, ``i32``, or ``fast`` (f8e4m3 without promotion). Empty for the default.
        out: dtype of C, bias and residual. Empty for the default.
        layout: ``nn``, ``nt``, ``tn`` or ``tt``: how A and B are stored, row-major.
        epilogue: ``none``, ``bias``, ``bias+relu``, ``bias+gelu`` (tanh form) or ``residual``.
    """

    workload: ClassVar[str] = "gemm"

    m: int
    n: int
    k: int
    dtype: str
    batch: int = 1
    groups: tuple[int, ...] | None = None
    acc: str = ""
    out: str = ""
    layout: str = "nn"
    epilogue: str = "none"

    def __post_init__(self) -> None:
        if self.dtype not in ACCUMULATIONS:
            raise CaseError(f"gemm has no dtype {self.dtype!r}; write one of {', '.join(ACCUMULATIONS)}")
        if not self.acc:
            object.__setattr__(self, "acc", ACCUMULATIONS[self.dtype][0])
        if not self.out:
            object.__setattr__(self, "out", OUTPUTS[self.dtype][0])
        for name, value, known in (
            ("acc=", self.acc, ACCUMULATIONS[self.dtype]),
            ("out=", self.out, OUTPUTS[self.dtype]),
            ("layout ", self.layout, LAYOUTS),
            ("epilogue ", self.epilogue, EPILOGUES),
        ):
            if value not in known:
                raise CaseError(
                    f"{name}{value} does not go with a gemm of {self.dtype}; write one of {', '.join(known)}"
                )
        if self.acc == "f16" and self.out != "f16":
            raise CaseError(f"acc=f16 has no bits for out={self.out}; write out=f16 or leave it out")
        if self.dtype == "i8" and self.epilogue == "bias+gelu":
            raise CaseError("GELU of whole numbers is not defined here; write bias or bias+relu for i8")
        if self.groups is not None:
            if not self.groups or min(self.groups) < 0 or sum(self.groups) != self.m:
                raise CaseError(f"groups {self.groups} do not add up to {self.m} rows; write g128+256x512x512")
            if self.batch != 1 or self.epilogue != "none" or self.layout[0] == "t":
                raise CaseError("a grouped gemm takes no batch, no epilogue, and A as rows; write layout nn or nt")
        for name, size in (("M", self.m), ("N", self.n), ("K", self.k), ("batch", self.batch)):
            if not 0 < size <= MOST_SIZE:
                raise CaseError(f"{name} is {size}; write a size from 1 to {MOST_SIZE}")
        if self.dtype == "i8" and self.k > 2**30:
            raise CaseError(f"i32 cannot hold sums of K={self.k} products; write at most {2**30} for i8")
        for name, spec in (*self.input_specs().items(), *self.output_specs().items()):
            if math.prod(spec.shape) > MOST_ELEMENTS:
                raise CaseError(f"{name} {list(spec.shape)} has more than 2^40 elements; write a smaller shape")

    @property
    def id(self) -> str:
        """``gemm:[b<batch>x]<M>x<N>x<K>:<dtype>[:acc=][:out=][:<layout>][:<epilogue>]``."""
        rows = str(self.m) if self.groups is None else "g" + "+".join(map(str, self.groups))
        batch = f"b{self.batch}x" if self.batch != 1 else ""
        tokens = ["gemm", f"{batch}{rows}x{self.n}x{self.k}", self.dtype]
        if self.acc != ACCUMULATIONS[self.dtype][0]:
            tokens.append(f"acc={self.acc}")
        if self.out != OUTPUTS[self.dtype][0]:
            tokens.append(f"out={self.out}")
        if self.layout != "nn":
            tokens.append(self.layout)
        if self.epilogue != "none":
            tokens.append(self.epilogue)
        return ":".join(tokens)

    @classmethod
    def parse(cls, spec: str) -> Gemm:
        """The GEMM named by ``spec``, such as ``512x512x512:f32`` or ``b8x64x64x64:bf16:nt:bias+gelu``.

        Options may come in any order. Raises CaseError with what to write.
        """
        shape, *tokens = spec.split(":")
        found = re.fullmatch(r"(?:b(\d+)x)?(?:(\d+)|g(\d+(?:\+\d+)*))x(\d+)x(\d+)", shape, re.ASCII)
        if not found:
            raise CaseError(
                f"cannot read the shape {shape!r} of gemm:{spec}; write <M>x<N>x<K>, such as 512x512x512, "
                "b8x512x512x512 (batch) or g128+256x512x512 (groups), each size from 1"
            )
        if not tokens:
            raise CaseError(f"gemm:{spec} has no dtype; write gemm:{shape}:f32, or one of {', '.join(ACCUMULATIONS)}")
        batch, m, groups, n, k = found.groups()
        sizes = None if groups is None else tuple(_size(g, "a group") for g in groups.split("+"))
        options = _options(tokens[1:], spec)
        return cls(
            m=_size(m, "M") if sizes is None else sum(sizes),
            n=_size(n, "N"),
            k=_size(k, "K"),
            dtype=tokens[0],
            batch=_size(batch, "batch") if batch else 1,
            groups=sizes,
            acc=options.get("acc", ""),
            out=options.get("out", ""),
            layout=options.get("layout", "nn"),
            epilogue=options.get("epilogue", "none"),
        )

    def flops(self) -> int:
        """2 M N K per product. The epilogue's operations are not counted."""
        return 2 * self.batch * self.m * self.n * self.k

    def compulsory_bytes(self) -> int:
        """Each input read once and C written once; an empty group's B is not read."""
        unread = 0
        if self.groups is not None:
            unread = self.groups.count(0) * self.k * self.n * dtype(self.dtype).bytes
        return self.total_bytes() - unread

    @property
    def compute_dtype(self) -> str:
        """The dtype of A and B."""
        return self.dtype

    def input_specs(self) -> dict[str, TensorSpec]:
        """``A``, ``B`` [, ``bias``] [, ``residual``] [, ``group_sizes``]."""
        lead = (self.batch,) if self.batch != 1 else ()
        a = (self.m, self.k) if self.layout[0] == "n" else (self.k, self.m)
        b = (self.k, self.n) if self.layout[1] == "n" else (self.n, self.k)
        lead_b = lead if self.groups is None else (len(self.groups),)
        specs = {"A": TensorSpec((*lead, *a), self.dtype), "B": TensorSpec((*lead_b, *b), self.dtype)}
        if self.epilogue.startswith("bias"):
            specs["bias"] = TensorSpec((self.n,), self.out)
        if self.epilogue == "residual":
            specs["residual"] = TensorSpec((*lead, self.m, self.n), self.out)
        if self.groups is not None:
            specs["group_sizes"] = TensorSpec((len(self.groups),), "i32")
        return specs

    def output_specs(self) -> dict[str, TensorSpec]:
        """``C``."""
        lead = (self.batch,) if self.batch != 1 else ()
        return {"C": TensorSpec((*lead, self.m, self.n), self.out)}

    def inputs(self, seed: int) -> dict[str, np.ndarray]:
        """A from N(0, 1); B from N(0, 1/K), as a layer's weight, so that C, bias and residual are near N(0, 1).

        The scale of B is the nearest power of two, which leaves its significands alone. f8e4m3 has no exponents to
        spare: there B is N(0, 1), and bias and residual are N(0, K). i8: uniform whole numbers, in [-127, 127] up to
        K = 133140 and small enough beyond that no sum can leave i32; bias and residual up to 2^16.
        """
        shrink = 2.0 ** -round(math.log2(self.k) / 2)
        scales = {"A": 1.0, "B": shrink, "bias": 1.0, "residual": 1.0}
        if self.dtype == "f8e4m3":
            scales = {"A": 1.0, "B": 1.0, "bias": 1 / shrink, "residual": 1 / shrink}
        operand = min(127, math.isqrt((2**31 - 1 - _I8_ADDEND) // self.k))
        drawn = {}
        for name, spec in self.input_specs().items():
            if name == "group_sizes":
                drawn[name] = np.array(self.groups, np.int32)
            elif dtype(spec.dtype).integer:
                bound = operand if name in ("A", "B") else _I8_ADDEND
                drawn[name] = integers(seed, name, spec.shape, spec.dtype, bound)
            else:
                drawn[name] = normals(seed, name, spec.shape, spec.dtype, scales[name])
        return drawn

    def reference_flops(self) -> int:
        """Two products (values, and squares for the tolerance), and the handling of every tensor's elements."""
        specs = (*self.input_specs().values(), *self.output_specs().values())
        return 2 * self.flops() + _OPERATIONS_PER_ELEMENT * sum(math.prod(s.shape) for s in specs)

    def expected(self, inputs: Mapping[str, np.ndarray], *, sample: int | None = None) -> dict[str, Expected]:
        """Reference and tolerance; see the module and ``rounding``. i8 is exact.

        With u the output's unit roundoff and e the bound on the accumulation: e + u |C| without an epilogue, and one
        u |x| more for every value x between the product and C; an activation passes errors on times its Lipschitz
        constant, and evaluating GELU in f32 errs by 16 u_f32 |z| at most.
        """
        rows, columns = np.arange(self.m), np.arange(self.n)
        if sample is not None:
            generator = np.random.default_rng(sample)
            starts = [] if self.groups is None else np.cumsum(self.groups).tolist()
            rows = tile_sample(self.m, generator, starts)
            columns = tile_sample(self.n, generator)
        value = np.empty((self.batch, rows.size, columns.size))
        exact = dtype(self.dtype).integer
        tolerance = np.zeros((1, 1, 1)) if exact else np.empty_like(value)
        odds = log_odds(self.batch * self.m * self.n)
        step = max(1, _CHUNK // self.k)

        def fill(task: tuple[tuple[int, int, int, np.ndarray, np.ndarray], slice]) -> None:
            (batch, first, last, a, b), across = task
            b_chosen = b[:, columns[across]]
            b_wide, b_squares = widened(b_chosen, np.float64), np.square(widened(b_chosen, np.float32))
            begin, end = np.searchsorted(rows, [first, last]).tolist()
            for down in pieces(begin, end, step):
                a_chosen = a[rows[down]]
                product = widened(a_chosen, np.float64) @ b_wide
                addend = self._addend(inputs, batch, rows[down], columns[across])
                at = (batch, down, across)
                if exact:
                    value[at] = self._activation(product + addend)
                    continue
                squares = np.square(widened(a_chosen, np.float32)) @ b_squares
                bound = ACCUMULATORS[self.dtype, self.acc].bound(product, squares, self.k, odds, addend)
                value[at], tolerance[at] = self._finished(product, addend, bound)

        tasks = [(one, across) for one in self._products(inputs) for across in pieces(0, columns.size, step)]
        for _ in each(fill, tasks):
            pass
        if self.batch == 1:
            value, tolerance = value[0], tolerance[0]
        if sample is None:
            return {"C": Expected(None, value, tolerance)}
        mesh = (rows, columns) if self.batch == 1 else (np.arange(self.batch), rows, columns)
        return {"C": Expected(mesh, value, tolerance)}

    def _finished(self, product: np.ndarray, addend: np.ndarray, bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Value and tolerance after the epilogue."""
        u = dtype(self.out).unit_roundoff
        value, error = product, bound + u * (np.abs(product) + bound)
        if self.epilogue != "none":
            value = product + addend
            error += u * (np.abs(value) + error)
        if self.epilogue in ("bias+relu", "bias+gelu"):
            before, value = value, self._activation(value)
            if self.epilogue == "bias+gelu":
                error = GELU_LIPSCHITZ * error + 16 * dtype("f32").unit_roundoff * np.abs(before)
            error += u * (np.abs(value) + error)
        error += UNDERFLOW[self.out]
        return value, error

    def _activation(self, z: np.ndarray) -> np.ndarray:
        if self.epilogue == "bias+relu":
            return np.asarray(np.maximum(z, 0.0))
        if self.epilogue == "bias+gelu":
            return gelu(z)
        return z

    def _addend(
        self, inputs: Mapping[str, np.ndarray], batch: int, rows: np.ndarray, columns: np.ndarray
    ) -> np.ndarray:
        """What is added to the product, in float64, broadcastable to (rows, columns)."""
        if self.epilogue == "none":
            return np.zeros((1, 1))
        if self.epilogue == "residual":
            residual = inputs["residual"] if self.batch == 1 else inputs["residual"][batch]
            return np.asarray(residual[np.ix_(rows, columns)], np.float64)
        return np.asarray(inputs["bias"][None, columns], np.float64)

    def _products(self, inputs: Mapping[str, np.ndarray]) -> Iterator[tuple[int, int, int, np.ndarray, np.ndarray]]:
        """Of each product: batch index, its first and last + 1 row, all of A as (M, K), its B as (K, N); views."""
        a, b = inputs["A"], inputs["B"]
        if self.layout[0] == "t":
            a = np.swapaxes(a, -1, -2)
        if self.layout[1] == "t":
            b = np.swapaxes(b, -1, -2)
        if self.groups is None:
            for batch in range(self.batch):
                yield batch, 0, self.m, a[batch] if a.ndim == 3 else a, b[batch] if b.ndim == 3 else b
            return
        first = 0
        for group, size in enumerate(self.groups):
            yield 0, first, first + size, a, b[group]
            first += size

    def invariants(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], seed: int) -> str | None:
        """Freivalds: C x = A (B x) + addend x for random signs x, over the whole output.

        Sees errors that the sampled elements miss, a wrong tile above all. The threshold per row is that of a sum of N
        independent errors, sqrt(2 L) sqrt(sum of squared bounds) (Hoeffding), each bound the accumulation's for a
        typical element of the row plus u |C| per rounding. It does not see through ReLU or GELU (nothing is checked
        there), nor a single wrong element where the output is rounded to 16 bits: the row's roundings are larger. i8 is
        compared exactly.
        """
        return self.checker(inputs, seed)(outputs)

    def checker(self, inputs: Mapping[str, np.ndarray], seed: int) -> Callable[[Mapping[str, np.ndarray]], str | None]:
        """As ``invariants``; A (B x), the addend's part and the thresholds are computed here, once."""
        if self.epilogue in ("bias+relu", "bias+gelu"):
            return lambda outputs: None
        generator = np.random.default_rng([seed, 0xF7])
        # In columns: BLAS then need not rearrange them for every few rows.
        signs = np.asfortranarray(generator.integers(0, 2, (self.n, _VECTORS)).astype(self._wide) * 2 - 1)
        held = [self._sums(inputs, product, signs) for product in self._products(inputs)]
        return lambda outputs: next(filter(None, (self._wrong(one, signs, outputs["C"]) for one in held)), None)

    @property
    def _wide(self) -> type[np.generic]:
        """What sums over N are made in: f32 errs by 1e-6 of a row's, far less than rounding C to 16 bits does.

        Of whole numbers float64 holds sums up to 2^53; half of that leaves room for the addend.
        """
        if dtype(self.dtype).integer:
            return np.float64 if self.n * max(2**31, 2**14 * self.k) <= 2**52 else np.int64
        return np.float32 if dtype(self.out).bits == 16 else np.float64

    def _sums(
        self,
        inputs: Mapping[str, np.ndarray],
        product: tuple[int, int, int, np.ndarray, np.ndarray],
        signs: np.ndarray,
    ) -> _Sums:
        """What C x must be in the rows of one product, and by how much it may differ."""
        batch, first, last, a, b = product
        exact = dtype(self.dtype).integer
        b_signs, b_squares = _fold(b, signs)
        sought = np.empty((last - first, _VECTORS), b_signs.dtype)
        allowed = np.zeros((last - first, 1))
        odds = log_odds(self.batch * self.m * _VECTORS)
        u = dtype(self.out).unit_roundoff * (1 if self.epilogue == "none" else 2)
        every_column = np.arange(self.n)
        factor = np.asfortranarray(b_signs.astype(self._wide))

        def fill(rows: slice) -> None:
            into = slice(rows.start - first, rows.stop - first)
            a_wide = widened(a[rows], self._wide)
            addend = self._addend(inputs, batch, np.arange(rows.start, rows.stop), every_column)
            sought[into] = a_wide @ factor
            if self.epilogue != "none":
                sought[into] += addend.astype(sought.dtype) @ signs
            if exact:
                return
            squares = np.einsum("ij,ij->i", a_wide, a_wide) * (b_squares / (self.k * self.n))
            bound = ACCUMULATORS[self.dtype, self.acc].bound(
                np.sqrt(squares), squares, self.k, odds, np.abs(addend).max()
            )
            size = self.n * squares + (addend**2).sum(axis=1) * (self.n / addend.shape[1])
            variance = self.n * (bound + UNDERFLOW[self.out]) ** 2 + u**2 * size
            allowed[into, 0] = np.sqrt(2 * odds * variance)

        for _ in each(fill, list(pieces(first, last, max(1, _IN_CACHE // max(self.k, self.n))))):
            pass
        return _Sums(batch, first, last, sought, allowed)

    def _wrong(self, sums: _Sums, signs: np.ndarray, c: np.ndarray) -> str | None:
        """Where the output of one product is wrong, one sentence."""
        output = c.reshape(self.batch, self.m, self.n)[sums.batch, sums.first : sums.last]
        got = np.empty_like(sums.sought)
        with np.errstate(over="ignore", invalid="ignore"):
            for rows in pieces(0, sums.last - sums.first, max(1, _IN_CACHE // self.n)):
                got[rows] = widened(output[rows], self._wide) @ signs
            # Sums that overflow are wrong too, though NaN is not above anything.
            wrong = ~(np.abs(got - sums.sought) <= sums.allowed).all(axis=1)
        if not wrong.any():
            return None
        row = sums.first + int(np.argmax(wrong))
        where = f"row {row}" if self.batch == 1 else f"row {row} of product {sums.batch}"
        return f"C x differs from A (B x) for random signs x in {int(wrong.sum())} rows, the first {where}."


@dataclass(frozen=True)
class _Sums:
    """Of one product: batch index, first and last + 1 row; C x as sought (rows, vectors), what is allowed (rows, 1)."""

    batch: int
    first: int
    last: int
    sought: np.ndarray
    allowed: np.ndarray


def gelu(z: np.ndarray) -> np.ndarray:
    """GELU in its tanh form: z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))) (Hendrycks and Gimpel 2016)."""
    return np.asarray(0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))))


def _fold(b: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, float]:
    """B x for each column of ``signs``, (K, vectors), and the sum of B's squares, in pieces along B's memory."""
    total = np.int64 if signs.dtype == np.int64 else np.float64
    folded = np.zeros((b.shape[0], signs.shape[1]), total)
    by_rows = b.strides[0] >= b.strides[1]
    stored = b if by_rows else b.T
    step = max(1, _IN_CACHE // stored.shape[1])
    # As many threads as there are shares, each of which adds up its own.
    shares = list(pieces(0, stored.shape[0], max(step, -(-stored.shape[0] // _SHARES))))

    def fold(share: slice) -> tuple[np.ndarray, float]:
        squares, across = 0.0, np.zeros_like(folded[: 1 if by_rows else None])
        for part in pieces(share.start, share.stop, step):
            piece = widened(stored[part], signs.dtype)
            if by_rows:
                folded[part] = piece @ signs
            else:
                across += piece.T @ signs[part]
            squares += float(np.vdot(piece, piece))
        return across, squares

    squares = 0.0
    for across, some in each(fold, shares):
        if not by_rows:
            folded += across
        squares += some
    return folded, squares


def _size(digits: str, name: str) -> int:
    """A size that was written in decimal digits."""
    if len(digits) > 12 or int(digits) > MOST_SIZE:
        raise CaseError(f"{name} is larger than any machine holds; write a size from 1 to {MOST_SIZE}")
    return int(digits)


def _options(tokens: list[str], spec: str) -> dict[str, str]:
    """Options by kind, from tokens in any order."""
    options: dict[str, str] = {}
    for token in tokens:
        name, equals, value = token.partition("=")
        if equals and name in ("acc", "out"):
            if not value:
                raise CaseError(f"{token!r} in gemm:{spec} names no dtype; write one, such as {name}=f32")
            kind = name
        elif token in LAYOUTS:
            kind, value = "layout", token
        elif token in EPILOGUES:
            kind, value = "epilogue", token
        else:
            raise CaseError(
                f"unknown option {token!r} of gemm:{spec}; write acc=<dtype>, out=<dtype>, "
                f"one of {', '.join(LAYOUTS)}, or one of {', '.join(EPILOGUES[1:])}"
            )
        if kind in options:
            raise CaseError(f"gemm:{spec} has two of {kind} ({options[kind]} and {value}); write one")
        options[kind] = value
    return options
