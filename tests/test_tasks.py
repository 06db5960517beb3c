"""The tasks' arguments: a results folder that is given is the one that is measured into, published and reported."""

import importlib.util
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
pytest.importorskip("nox", reason="the tasks need nox")


@cache
def noxfile():
    spec = importlib.util.spec_from_file_location("tasks", ROOT / "noxfile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tasks(monkeypatch):
    """The tasks, and a list of what they would run."""
    monkeypatch.chdir(ROOT)
    ran = []
    monkeypatch.setattr(noxfile(), "harness", lambda session: None)
    monkeypatch.setattr(noxfile(), "run", lambda session, tool, *given, codes=(0,): ran.append([tool, *given]))
    return noxfile(), ran


@pytest.mark.parametrize(
    ("given", "folder", "compared"),
    [
        ([], "results", ["--cases", "quick", "--budget", "3m"]),
        (["--out", "mine"], "mine", ["--cases", "quick", "--budget", "3m"]),
        (["--out=mine", "--gemm", "8x8x8:f32"], "mine", ["--gemm", "8x8x8:f32"]),
        (["--cases", "standard", "--out", "mine"], "mine", ["--cases", "standard"]),
    ],
)
def test_the_results_folder_reaches_measurement_site_and_report(tasks, given, folder, compared):
    module, ran = tasks
    module.compare.func(SimpleNamespace(posargs=given, log=lambda text: None))
    assert ran == [
        ["ridgemark", "compare", "--out", folder, *compared],
        ["python", "-m", "benchmarks.tracking", "publish", "--out", folder],
        ["ridgemark", "report", folder, "--out", "site/report"],
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], [["python", "-m", "benchmarks.tracking", "ingest"], ["asv", "show", "HEAD"]]),
        (
            ["run", "-b", "gemm.Square"],
            [
                ["asv", "run", "--record-samples", "-b", "gemm.Square"],
                ["python", "-m", "benchmarks.tracking", "ingest"],
            ],
        ),
        (
            ["publish"],
            [
                ["python", "-m", "benchmarks.tracking", "publish", "--out", "results"],
                ["ridgemark", "report", "results", "--out", "site/report"],
            ],
        ),
    ],
)
def test_asv_works_on_files_that_are_up_to_date_and_publishes_the_offline_site(tasks, given, expected):
    module, ran = tasks
    module.asv.func(SimpleNamespace(posargs=given, log=lambda text: None))
    assert ran == expected
