"""Whose choices a device takes."""

from pathlib import Path

import pytest

import impls
from impls.cutlass import cpp_choices, cute_gemm
from impls.incumbents import gemm as quack
from impls.support import tuned
from impls.support.h200 import H200
from impls.triton import choices, gluon_tiles

CHOOSERS = {
    "cutlass.cpp": lambda case: cpp_choices.choose(case, H200.name),
    "cutlass.cute": lambda case: cute_gemm.choose(case, H200.name),
    "triton.persistent_tma": lambda case: choices.choose("triton.persistent_tma", case, H200.name),
    "triton.gluon": lambda case: gluon_tiles.choose_tiling(case, H200),
    "incumbents.quack": lambda case: quack.choose(case, H200.name),
}


def test_a_device_takes_its_own_choices_and_without_any_the_h200s(tmp_path):
    assert tuned.nearest(tmp_path, "NVIDIA H100 PCIe") == tmp_path / "tuned" / "h200.json"
    own = tuned.file(tmp_path, "NVIDIA H100 PCIe")
    own.parent.mkdir()
    own.write_text("{}")
    assert tuned.nearest(tmp_path, "NVIDIA H100 PCIe") == own == tmp_path / "tuned" / "h100-pcie.json"


@pytest.mark.parametrize("name", CHOOSERS)
def test_what_was_tuned_for_a_case_is_what_the_case_takes(name):
    stack = Path(impls.__file__).parent / name.partition(".")[0]
    kept = tuned.file(stack, H200.name)
    for case, _ in tuned.choices(kept, name):
        if case.workload == "gemm":
            assert CHOOSERS[name](case)[1] == tuned.origin(kept, name, case.id)
