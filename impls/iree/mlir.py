"""MLIR as text: the few tensor operations that ``linalg_ext`` is written with.

Owns their spelling (MLIR of IREE 3.13); what they compute together is in ``linalg_ext``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """An SSA value; a scalar where the shape is empty."""

    name: str
    shape: tuple[int, ...]
    element: str

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def type(self) -> str:
        """Its MLIR type."""
        return f"tensor<{'x'.join(map(str, self.shape))}x{self.element}>" if self.shape else self.element


class Text:
    """Operations of one function, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def op(self, line: str, shape: tuple[int, ...], element: str) -> Tensor:
        """An operation with one result, whose type stands where ``line`` ends with ``{}``."""
        result = Tensor(f"%{len(self.lines)}", shape, element)
        self.lines.append(f"{result.name} = {line.removesuffix('{}') + result.type if line.endswith('{}') else line}")
        return result

    def permuted(self, x: Tensor, axes: tuple[int, ...], element: str) -> Tensor:
        """x with axis ``axes[i]`` as axis i, its elements converted."""
        shape = tuple(x.shape[axis] for axis in axes)
        empty = self.op("tensor.empty() : {}", shape, element)
        names = [f"d{i}" for i in range(x.rank)]
        loops = ", ".join(['"parallel"'] * x.rank)
        ours = ", ".join(names)
        theirs = ", ".join(names[axes.index(axis)] for axis in range(x.rank))
        convert, value = "", "%in"
        if x.element != element:
            operation = "extf" if element == "f32" else "truncf"
            convert, value = f"%to = arith.{operation} %in : {x.element} to {element} ", "%to"
        return self.op(
            f"linalg.generic {{indexing_maps = [affine_map<({ours}) -> ({theirs})>, affine_map<({ours}) -> ({ours})>], "
            f"iterator_types = [{loops}]}} "
            f"ins({x.name} : {x.type}) outs({empty.name} : {empty.type}) "
            f"{{ ^bb0(%in: {x.element}, %out: {element}): {convert}linalg.yield {value} : {element} }} -> {{}}",
            shape,
            element,
        )

    def apart(self, x: Tensor) -> Tensor:
        """x, computed by itself: not fused with what uses it."""
        return self.op(f"util.optimization_barrier {x.name} : {{}}", x.shape, x.element)

    def sliced(self, x: Tensor, axis: int, start: int, stop: int) -> Tensor:
        """``x[..., start:stop, ...]`` along an axis."""
        if (start, stop) == (0, x.shape[axis]):
            return x
        shape = (*x.shape[:axis], stop - start, *x.shape[axis + 1 :])
        offsets = [start if i == axis else 0 for i in range(x.rank)]
        line = f"tensor.extract_slice {x.name}{offsets} {list(shape)} {[1] * x.rank} : {x.type} to {{}}"
        return self.op(line, shape, x.element)

    def inserted(self, x: Tensor, whole: Tensor, axis: int, start: int) -> Tensor:
        """``whole`` with x from ``start`` on along an axis; x itself where it is as large."""
        if x.shape == whole.shape:
            return x
        offsets = [start if i == axis else 0 for i in range(x.rank)]
        place = f"{whole.name}{offsets} {list(x.shape)} {[1] * x.rank}"
        return self.op(f"tensor.insert_slice {x.name} into {place} : {x.type} into {{}}", whole.shape, x.element)

    def heads(self, x: Tensor, heads: int) -> Tensor:
        """(B, H, x, y) as (B H, x, y); as (x, y) where there is one head in all."""
        groups = [[0, 1], [2], [3]] if heads > 1 else [[0, 1, 2], [3]]
        shape = (heads, *x.shape[2:]) if heads > 1 else x.shape[2:]
        return self.op(f"tensor.collapse_shape {x.name} {groups} : {x.type} into {{}}", shape, x.element)

    def rows(self, x: Tensor, heads: int) -> Tensor:
        """(B, Hq, rows, D) as (heads, rows of all that share a key head, D); as (rows, D) where there is one."""
        b, hq, s, d = x.shape
        line = f"tensor.collapse_shape {x.name} [[0, 1, 2], [3]] : {x.type} into {{}}"
        flat = self.op(line, (b * hq * s, d), x.element)
        if heads == 1:
            return flat
        shape = (heads, b * hq * s // heads, d)
        return self.op(
            f"tensor.expand_shape {flat.name} [[0, 1], [2]] output_shape {list(shape)} : {flat.type} into {{}}",
            shape,
            x.element,
        )

    def unrolled(self, x: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
        """The reverse of ``rows``."""
        if x.rank == 3:
            flat = (x.shape[0] * x.shape[1], x.shape[2])
            x = self.op(f"tensor.collapse_shape {x.name} [[0, 1], [2]] : {x.type} into {{}}", flat, x.element)
        return self.op(
            f"tensor.expand_shape {x.name} [[0, 1, 2], [3]] output_shape {list(shape)} : {x.type} into {{}}",
            shape,
            x.element,
        )
