"""``ridgemark report``: files, messages, exit codes; it imports no stack; its appetite for 100,000 results."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tests.report.conftest import CASE, HOSTILE, Report


def ridgemark(*arguments, cwd):
    program = "from benchmarks.cli import main; main()"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={"COLUMNS": "400", "PATH": ""})


def store(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in records.lines))


def test_results_in_the_working_folder_become_a_report(full, tmp_path):
    store(tmp_path / "results" / "records" / "box" / "r1.jsonl", full)
    done = ridgemark("report", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.startswith("note: 9 results are faster than the ceilings")
    assert done.stdout.strip() == "Report: site/report/index.html"
    made = Report(tmp_path / "site" / "report")
    assert any(d["choice"] == "xla.jit" for d in made.rows("decisions"))


def test_several_paths_and_another_folder(records, tmp_path):
    records.paired(CASE, {"xla.jit": 0.5}, rounds=12)
    store(tmp_path / "one.jsonl", records)
    records.lines = [line | {"run": "r2"} for line in records.lines if line["kind"] != "result"]
    records.paired("gemm:64x64x64:f32", {"xla.jit": 0.5}, rounds=12, run="r2")
    store(tmp_path / "more" / "two.jsonl", records)
    done = ridgemark("report", "one.jsonl", "more", "--out", "here", cwd=tmp_path)
    assert done.returncode == 0
    assert Report(tmp_path / "here").json["counts"]["runs"] == 2
    assert "note: No ceilings were measured" in done.stderr


def test_an_empty_folder_gets_a_report_that_says_so_and_exit_code_2(tmp_path):
    (tmp_path / "results").mkdir()
    done = ridgemark("report", cwd=tmp_path)
    assert done.returncode == 2
    assert "results: no results yet. Measure some with: ridgemark compare" in done.stderr
    assert "There is no result in these records." in Report(tmp_path / "site" / "report").html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "There is no nowhere. Give a records file or a results folder."),
        (["--out", "taken"], "Cannot write taken"),
    ],
)
def test_what_cannot_be_done_is_a_sentence_and_exit_code_2(full, tmp_path, arguments, message):
    store(tmp_path / "results" / "r1.jsonl", full)
    (tmp_path / "taken").write_text("")
    done = ridgemark("report", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_notes_with_markup_and_control_characters_stay_text_in_the_terminal(records, tmp_path):
    records.lines[0]["run"] = f"\x1b[2J[bold]{HOSTILE}"
    records.result(CASE, "xla.jit", [1.0] * 8)
    store(tmp_path / "results" / "r.jsonl", records)
    done = ridgemark("report", cwd=tmp_path)
    assert done.returncode == 0
    assert "[bold]</script>" in done.stderr and "\x1b" not in done.stderr


def test_no_stack_is_imported(full, tmp_path):
    store(tmp_path / "results" / "r1.jsonl", full)
    needs = ("torch", "jax", "triton", "tvm", "iree", "cutlass", "llvmlite", "cupti", "pynvml")
    program = textwrap.dedent(f"""
        import sys
        from benchmarks.cli import app
        app(["report"], standalone_mode=False)
        print([name for name in {needs!r} if name in sys.modules])
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.slow
def test_100_000_results_fit_a_gibibyte(tmp_path):
    """Two machines, 2,500 cases, 20 results each, 10 rounds of 3 samples."""
    rng = np.random.default_rng(0)
    impls = ["blas.default", *(f"stack{i}.variant" for i in range(18))]
    common = {
        "schema": 1, "kind": "result", "regime": "warm", "status": "ok", "method": "perf_counter", "prepare_s": 0.5,
        "first_call_s": 0.1, "peak_memory_bytes": 1 << 20, "errors": {"C": {"max_abs": 1e-6, "worst": 0.25}}, "seed": 1,
        "traffic_bytes": None, "workspace_bytes": 0, "config": {"threads": 2}, "flags": [], "complete": True,
    }  # fmt: skip
    path = tmp_path / "results" / "big.jsonl"
    path.parent.mkdir()
    with path.open("w") as file:
        for machine in ("box", "node"):
            about = {"machine": {"name": machine}, "device": {"kind": "cpu", "name": machine, "threads": 2}}
            file.write(json.dumps({"schema": 1, "kind": "run", "run": machine} | about) + "\n")
            for m in range(1, 51):
                for n in range(1, 51):
                    times = 100.0 * np.exp(rng.normal(0, 0.02, (20, 10, 3)) + rng.normal(0, 0.3, (20, 1, 1))).round(4)
                    for impl, replica, taken in zip([*impls, impls[0]], [0] * 19 + [1], times.tolist(), strict=True):
                        rounds = [{"round": i, "order": 0, "t0": 1.5, "samples_us": row} for i, row in enumerate(taken)]
                        key = {"run": machine, "case": f"gemm:{m}x{n}x64:f32", "impl": impl, "replica": replica}
                        file.write(json.dumps(common | key | {"rounds": rounds}) + "\n")
    program = textwrap.dedent("""
        import resource
        from benchmarks.cli import app
        app(["report"], standalone_mode=False)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert float(done.stdout.splitlines()[-1]) < 1024, done.stderr
    made = Report(tmp_path / "site" / "report")
    assert made.json["counts"]["results"] == 2 * 2500 * 19
    assert len(made.html) < 10e6 and len(made.markdown) < 65536
