"""Ceilings as cases: what the device's arithmetic, its exponentials, its memory levels and a bare call can do.

Owns the definition of each probe, so that any device's native instructions can satisfy it and its output proves that
all of the work was done. It does not own what a ceiling means for another case: that is the analysis.

Every probe repeats a small piece of work ``repeats`` times *in the whole device*. An implementation splits the repeats
(rate, exp) or the buffer (read, copy) over its threads or SMs as it likes; ``flops()``, ``exps()`` and
``compulsory_bytes()`` state the work of the whole call, however it was split, so that a rate is work over time as for
any other case. Repeats default to what takes 1 to 50 ms on a small CPU; ``repeats=<n>`` asks for more.

``ceiling:rate:<dtype>``: multiply-add rate from registers, accumulation on the chip.
    Inputs ``A`` (64, 64) and ``B`` (64, 64), row-major, in the dtype, whole numbers in [-63, 63] (i8: [-127, 127];
    f8e4m3: [-7, 7]). Output ``C`` (64, 64), i32::

        C = repeats * (A @ B)   modulo 2^31, so 0 <= C < 2^31 (wrapping i32 arithmetic, then the sign bit cleared)

    Work: ``2 * 64^3 * repeats`` FLOPs. All 64^3 multiply-adds of every repeat are to be executed, with the dtype's
    operands and accumulators of f32 (i8: i32, f64: f64). The result is exact: tolerance zero, whatever the order.
    i32 accumulators may wrap. An f32 accumulator stays exact for 64 repeats (|sum| <= 64 * 64 * 63^2 < 2^24), then it
    is converted to i32 and added, wrapping, to a total: 4096 conversions beside 64^4 multiply-adds. f8e4m3 on a tensor
    core that keeps 14 bits of the accumulator stays exact for 5 repeats (5 * 64 * 7^2 < 2^14), then it is added to f32.
    Several repeats may run at once in accumulators of their own; operands may be laid out anew when they are loaded.
    Small whole numbers toggle fewer operand bits than random normals: where power limits the clock, the ceiling is an
    upper bound. They do not tell a wider dtype from a narrower one: that is for the implementation's listing.

``ceiling:exp:<dtype>``: exponentials, in f32, f16 or bf16, as a softmax takes them (subtract, exponentiate, add).
    Input ``X`` (4096,) in the dtype, standard normals. Output ``Y`` (4096,), f32::

        Y[i] = sum over r in 0 ... repeats-1 of exp(X[i] - (r mod 64) / 64)

    Work: ``4096 * repeats`` exponentials; the subtraction and the addition that come with each are not counted.
    Difference and exponential are taken in the dtype or wider, the sum in f32 or wider, in accumulators of at most
    2^14 terms.

``ceiling:read:<size>``: read bandwidth of a buffer of that size.
    Input ``X`` (size / 4,), i32, uniform over all values but the least (which marks what was never written).
    Output ``Y`` (1,), i32::

        Y[0] = repeats * (sum of X)   modulo 2^31, so 0 <= Y < 2^31 (wrapping i32 arithmetic, then the sign bit cleared)

    Every repeat reads the whole buffer: ``size * repeats`` bytes. A thread reads the same part in every repeat, so a
    memory level is probed by a size that fits it (all threads together). The output's 4 bytes are not counted.

``ceiling:copy:<size>``: copy bandwidth of a buffer of that size into another.
    Input ``X`` (size / 4,), i32, as for read. Output ``Y`` = X. Every repeat copies the whole buffer:
    ``2 * size * repeats`` bytes, each read and each write counted once as in STREAM (McCalpin 1995); a line that is
    fetched only to be overwritten is not counted. The working set is twice the size.

``ceiling:launch``: the least call that does something.
    Input ``X`` (1,), i32. Output ``Y`` = X. What one call costs, whatever it computes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from impls.workloads.base import Case, CaseError, Expected, TensorSpec
from impls.workloads.draws import integers, normals
from impls.workloads.dtypes import dtype

PROBES = ("rate", "exp", "read", "copy", "launch")
RATE_DTYPES = ("f64", "f32", "tf32", "f16", "bf16", "f8e4m3", "i8")
EXP_DTYPES = ("f32", "f16", "bf16")

#: Rows, columns and depth of the rate probe's tile.
TILE = 64
#: Elements of the exp probe's vector.
VECTOR = 4096
#: Period of the exp probe's shifts, which are multiples of 1 / SHIFTS.
SHIFTS = 64

# Bounds that keep the accumulators exact; see the module's docstring.
_BOUND = {"f64": 63, "f32": 63, "tf32": 63, "f16": 63, "bf16": 63, "f8e4m3": 7, "i8": 127}
_REPEATS = 1 << 14
# Bytes that read and copy move over in one call, where the buffer is smaller.
_SWEEP = 1 << 30
_MOST_BYTES = 1 << 42
_MOST_REPEATS = (1 << 31) - 64
_PAGE = 4096
# Sums are compared modulo this: exact however they wrapped in i32, and never the least i32.
_MODULUS = 1 << 31
_UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


@dataclass(frozen=True)
class Ceiling(Case):
    """One probe of one ceiling; the module's docstring defines them.

    Attributes:
        probe: ``rate``, ``exp``, ``read``, ``copy`` or ``launch``.
        dtype: the operands' dtype (``i32`` where bytes are moved).
        bytes: size of the buffer that ``read`` and ``copy`` go over; 0 for the others.
        repeats: how often the work is done in one call, in the whole device; 0 stands for the default.
    """

    workload: ClassVar[str] = "ceiling"

    probe: str
    dtype: str = "i32"
    bytes: int = 0
    repeats: int = 0

    def __post_init__(self) -> None:
        if self.probe not in PROBES:
            raise CaseError(f"unknown probe {self.probe!r}; write one of {', '.join(f'ceiling:{p}' for p in PROBES)}")
        known = {"rate": RATE_DTYPES, "exp": EXP_DTYPES}.get(self.probe, ("i32",))
        if self.dtype not in known:
            raise CaseError(f"ceiling:{self.probe} has no dtype {self.dtype!r}; write one of {', '.join(known)}")
        if self.probe in ("read", "copy"):
            if not 0 < self.bytes <= _MOST_BYTES or self.bytes % _PAGE:
                raise CaseError(
                    f"ceiling:{self.probe} of {self.bytes} bytes; write a multiple of 4KiB up to 4TiB, such as 32MiB"
                )
        elif self.bytes:
            raise CaseError(f"ceiling:{self.probe} takes no size; sizes belong to ceiling:read and ceiling:copy")
        if self.repeats == 0:
            object.__setattr__(self, "repeats", self._default_repeats())
        if not 0 < self.repeats <= _MOST_REPEATS:
            raise CaseError(f"repeats={self.repeats}; write a number from 1 to {_MOST_REPEATS}")
        if self.probe in ("rate", "exp") and self.repeats % SHIFTS:
            raise CaseError(f"repeats={self.repeats} of ceiling:{self.probe}; write a multiple of {SHIFTS}")
        if self.probe == "launch" and self.repeats != 1:
            raise CaseError("ceiling:launch is one call; write it without repeats")

    def _default_repeats(self) -> int:
        if self.probe in ("read", "copy"):
            return max(1, _SWEEP // self.bytes)
        return 1 if self.probe == "launch" else _REPEATS

    @property
    def id(self) -> str:
        """``ceiling:<probe>[:<dtype or size>][:repeats=<n>]``."""
        tokens = ["ceiling", self.probe]
        if self.probe in ("rate", "exp"):
            tokens.append(self.dtype)
        elif self.bytes:
            unit = next(u for u, size in _UNITS.items() if self.bytes % size == 0)
            tokens.append(f"{self.bytes // _UNITS[unit]}{unit}")
        if self.repeats != self._default_repeats():
            tokens.append(f"repeats={self.repeats}")
        return ":".join(tokens)

    @classmethod
    def parse(cls, spec: str) -> Ceiling:
        """The probe named by ``spec``, such as ``rate:bf16``, ``read:32MiB`` or ``launch``.

        Raises:
            CaseError: malformed; the message says what to write.
        """
        probe, *tokens = spec.split(":")
        repeats = 0
        if tokens and (found := re.fullmatch(r"repeats=(\d{1,10})", tokens[-1], re.ASCII)):
            repeats = int(found[1])
            if repeats == 0:
                raise CaseError(f"ceiling:{spec}: zero repeats; write repeats=1 or more")
            tokens.pop()
        form = {"rate": "dtype", "exp": "dtype", "read": "size", "copy": "size", "launch": None}
        if probe not in form:
            raise CaseError(f"unknown probe {probe!r}; write one of {', '.join(f'ceiling:{p}' for p in PROBES)}")
        if len(tokens) != (form[probe] is not None):
            example = {"dtype": f"ceiling:{probe}:f32", "size": f"ceiling:{probe}:32MiB", None: "ceiling:launch"}
            raise CaseError(f"cannot read ceiling:{spec}; write {example[form[probe]]}, and :repeats=<n> where needed")
        if form[probe] == "dtype":
            return cls(probe, dtype=tokens[0], repeats=repeats)
        if form[probe] == "size":
            return cls(probe, bytes=_size(tokens[0]), repeats=repeats)
        return cls(probe, repeats=repeats)

    def flops(self) -> int:
        """Multiplications and additions of the rate probe, all repeats; 0 for the other probes."""
        return 2 * TILE**3 * self.repeats if self.probe == "rate" else 0

    def exps(self) -> int:
        """Exponentials of the exp probe, all repeats; 0 for the other probes."""
        return VECTOR * self.repeats if self.probe == "exp" else 0

    def compulsory_bytes(self) -> int:
        """Bytes read and written: by read and copy in all repeats, by the others once."""
        if self.probe == "read":
            return self.bytes * self.repeats
        if self.probe == "copy":
            return 2 * self.bytes * self.repeats
        return self.total_bytes()

    @property
    def compute_dtype(self) -> str:
        """The dtype whose rate is probed."""
        return self.dtype

    def input_specs(self) -> dict[str, TensorSpec]:
        """``A`` and ``B`` of the rate probe, ``X`` of the others."""
        if self.probe == "rate":
            return {name: TensorSpec((TILE, TILE), self.dtype) for name in ("A", "B")}
        if self.probe == "exp":
            return {"X": TensorSpec((VECTOR,), self.dtype)}
        return {"X": TensorSpec((self.bytes // 4 or 1,), "i32")}

    def output_specs(self) -> dict[str, TensorSpec]:
        """``C`` of the rate probe, ``Y`` of the others."""
        if self.probe == "rate":
            return {"C": TensorSpec((TILE, TILE), "i32")}
        if self.probe == "exp":
            return {"Y": TensorSpec((VECTOR,), "f32")}
        return {"Y": TensorSpec((self.bytes // 4 if self.probe == "copy" else 1,), "i32")}

    def inputs(self, seed: int) -> dict[str, np.ndarray]:
        """Small whole numbers (rate), standard normals (exp), or any i32 but the least (read, copy, launch)."""
        specs = self.input_specs()
        if self.probe == "rate":
            return {n: integers(seed, n, s.shape, self.dtype, _BOUND[self.dtype]) for n, s in specs.items()}
        if self.probe == "exp":
            return {"X": normals(seed, "X", (VECTOR,), self.dtype)}
        return {"X": integers(seed, "X", specs["X"].shape, "i32", np.iinfo(np.int32).max)}

    def reference_flops(self) -> int:
        """Operations of one repeat: the others are known from it."""
        return {"rate": 2 * TILE**3, "exp": 2 * VECTOR * SHIFTS}.get(self.probe, self.bytes // 4 or 1)

    def expected(self, inputs: Mapping[str, np.ndarray], *, sample: int | None = None) -> dict[str, Expected]:
        """Exact values; for the exp probe a relative tolerance of a few units roundoff.

        Tolerance of the exp probe, relative, with u the dtype's unit roundoff: ``(|x| + 1) u`` for rounding the
        argument (e^x turns an absolute into a relative error), ``8 u`` for an exponential within 4 ulp, and 2^-12 for
        2^14 f32 additions: in an accumulator of r terms the roundings of the 64 shifts come back in every period, so
        the error can drift as r u sqrt(64) / 64 / sqrt(3) (2^-13.8 here), times a safety factor of 3.5.

        The copy probe's are one element of every page, the first and the last: ``invariants`` sees all.
        """
        if self.probe == "rate":
            product = inputs["A"].astype(np.int64) @ inputs["B"].astype(np.int64)
            return {"C": Expected(None, (product * self.repeats % _MODULUS).astype(np.float64), np.zeros(()))}
        x = inputs["X"]
        if self.probe == "exp":
            wide = x.astype(np.float64)
            shifts = np.arange(SHIFTS) / SHIFTS
            value = self.repeats // SHIFTS * np.exp(wide[:, None] - shifts).sum(axis=1)
            u = dtype(self.dtype).unit_roundoff
            return {"Y": Expected(None, value, value * ((np.abs(wide) + 1) * u + 8 * u + 2.0**-12))}
        if self.probe == "read":
            total = int(x.sum(dtype=np.int64)) * self.repeats % _MODULUS
            return {"Y": Expected(None, np.array([float(total)]), np.zeros(()))}
        per_page = _PAGE // 4
        pages = np.arange(x.size // per_page) * per_page
        chosen = pages + np.random.default_rng(sample or 0).integers(0, per_page, pages.size)
        index = np.unique(np.concatenate([chosen, [0, x.size - 1]]))
        return {"Y": Expected((index,), x[index].astype(np.float64), np.zeros(()))}

    def invariants(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], seed: int) -> str | None:
        """Copy: every element equals its source. The other probes' expected values are complete."""
        if self.probe == "copy" and not np.array_equal(inputs["X"], outputs["Y"]):
            return f"{np.count_nonzero(inputs['X'] != outputs['Y'])} elements of the copy differ from their source."
        return None


def _size(text: str) -> int:
    """Bytes of ``16KiB``, ``32MiB``, ``1GiB``."""
    found = re.fullmatch(r"([1-9]\d{0,12})(KiB|MiB|GiB|TiB)", text, re.ASCII)
    if not found:
        raise CaseError(f"cannot read the size {text!r}; write a whole number of KiB, MiB or GiB, such as 32MiB")
    return int(found[1]) * _UNITS[found[2]]
