import json
import subprocess
import sys

import pytest

from benchmarks.engine import cases as case_files
from benchmarks.engine import machine
from benchmarks.engine.session import ROOT
from benchmarks.suites._suite import CASES, METRICS
from benchmarks.tracking.results import SUITES
from impls import registry
from impls.workloads.base import parse_case

PLACES = {
    "gemm:1024x1024x1024:f32": ("gemm.Square", ("f32", 1024)),
    "gemm:512x512x512:i8:nt": ("gemm.Square", ("i8:nt", 512)),
    "gemm:64x64x64:f8e4m3:acc=fast:nt": ("gemm.Square", ("f8e4m3:acc=fast:nt", 64)),
    "gemm:16x14336x4096:bf16:nt": ("gemm.Llm", ("16x14336x4096:bf16:nt",)),
    "gemm:1000x1000x1023:bf16": ("gemm.Shapes", ("1000x1000x1023:bf16",)),
    "gemm:512x3072x768:f32:nt:bias+gelu": ("gemm.Epilogues", ("512x3072x768:f32:nt", "bias+gelu")),
    "gemm:b16x128x128x128:f32": ("gemm.Batched", ("b16x128x128x128:f32",)),
    "gemm:g128+256x512x512:bf16:nt": ("gemm.Batched", ("g128+256x512x512:bf16:nt",)),
    "attention:b1h8s1024d64:f32:causal": ("attention.Prefill", ("b1h8d64:f32:causal", 1024)),
    "attention:b1h8q128k2048d64:f32:causal": ("attention.Prefill", ("b1h8q128d64:f32:causal", 2048)),
    "attention:b4h32kv8q1k512d128:bf16": ("attention.Decode", ("b4h32kv8d128:bf16", 512)),
    "attention:b1h8s512d64:f32:causal:bwd": ("attention.Backward", ("b1h8d64:f32:causal:bwd", 512)),
    "attention:b1h8s512d64:bf16:fwdbwd": ("attention.Backward", ("b1h8d64:bf16:fwdbwd", 512)),
}


@pytest.mark.parametrize("case_id", PLACES)
def test_a_case_stands_in_one_suite_under_these_parameters(case_id):
    case = parse_case(case_id)
    places = [(suite.key(), place) for suite in SUITES if (place := suite.place(case)) is not None]
    assert places == [PLACES[case_id]]


@pytest.mark.parametrize("file", [*case_files.names(), str(CASES)])
def test_every_case_that_comes_with_ridgemark_stands_in_one_suite_at_a_place_of_its_own(file):
    places = set()
    cases = [entry.case for entry in case_files.load(file)]
    for case in cases:
        (place,) = [(suite.key(), p) for suite in SUITES if (p := suite.place(case)) is not None]
        places.add(place)
    assert len(places) == len(cases)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_suite_but_shapes_is_followed_on_both_kinds_of_device_along_its_axis(kind):
    cases = [entry.case for entry in case_files.load(f"{CASES}:{kind}")]
    followed = {suite.key(): [p for c in cases if (p := suite.place(c)) is not None] for suite in SUITES}
    assert all(followed.values())
    for suite in ("gemm.Square", "attention.Prefill", "attention.Decode", "attention.Backward"):
        assert len({place[-1] for place in followed[suite]}) >= 2


def test_what_a_small_cpu_follows_takes_milliseconds_a_call():
    entries = case_files.load(f"{CASES}:cpu")
    assert all(entry.case.flops() < 20e9 and entry.case.total_bytes() < 300e6 for entry in entries)


@pytest.fixture(scope="module")
def discovered():
    """What asv finds in the suites, in a process of its own as asv does."""
    code = "import sys; from asv_runner.discovery import list_benchmarks; list_benchmarks(sys.argv[1], sys.stdout)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "benchmarks" / "suites")], capture_output=True, text=True, check=True
    )
    return {benchmark["name"]: benchmark for benchmark in json.loads(done.stdout)}


def test_asv_finds_every_metric_of_every_suite_and_nothing_else(discovered):
    assert set(discovered) == {f"{suite.key()}.track_{metric.name}" for suite in SUITES for metric in METRICS}


def test_versions_are_pinned_and_only_the_share_of_the_limit_is_better_high(discovered):
    assert {b["version"] for b in discovered.values()} == {"1"}
    assert {n for n, b in discovered.items() if not b["less_is_better"]} == {
        f"{suite.key()}.track_sol_fraction" for suite in SUITES
    }
    assert all(b["pretty_name"] and b["unit"] != "unit" for b in discovered.values())


def test_every_suite_is_measured_once_and_has_an_hour(discovered):
    keys = {}
    for name, benchmark in discovered.items():
        keys.setdefault(benchmark["setup_cache_key"], set()).add(name.rpartition(".")[0])
        assert benchmark["setup_cache_timeout"] == 3600
    assert sorted(map(len, keys.values())) == [1] * len(SUITES)


def test_parameters_are_plain_words_with_the_baseline_first(discovered):
    square = discovered["gemm.Square.track_time"]
    assert square["param_names"] == ["impl", "dtype", "n"]
    impls, dtypes, sizes = square["params"]
    simulated = {i.name for i in registry.implementations() if machine.default_device().kind in i.simulated_on}
    assert not simulated & set(impls)
    assert impls[0] in ("blas.default", "cublas.default") and impls[1:] == sorted(impls[1:])
    assert "'" not in str(impls[0])
    assert dtypes == sorted(dtypes)
    assert list(map(int, sizes)) == sorted(map(int, sizes))
