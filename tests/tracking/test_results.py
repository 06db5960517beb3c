import json
import math
import sys

import pytest

from benchmarks.engine import records
from benchmarks.tracking import results
from tests.tracking.conftest import CONF, FACTS

SQUARE = "gemm:1024x1024x1024:f32"
SMALL = "gemm:256x256x256:f32"
PREFILL = "attention:b1h8s1024d64:f32:causal"
BASELINES = {(SQUARE, "blas.default"): 40000.0, (SMALL, "blas.default"): 600.0, (PREFILL, "blas.sdpa"): 9000.0}
H200 = FACTS | {"name": "node", "gpu": [{"name": "NVIDIA H200", "driver": "580.1"}], "os": "Debian 12"}
CUDA = {"kind": "cuda", "name": "NVIDIA H200", "arch": "sm_90", "threads": 2}


@pytest.fixture
def ingest(repository, monkeypatch):
    """Bring asv's files up to date; the notes."""
    conf, repo = repository.conf(monkeypatch)
    return lambda: results.ingest(conf, repo)


def value(file, benchmark, *place):
    """asv's value of one parameter combination in a result file."""
    values, params = file["results"][benchmark][:2]
    index = 0
    for column, parameter in zip(params, place, strict=True):
        index = index * len(column) + column.index(parameter)
    return values[index]


def test_values_are_filed_under_the_commit_that_the_run_was_stamped_with(repository, ingest):
    first, second = repository.commit(), repository.commit()
    repository.measure(BASELINES | {(SQUARE, "xla.dot"): 50000.0}, commit=first, noise=0.0)
    repository.measure(BASELINES | {(SQUARE, "xla.dot"): 30000.0}, commit=second, noise=0.0)
    assert ingest() == []
    for commit, seconds in ((first, 0.05), (second, 0.03)):
        file = repository.results(commit)
        assert file["commit_hash"] == commit
        assert value(file, "gemm.Square.track_time", "xla.dot", "f32", "1024") == pytest.approx(seconds)
        assert value(file, "gemm.Square.track_ratio", "xla.dot", "f32", "1024") == pytest.approx(seconds / 0.04)
        assert value(file, "attention.Prefill.track_time", "blas.sdpa", "b1h8d64:f32:causal", "1024") == pytest.approx(
            0.009
        )
        assert math.isnan(value(file, "gemm.Square.track_time", "xla.dot", "f32", "256"))
    assert repository.results(first)["date"] < repository.results(second)["date"]


def test_intervals_rest_on_rounds(repository, ingest):
    commit = repository.commit()
    repository.measure({(SQUARE, "blas.default"): 40000.0}, commit=commit, rounds=12, noise=0.01)
    ingest()
    file = repository.results(commit)
    row = dict(zip(file["result_columns"], file["results"]["gemm.Square.track_time"], strict=False))
    assert row["stats_repeat"] == [12] and len(row["samples"][0]) == 12
    assert row["stats_ci_99_a"][0] < row["result"][0] < row["stats_ci_99_b"][0]


def test_a_failure_is_null_and_what_is_not_supported_was_not_run(repository, ingest):
    commit = repository.commit()
    other = {(SQUARE, "xla.dot"): "crashed", (SMALL, "xla.dot"): 700.0, (SQUARE, "iree.llvm_cpu"): "unsupported"}
    repository.measure(BASELINES | other, commit=commit)
    ingest()
    file = repository.results(commit)
    assert value(file, "gemm.Square.track_time", "xla.dot", "f32", "1024") is None
    assert "iree.llvm_cpu" not in file["results"]["gemm.Square.track_time"][1][0]


def test_one_stack_measured_later_joins_the_same_file(repository, ingest):
    commit = repository.commit()
    repository.measure(BASELINES | {(SQUARE, "iree.llvm_cpu"): 70000.0}, commit=commit, noise=0.0)
    ingest()
    repository.measure({(SQUARE, "blas.default"): 44000.0, (SQUARE, "xla.dot"): 50000.0}, commit=commit, noise=0.0)
    ingest()
    file = repository.results(commit)
    time, ratio = (
        lambda impl, metric=m: value(file, f"gemm.Square.{metric}", impl, "f32", "1024")
        for m in ("track_time", "track_ratio")
    )
    assert (time("iree.llvm_cpu"), time("xla.dot")) == pytest.approx((0.07, 0.05))
    assert time("blas.default") == pytest.approx(0.044)  # the latest
    assert ratio("iree.llvm_cpu") == pytest.approx(70 / 40, rel=1e-4)  # within the run that measured both
    assert ratio("xla.dot") == pytest.approx(50 / 44, rel=1e-4)


def test_what_a_file_holds_stays_where_the_records_do_not_speak_of_it(repository, ingest):
    commit = repository.commit()
    repository.measure(BASELINES | {(SQUARE, "iree.llvm_cpu"): 70000.0}, commit=commit, noise=0.0)
    ingest()
    for file in records.folder(repository.folder / "results", "box").iterdir():
        file.unlink()
    repository.measure({(SQUARE, "blas.default"): 44000.0, (SQUARE, "xla.dot"): 50000.0}, commit=commit, noise=0.0)
    ingest()
    file = repository.results(commit)
    times = [value(file, "gemm.Square.track_time", impl, "f32", "1024") for impl in ("iree.llvm_cpu", "xla.dot")]
    assert times == pytest.approx([0.07, 0.05])
    described = json.loads((repository.folder / "results" / "benchmarks.json").read_text())
    assert described["gemm.Square.track_time"]["params"] == [
        ["blas.default", "iree.llvm_cpu", "xla.dot"],
        ["f32"],
        ["256", "1024"],
    ]


def test_ingesting_twice_changes_nothing(repository, ingest):
    repository.measure(BASELINES, commit=repository.commit())
    ingest()
    before = {p: p.read_text() for p in (repository.folder / "results").rglob("*.json")}
    assert len(before) == 3
    ingest()
    assert {p: p.read_text() for p in (repository.folder / "results").rglob("*.json")} == before


def test_nothing_that_an_update_changes_becomes_a_key(repository, ingest):
    commit = repository.commit()
    repository.measure({("gemm:4096x4096x4096:bf16", "cublas.default"): 180.0}, commit=commit, facts=H200, device=CUDA)
    ingest()
    (machine,) = (repository.folder / "results").glob("*/machine.json")
    assert json.loads(machine.read_text()) == {
        "machine": "node",
        "cpu": "Some CPU",
        "arch": "x86_64",
        "cores": "2",
        "gpu": "NVIDIA H200",
        "version": 1,
    }
    file = repository.results(commit, "node")
    assert file["env_name"] == "harness" and file["requirements"] == {} and file["env_vars"] == {}
    text = json.dumps(file)
    assert sys.prefix not in text and sys.version.split()[0] not in text and "580.1" not in text


def test_machines_keep_apart_and_a_gpu_machine_s_cpu_is_one_of_its_own(repository, ingest):
    commit = repository.commit()
    repository.measure(BASELINES, commit=commit)
    repository.measure(BASELINES, commit=commit, facts=H200)
    repository.measure({("gemm:4096x4096x4096:bf16", "cublas.default"): 180.0}, commit=commit, facts=H200, device=CUDA)
    assert ingest() == []
    assert sorted(p.parent.name for p in (repository.folder / "results").glob("*/machine.json")) == [
        "box",
        "node",
        "node-cpu",
    ]
    described = json.loads((repository.folder / "results" / "benchmarks.json").read_text())
    impls, dtypes, sizes = described["gemm.Square.track_time"]["params"]
    assert (
        impls == ["blas.default", "cublas.default"] and dtypes == ["bf16", "f32"] and sizes == ["256", "1024", "4096"]
    )


def test_what_asv_cannot_file_is_left_out_and_said(repository, ingest):
    commit = repository.commit()
    repository.measure(BASELINES, commit=commit)
    repository.measure(BASELINES | {(SQUARE, "xla.dot"): 1.0}, commit=commit, dirty=True)
    repository.measure({(SQUARE, "xla.dot"): 1.0}, commit=None, dirty=None)
    repository.measure({("gemm:nonsense", "xla.dot"): 1.0}, commit=commit)
    repository.measure({(SQUARE, "xla.dot"): 1.0}, commit=commit, schema=records.SCHEMA + 1, run="20260101T000000-ffff")
    notes = " ".join(ingest())
    assert "4 results were measured with uncommitted changes" in notes
    assert "1 results were not measured in a git checkout" in notes
    assert "1 results have case ids that cannot be read here" in notes
    assert f"schema {records.SCHEMA + 1}" in notes
    assert "xla.dot" not in json.dumps(repository.results(commit))


def test_the_sustained_regime_is_not_mixed_with_the_usual_one(repository, ingest):
    commit = repository.commit()
    case = "gemm:4096x4096x4096:bf16"
    options = {"commit": commit, "facts": H200, "device": CUDA, "noise": 0.0}
    repository.measure({(case, "cublas.default"): 180.0}, regime="burst", **options)
    repository.measure({(case, "cublas.default"): 210.0}, regime="sustained", **options)
    ingest()
    file = repository.results(commit, "node")
    assert value(file, "gemm.Square.track_time", "cublas.default", "bf16", "4096") == pytest.approx(180e-6)


def test_a_shallow_clone_says_which_commits_it_lacks(repository, tmp_path, monkeypatch):
    commits = [repository.commit() for _ in range(4)]
    for commit in commits:
        repository.measure(BASELINES, commit=commit)
    shallow = tmp_path / "shallow"
    repository.git("clone", "--quiet", "--depth", "2", f"file://{repository.folder}", str(shallow))
    (repository.folder / "results").rename(shallow / "results")
    repository.folder = shallow
    notes = results.ingest(*repository.conf(monkeypatch))
    assert len(notes) == 1 and "2 of 4 commits with results are not in this clone" in notes[0]
    assert commits[0][:8] in notes[0] and "git fetch --unshallow" in notes[0]
    assert repository.results(commits[3])["commit_hash"] == commits[3]
    assert len(list((shallow / "results" / "box").glob("*-harness.json"))) == 2


def test_a_commit_off_the_line_of_first_parents_is_kept_and_said(repository, ingest):
    repository.commit()
    repository.git("checkout", "--quiet", "-b", "aside")
    aside = repository.commit()
    repository.git("checkout", "--quiet", "trunk")
    repository.measure(BASELINES, commit=repository.commit())
    repository.measure(BASELINES, commit=aside)
    (note,) = ingest()
    assert note.startswith(aside[:8]) and "the site does not" in note
    assert repository.results(aside)["commit_hash"] == aside


def test_an_empty_results_folder_says_what_to_do(repository):
    repository.commit()
    output = repository.run("benchmarks.tracking", "publish", ok=(2,))
    assert "holds no records" in output and "nox" in output
    assert not (repository.folder / "site").exists()


def test_another_results_folder_is_filed_within_itself(repository):
    commit = repository.commit()
    repository.measure(BASELINES, commit=commit)
    (repository.folder / "results").rename(repository.folder / "mine")
    repository.run("benchmarks.tracking", "publish", "--out", "mine")
    assert (repository.folder / "mine" / "box" / f"{commit[:8]}-harness.json").exists()
    assert (repository.folder / "site" / "index.json").exists()
    assert not (repository.folder / "results").exists()


def test_studies_beside_the_records_are_passed_over_in_silence(repository):
    commit = repository.commit()
    repository.measure(BASELINES, commit=commit)
    for folder in ("", "box"):
        (repository.folder / "results" / "records" / folder / "study.json").write_text("{}")
    assert "Skipping" not in repository.run("benchmarks.tracking", "publish")
    assert "Skipping" not in repository.run("asv", "show", commit)


def test_asv_run_writes_what_ingesting_the_same_records_writes(repository, monkeypatch):
    commit = repository.commit()
    here = json.loads(repository.run("tests.tracking.machine"))
    sizes = ("256", "512", "1024", "2048")
    times = {
        (f"gemm:{n}x{n}x{n}:{dtype}", impl): seconds * int(n)
        for n in sizes
        for dtype, seconds in (("f32", 3.0), ("bf16", 1.0))
        for impl in here["impls"]
    }
    broken = here["impls"][-1]
    times |= {
        (f"gemm:512x512x512:{dtype}", broken): status for dtype, status in (("f32", "wrong"), ("bf16", "crashed"))
    }
    repository.measure(times, commit=commit, facts=here["machine"], device=here["device"])
    output = repository.run("asv", "run", "--record-samples", "--bench", "gemm.Square", ok=(2,))
    assert "failed" in output
    by_asv = repository.results(commit, here["name"])
    described = json.loads((repository.folder / "results" / here["name"] / "machine.json").read_text())
    (repository.folder / "results" / here["name"] / f"{commit[:8]}-harness.json").unlink()
    results.ingest(*repository.conf(monkeypatch))
    ingested = repository.results(commit, here["name"])

    assert json.loads((repository.folder / "results" / here["name"] / "machine.json").read_text()) == described
    assert {k: v for k, v in by_asv.items() if k not in ("results", "durations")} == {
        k: v for k, v in ingested.items() if k not in ("results", "durations")
    }
    one, other = (
        {
            name: dict(zip(file["result_columns"], row, strict=False)) | {"started_at": None, "duration": None}
            for name, row in file["results"].items()
        }
        for file in (by_asv, ingested)
    )  # asv notes when it ran itself
    assert json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)  # as text, where NaN equals NaN


def test_a_configuration_of_its_own_is_not_needed():
    assert CONF["results_dir"] == "results" and CONF["html_dir"] == "site" and CONF["branches"] == ["HEAD"]
