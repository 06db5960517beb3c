"""Operand images for the GPU's tensor cores: where each element lies, and back; work that divides evenly."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from impls.ceilings import gpu_ceiling_cases
from impls.ceilings.cuda.layout import layout, unlayout
from impls.ceilings.cuda.sources import WGMMA

KINDS = [(np.float16, 1), (np.float32, 1), (np.int8, 2), (ml_dtypes.float8_e4m3fn, 2)]


@pytest.mark.parametrize(("kind", "copies"), KINDS)
def test_elements_lie_where_the_128_byte_swizzle_puts_them(kind, copies):
    operand = (np.arange(4096).reshape(64, 64) % 113).astype(kind)
    image = layout(operand, 256, copies)
    size = operand.itemsize
    for row, k in ((0, 0), (1, 0), (77, 37), (255, 63), (8, 63)):
        byte = k * size
        block, piece = divmod(byte, 128)
        at = block * 256 * 128 + row * 128 + ((piece // 16) ^ (row % 8)) * 16 + byte % 16
        assert image[at : at + size].tobytes() == operand[row % 64, k].tobytes()


@pytest.mark.parametrize(("kind", "copies"), KINDS)
@pytest.mark.parametrize("rows", [64, 256])
def test_an_image_gives_its_operand_back(kind, copies, rows):
    operand = (np.arange(4096).reshape(64, 64) % 113).astype(kind)
    back = unlayout(layout(operand, rows, copies), operand.itemsize).view(kind)
    assert back.tobytes() == operand.tobytes()


def test_repeats_divide_into_whole_iterations():
    rates = [case for case in gpu_ceiling_cases(WGMMA) if case.probe == "rate"]
    # f32 has no wgmma; it is among them whatever is asked for.
    assert {case.dtype for case in rates} == {*WGMMA, "f32"}
    assert all(case.repeats % WGMMA[case.dtype].repeats == 0 for case in rates if case.dtype in WGMMA)


def test_bandwidth_is_probed_from_one_mebibyte_to_two_gibibytes_in_single_passes():
    cases = [case for case in gpu_ceiling_cases([]) if case.repeats == 1]
    read = [case for case in cases if case.probe == "read"]
    copy = [case for case in cases if case.probe == "copy"]
    assert (read[0].bytes, read[-1].bytes) == (1 << 20, 2 << 30)
    assert all(2 <= b.bytes / a.bytes <= 8 for a, b in itertools.pairwise(read))
    # A copy of n bytes moves 2 n: the same bytes as the read beside it.
    assert [case.compulsory_bytes() for case in copy] == [case.bytes for case in read]


def test_l2_is_probed_by_buffers_that_stay_in_it_and_are_gone_over_often():
    inside = [case for case in gpu_ceiling_cases([]) if case.probe in ("read", "copy") and case.repeats > 1]
    assert {case.probe for case in inside} == {"read", "copy"}
    # An H100 or H200 has 50 MiB of L2, of which a multiprocessor reaches half without crossing to the other partition.
    assert all(case.bytes <= 25 << 20 and case.repeats >= 16 for case in inside)
