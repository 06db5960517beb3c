"""Fused attention's bands and tiles: every visible key is in its query's band, no band is empty."""

from __future__ import annotations

import re

import numpy as np
import pytest

from impls.iree import linalg_ext
from impls.workloads.attention import Attention
from impls.workloads.base import parse_case

MASKED = (
    "attention:b1h2s1024d64:f32:causal",
    "attention:b1h2q170k431d64:bf16:window=40",
    "attention:b2h14kv2q33k70d64:f16:causal",
    "attention:b1h2q600k1500d128:f32:window=999",
    "attention:b1h2q1k129d256:bf16:causal",
    "attention:b1h2s513d96:f32:window=1",
)


def case(case_id: str) -> Attention:
    parsed = parse_case(case_id)
    assert isinstance(parsed, Attention)
    return parsed


def visible(attention: Attention) -> np.ndarray:
    """(Sq, Sk), by the definition in docs/architecture.md."""
    query = np.arange(attention.sq)[:, None] + attention.sk - attention.sq
    key = np.arange(attention.sk)[None, :]
    seen = key <= query
    return seen & (key > query - attention.window) if attention.window else seen


@pytest.mark.parametrize("case_id", MASKED)
def test_bands_hold_all_that_is_visible(case_id: str) -> None:
    attention = case(case_id)
    held = np.zeros((attention.sq, attention.sk), int)
    for band in linalg_ext.bands(attention):
        assert 0 <= band.low < band.high <= attention.sk
        held[band.first : band.stop, band.low : band.high] += 1
    assert held.max() == 1
    assert (held[visible(attention)] == 1).all()


def test_bands_skip_a_good_part_of_a_long_mask() -> None:
    for case_id, most in (("b1h2s4096d64:f32:causal", 0.63), ("b1h2s4096d64:f32:window=64", 0.27)):
        attention = case(f"attention:{case_id}")
        computed = sum((b.stop - b.first) * (b.high - b.low) for b in linalg_ext.bands(attention))
        assert computed / (attention.sq * attention.sk) < most


def test_without_a_mask_there_is_one_band() -> None:
    attention = case("attention:b1h2q700k300d64:f32")
    assert linalg_ext.bands(attention) == [linalg_ext.Band(0, 700, 0, 300)]
    assert "arith.cmpi" not in linalg_ext.module(attention)


def test_a_single_query_that_sees_every_key_needs_no_mask() -> None:
    assert "arith.cmpi" not in linalg_ext.module(case("attention:b2h8kv2q1k64d64:bf16:causal"))


@pytest.mark.parametrize("case_id", MASKED)
def test_every_value_is_defined_before_it_is_used(case_id: str) -> None:
    defined = {"%Q", "%K", "%V"}
    for line in linalg_ext.module(case(case_id)).splitlines():
        found = re.match(r"    (%\d+) = (.*)", line)
        if found:
            outside_of_regions = re.sub(r"\{ \^bb0.*\}", "", found.group(2))
            assert set(re.findall(r"%\w+", outside_of_regions)) <= defined
            defined.add(found.group(1))
    assert len(defined) > 10
