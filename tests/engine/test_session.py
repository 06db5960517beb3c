"""Sessions over implementations that cheat, crash and hang: each ends in the right status, and the run goes on."""

import dataclasses
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.engine import machine, records, session, trial
from benchmarks.engine.environments import Environment
from benchmarks.engine.progress import Progress
from impls import registry
from impls.contract import Device
from impls.workloads.base import parse_case

CASE = "gemm:192x96x160:f32"
DEADLINES = trial.Deadlines(prepare_s=4.0, request_s=8.0)

# implementation -> (status, what its reason says). Everything in tests/adversaries must be here.
ENDS = {
    "honest": ("ok", None),
    "chatty": ("ok", None),
    "leaves_child": ("ok", None),
    "hangs_in_release": ("ok", None),
    "memoises_until_refill": ("wrong", "cannot do the work in under"),
    "beforehand": ("wrong", "cannot do the work in under"),
    "early": ("wrong", "never written or not finite|compared elements are off"),
    "deferred": ("wrong", "the work was not over|compared elements are off|never written"),
    "zeros": ("wrong", "compared elements are off"),
    "first_tile": ("wrong", "compared elements are off"),
    "sampled_rows": ("wrong", "compared elements are off"),
    "lower_precision": ("wrong", "compared elements are off"),
    "unwritten": ("wrong", "1 of 18432 elements never written or not finite"),
    "writes_inputs": ("wrong", "compared elements are off|wrote to its input A"),
    "wrong_shape": ("failed", r"float32\[96, 192\], not as float32\[192, 96\]"),
    "wrong_dtype": ("failed", "dtype|f64|float64"),
    "no_output": ("failed", "C"),
    "last_output": ("wrong", "compared elements are off"),
    "first_call_only": ("wrong", "compared elements are off"),
    "skips_calls": ("wrong", "never written|compared elements are off"),
    "skips_unpoisoned": ("wrong", "compared elements are off"),
    "memoises_pointers": ("wrong", "compared elements are off"),
    "killed": ("crashed", "SIGKILL"),
    "segfaults": ("crashed", "SIGSEGV"),
    "segfaults_in_prepare": ("crashed", "SIGSEGV"),
    "aborts": ("crashed", "SIGABRT"),
    "exits": ("crashed", "code 3"),
    "exits_in_prepare": ("crashed", "code 3"),
    "hangs_in_prepare": ("timeout", "4"),
    "hangs_in_run": ("timeout", "8"),
    "stops_itself": ("timeout", "8"),
    "eats_memory": ("crashed", "memory"),
    "raises_in_prepare": ("failed", "no tile fits"),
    "raises_in_run": ("failed", "launch failed"),
    "refuses_late": ("unsupported", "Its compiler knows no such tile."),
    "closes_descriptors": ("crashed", "."),
    "unreportable_config": ("failed", "reported"),
}


@pytest.fixture(autouse=True)
def adversaries(monkeypatch):
    monkeypatch.setenv("RIDGEMARK_EXTRA_STACKS", "tests.adversaries")
    registry.refresh()
    yield
    monkeypatch.undo()
    registry.refresh()


def run(
    path: Path,
    implementations,
    cases=(CASE,),
    budget_s=0.0,
    already=None,
    deadlines=DEADLINES,
    measure=True,
    without=None,
    log=None,
):
    writer = records.Writer(path, path.stem)
    device = dataclasses.replace(machine.device("cpu"), threads=1)
    plan = session.Plan(tuple(map(parse_case, cases)), tuple(implementations), budget_s, seed=7, without=without or {})
    environment = Environment("cheats", Path(sys.executable), {}, None, "mapped")
    one = session.Session(
        plan,
        device=device,
        environments={"cheats": environment},
        missing={},
        writer=writer,
        already=already,
        deadlines=deadlines,
    )
    with Progress(Console(file=log or open(os.devnull, "w"), width=200), len(cases)) as progress:
        finished = one.run(progress, measure=measure)
    writer.close()
    return finished, records.read(path)


@pytest.mark.slow
def test_every_adversary_ends_in_its_status_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "HEADROOM_BYTES", 2**28)
    implementations = registry.select(["cheats"])
    finished, loaded = run(tmp_path / "r1.jsonl", implementations)
    assert finished
    results = {r["impl"].removeprefix("cheats."): r for r in records.results(loaded)}
    assert set(results) == {i.name.removeprefix("cheats.") for i in implementations}
    undecided = set(results) - set(ENDS)
    assert not undecided, f"give {undecided} an end in ENDS"
    got = {name: (r["status"], r["reason"]) for name, r in results.items()}
    wrong = {
        name: got[name]
        for name, (status, reason) in ENDS.items()
        if got[name][0] != status or (reason is not None and not _says(reason, got[name][1]))
    }
    assert wrong == {}
    for name, result in results.items():
        assert bool(result["rounds"]) == (result["status"] == "ok"), name
    assert loaded.lines[-1]["kind"] == "end"
    assert not any(r["flags"] for name, r in results.items() if name != "hangs_in_release")


def _says(pattern, reason):
    return reason is not None and re.search(pattern, reason) is not None


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_a_run_goes_on_after_its_end_and_keeps_what_was_measured(tmp_path, ended_by):
    """A real signal in the middle of the rounds, Ctrl-C or a time limit's last; then, from the records alone as on
    another machine, the same plan is resumed."""
    program = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from impls import registry
        from tests.engine import test_session as t
        honest = registry.find("cheats.honest", "gemm")
        finished, _ = t.run(Path(sys.argv[1]), [honest], cases=t.TWO_CASES, budget_s=60.0)
        sys.exit(0 if finished else 130)
    """)
    path = records.folder(tmp_path / "here", "one") / "r1.jsonl"
    child = subprocess.Popen(
        [sys.executable, "-c", program, path], env=os.environ | {"RIDGEMARK_EXTRA_STACKS": "tests.adversaries"}
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and any(line["kind"] == "result" for line in records.read(path).lines):
            break
        time.sleep(0.02)
    child.send_signal(ended_by)
    assert child.wait(timeout=30) == (130 if ended_by == signal.SIGINT else -signal.SIGKILL)
    if ended_by == signal.SIGKILL:
        with path.open("ab") as file:
            file.write(b'{"schema":1,"kind":"res')  # as a kill in the middle of a write leaves it
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    path = records.unfinished(tmp_path / "there", "one")
    loaded = records.read(path)
    assert (loaded.lines[-1]["kind"] == "end") == (ended_by == signal.SIGINT)
    assert not any(line.get("interrupted") is False for line in loaded.lines)
    done = set(records.finished_cases(loaded))
    assert TWO_CASES[0] in done and TWO_CASES[1] not in done
    finished, loaded = run(path, [registry.find("cheats.honest", "gemm")], cases=TWO_CASES, already=loaded)
    assert finished
    assert set(records.finished_cases(loaded)) == set(TWO_CASES)
    assert len([r for r in loaded.lines if r["kind"] == "result" and r["case"] == TWO_CASES[0]]) == 1
    assert not loaded.repairs and records.unfinished(tmp_path / "there", "one") is None


TWO_CASES = (CASE, "gemm:1024x1024x1024:f32")


def test_a_case_that_cannot_fit_is_refused_without_being_made(tmp_path):
    finished, loaded = run(
        tmp_path / "r1.jsonl", [registry.find("cheats.honest", "gemm")], cases=("gemm:900000x900000x64:f32",)
    )
    (result,) = records.results(loaded)
    assert finished
    assert result["status"] == "unsupported" and "GiB" in result["reason"]


def test_an_interrupted_case_of_which_only_a_refusal_is_known_is_measured_on_resumption(tmp_path, monkeypatch):
    honest, refuses = registry.find("cheats.honest", "gemm"), registry.find("cheats.zeros", "gemm")
    monkeypatch.setattr(type(refuses), "refuses", lambda self, case, device: "No.")

    def interrupt(*_):
        raise KeyboardInterrupt

    path = tmp_path / "r1.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(trial.Trial, "_check_all", interrupt)
        finished, loaded = run(path, [honest, refuses])
    assert not finished and set(records.finished_cases(loaded)) == set()
    finished, loaded = run(path, [honest, refuses], already=loaded)
    assert finished
    assert {r["impl"]: r["status"] for r in records.results(loaded)} == {
        "cheats.honest": "ok",
        "cheats.zeros": "unsupported",
    }


SMALL_CASES = tuple(f"gemm:{m}x32x16:f32" for m in (32, 48, 64, 80))


def test_what_a_case_leaves_out_is_not_run_there_and_no_news(tmp_path):
    honest, chatty = registry.find("cheats.honest", "gemm"), registry.find("cheats.chatty", "gemm")
    log = io.StringIO()
    without = {SMALL_CASES[0]: ["cheats.chatty"]}
    _, loaded = run(tmp_path / "r1.jsonl", [honest, chatty], cases=SMALL_CASES[:2], without=without, log=log)
    ran = [(r["case"], r["impl"]) for r in records.results(loaded)]
    assert ran == [
        (SMALL_CASES[0], "cheats.honest"),
        (SMALL_CASES[1], "cheats.honest"),
        (SMALL_CASES[1], "cheats.chatty"),
    ]
    assert next(line for line in loaded.lines if line["kind"] == "run")["plan"]["without"] == without
    told = [line for line in log.getvalue().splitlines() if "left" in line and "gemm" in line]
    assert [re.sub(r"\d+ s", "_ s", line) for line in told[:2]] == [
        f"1/2 {SMALL_CASES[0]}: 1 ok; _ s, some _ s left",
        f"2/2 {SMALL_CASES[1]}: 2 ok; _ s, some _ s left",
    ]


def test_what_hangs_costs_its_time_in_two_cases_only(tmp_path):
    honest, hangs = registry.find("cheats.honest", "gemm"), registry.find("cheats.hangs_in_prepare", "gemm")
    deadlines = trial.Deadlines(prepare_s=1.0, request_s=8.0)
    start = time.monotonic()
    finished, loaded = run(tmp_path / "r1.jsonl", [honest, hangs], cases=SMALL_CASES, deadlines=deadlines)
    assert finished and time.monotonic() - start < 90
    hung = {r["case"]: (r["status"], r["reason"]) for r in records.results(loaded) if r["impl"] == hangs.name}
    late = ("timeout", "Prepare took longer than 1 s and was ended.")
    left_out = ("unsupported", "Not tried: it ran out of time in 2 cases of this run.")
    assert hung == dict(zip(SMALL_CASES, [late, late, left_out, left_out], strict=True))
    assert {r["status"] for r in records.results(loaded) if r["impl"] == honest.name} == {"ok"}


def test_check_judges_and_times_nothing(tmp_path):
    honest, zeros = registry.find("cheats.honest", "gemm"), registry.find("cheats.zeros", "gemm")
    _, loaded = run(tmp_path / "r1.jsonl", [honest, zeros], measure=False)
    results = {r["impl"]: r for r in records.results(loaded)}
    assert results["cheats.honest"]["status"] == "checked" and results["cheats.honest"]["rounds"] == []
    assert 0 < results["cheats.honest"]["errors"]["C"]["worst"] < 1
    assert results["cheats.zeros"]["status"] == "wrong"


def test_what_a_device_only_simulates_is_judged_and_never_timed(tmp_path, monkeypatch):
    honest = registry.find("cheats.honest", "gemm")
    monkeypatch.setattr(type(honest), "simulated_on", ("cpu",))
    _, loaded = run(tmp_path / "r1.jsonl", [honest])
    [result] = [r for r in records.results(loaded) if r["impl"] == "cheats.honest"]
    assert result["status"] == "checked" and result["rounds"] == []
    monkeypatch.setattr(type(honest), "simulated_on", ("cuda",))
    _, loaded = run(tmp_path / "r2.jsonl", [honest])
    assert [r["status"] for r in records.results(loaded)] == ["ok"]


@pytest.mark.parametrize("gone", [True, False])
def test_what_fails_because_the_gpu_is_gone_is_measured_again_on_resumption(tmp_path, monkeypatch, gone):
    """Made up: a session on a GPU whose trials end as they do when every operation fails."""
    failed = {"case": CASE, "impl": "cheats.honest", "replica": 0, "status": "failed", "reason": "CUDA says no."}
    asked = []

    class Trial:
        told = "1 failed"

        def __init__(self, *_, **__):
            self.interrupted = False

        def run(self, available_s):
            asked.append(self)
            return [failed | {"complete": True}]

    monkeypatch.setattr(trial, "Trial", Trial)
    monkeypatch.setattr(trial, "prepare_ahead", lambda trials: None)
    monkeypatch.setattr(machine, "gpu_is_gone", lambda: gone)
    monkeypatch.setattr(machine, "physical_limits", lambda device: None)
    monkeypatch.setattr(machine, "device", lambda kind: Device("cuda", "Made up", "sm_0", 1, 2**33, frozenset()))
    honest = registry.find("cheats.honest", "gemm")
    monkeypatch.setattr(type(honest), "devices", ("cuda",))
    finished, loaded = run(tmp_path / "r1.jsonl", [honest], cases=TWO_CASES)
    assert finished is not gone and len(asked) == (1 if gone else 2)
    assert loaded.lines[-1]["kind"] == "end" and loaded.lines[-1]["interrupted"] is gone
    assert set(records.finished_cases(loaded)) == (set() if gone else {CASE})


def test_a_gpu_that_is_not_there_is_gone():
    assert machine.gpu_is_gone() is not bool(machine.gpus())
