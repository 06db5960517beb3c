"""The image of an operand as ``wgmma`` reads it from shared memory: K last, rows of 128 bytes, 128-byte swizzle."""

from __future__ import annotations

import numpy as np

from impls.workloads.ceiling import TILE


def layout(operand: np.ndarray, rows: int, copies: int) -> np.ndarray:
    """The image of a (64, 64) operand, K last: ``rows`` rows (it repeats), ``copies`` along K, 128-byte swizzle.

    Bytes of each 128-byte block along K follow each other, row by row; within eight rows, 16-byte piece c of row r lies
    at piece c xor (r mod 8) (CUTLASS, Swizzle<3, 4, 3>).
    """
    raw = np.ascontiguousarray(np.tile(operand, (rows // TILE, copies))).view(np.uint8)
    blocks = raw.reshape(rows, -1, 8, 16).transpose(1, 0, 2, 3)
    pieces = np.arange(8)[None, :] ^ (np.arange(rows)[:, None] % 8)
    return np.ascontiguousarray(np.take_along_axis(blocks, pieces[None, :, :, None], axis=2)).reshape(-1)


def unlayout(image: np.ndarray, itemsize: int) -> np.ndarray:
    """The (64, 64) operand's bytes back from an image whose first 64 rows and first copy hold it."""
    row_bytes = TILE * itemsize
    blocks = max(1, row_bytes // 128)
    rows = image.size // (128 * blocks)
    pieces = np.arange(8)[None, :] ^ (np.arange(rows)[:, None] % 8)
    plain = np.take_along_axis(image.reshape(blocks, rows, 8, 16), pieces[None, :, :, None], axis=2)
    return np.ascontiguousarray(plain.transpose(1, 0, 2, 3).reshape(rows, -1)[:TILE, :row_bytes])
