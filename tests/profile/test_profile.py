"""Counted traffic: what is made of ncu's output, and what a run records; ncu itself is played by a script."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console

from analysis import counted
from benchmarks import profile
from benchmarks.engine import records
from benchmarks.engine.environments import Environment
from benchmarks.engine.profiled import SWEEP
from impls.contract import Device

DEVICE = Device("cuda", "NVIDIA H200", "sm_90", 2, 1 << 30)
PRODUCT, COPY = profile.PRODUCT, profile.COPY


def kernel(name: str, read: int = 0, write: int = 0, l2: int = 0, wgmma: int = 0, ns: int = 1000) -> tuple:
    values = {metric: "0" for metric in profile.METRICS}
    values |= {
        "dram__bytes_read.sum": f"{read:,}",
        "dram__bytes_write.sum": f"{write:,}",
        "lts__t_bytes.sum": f"{l2:,}",
        "sm__inst_executed_pipe_tensor.sum": f"{wgmma:,}",
        "sm__inst_executed_pipe_tensor_op_gmma.sum": f"{wgmma:,}",
        "gpu__time_duration.sum": f"{ns:,}",
    }
    return name, values


def log(*kernels: tuple, passes: int = 1, units: str = "byte") -> str:
    def row(*cells: str) -> str:
        return ",".join(f'"{cell}"' for cell in cells) + "\n"

    unit = [units if "bytes" in m else "ns" if "time" in m else "inst" for m in profile.METRICS]
    text = "==PROF== Connected to process 7 (/usr/bin/python3)\n"
    text += "==PROF== Disconnected from process 7\n"
    text += row("ID", "Kernel Name", "profiler__replayer_passes", *profile.METRICS) + row("", "", "pass", *unit)
    return text + "".join(row(str(i), n, str(passes), *v.values()) for i, (n, v) in enumerate(kernels))


def sweep(write: int = 0) -> tuple:
    return kernel(SWEEP, read=500_000_000, write=write)


def test_a_call_is_what_lies_between_two_sweeps() -> None:
    first, second = profile.read(
        log(
            *(sweep(64), kernel("memset_like", read=1), kernel("gemm", read=100, write=20, l2=300, wgmma=8), sweep(5)),
            *(sweep(0), kernel("copy", read=7, write=1), sweep(6)),
            sweep(9),  # the process died in this window
        )
    )
    assert first.counters() == {
        "dram_read_bytes": 101,
        "dram_write_bytes": 20,
        "write_back_bytes": 5,
        "l2_bytes": 300,
        "tensor_instructions": {"all": 8, "wgmma": 8},
        "busy_us": 2.0,
    }
    assert [k.name for k in second.call] == ["copy"]
    assert second.counters()["write_back_bytes"] == 6


LOGS = Path(__file__).parent / "logs"  # Nsight Compute 2025.3.1 on an H200, without the columns nobody reads


def test_a_real_log(monkeypatch: pytest.MonkeyPatch) -> None:
    # That log counts tensor instructions on floats (hmma) and on integers (imma) apart: there are none of the latter.
    pipes = {"all": "hmma", "wgmma": "gmma"}
    metrics = {name: f"sm__inst_executed_pipe_tensor_op_{pipe}.sum" for name, pipe in pipes.items()}
    monkeypatch.setattr(profile, "_INSTRUCTIONS", metrics)
    asked = tuple(m for m in profile.METRICS if "tensor" not in m)
    monkeypatch.setattr(profile, "METRICS", (*asked, *metrics.values()))
    copy, sweep, product, skinny, again = profile.read((LOGS / "one_pass.log").read_text())

    # 256 MiB are read and as many written, a tenth of them after the kernel has ended.
    moved = copy.counters()
    assert moved["dram_read_bytes"] == pytest.approx(256 << 20, rel=1e-3)
    assert moved["dram_write_bytes"] + moved["write_back_bytes"] == pytest.approx(256 << 20, rel=2e-3)
    assert moved["write_back_bytes"] > 0.1 * (256 << 20)
    assert moved["tensor_instructions"] == {"all": 0, "wgmma": 0}
    # A read of 32 MiB writes nothing of its own: what is seen is the method's.
    assert sweep.counters()["dram_read_bytes"] == pytest.approx(32 << 20, rel=1e-3)
    assert sweep.counters()["dram_write_bytes"] + sweep.counters()["write_back_bytes"] < 0.5e6
    # 4096^3: C is 33.6 MB, which the kernel's own writes miss by a quarter; 65536 FLOPs per instruction.
    for window in (product, again):
        counters = window.counters()
        assert counters["dram_write_bytes"] < 0.8 * 2 * 4096**2
        assert counters["dram_write_bytes"] + counters["write_back_bytes"] == pytest.approx(2 * 4096**2, rel=0.02)
        assert 2 * 4096**3 / counters["tensor_instructions"]["wgmma"] == 2 * 64 * 128 * 16 / 4
    # 16 x 8192 x 8192: the weight is read once.
    assert skinny.counters()["dram_read_bytes"] == pytest.approx(2 * (8192**2 + 16 * 8192), rel=1e-3)


def test_a_real_log_of_several_passes_is_refused() -> None:
    with pytest.raises(profile.Unreadable, match="8 passes"):
        profile.read((LOGS / "eight_passes.log").read_text())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "profiled nothing"),
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "ERR_NVGPUCTRPERM"),
        (log(sweep(), sweep(), passes=2), "2 passes"),
        (log(sweep(), sweep(), units="Mbyte"), "'Mbyte'"),
        (log(sweep()).replace("lts__t_bytes.sum", "other"), "no lts__t_bytes.sum"),
        (log(sweep()).replace('"500,000,000"', '"n/a"'), "no number"),
    ],
)
def test_what_cannot_be_trusted_is_refused(text: str, reason: str) -> None:
    with pytest.raises(profile.Unreadable, match=reason):
        profile.read(text)


def result(impl: str, case: str, status: str, run: str, **fields: object) -> dict:
    line = {"kind": "result", "run": run, "case": case, "impl": impl, "replica": 0, "regime": "burst", "status": status}
    return line | fields


def test_what_was_last_found_of_a_program_counts() -> None:
    loaded = records.Loaded(
        [
            result("a.b", "gemm:1x1x1:f32", "wrong", "20260102T000000-aaaa"),
            result("a.b", "gemm:1x1x1:f32", "ok", "20260101T000000-aaaa"),
            result("a.c", "gemm:1x1x1:f32", "wrong", "20260101T000000-aaaa"),
            result("a.c", "gemm:1x1x1:f32", "ok", "20260102T000000-aaaa"),
            result("a.d", "gemm:1x1x1:f32", "ok", "20260102T000000-aaaa", regime="sustained"),
        ]
    )
    assert profile.judged(loaded) == {("a.b", "gemm:1x1x1:f32"): False, ("a.c", "gemm:1x1x1:f32"): True}


NCU = """
#!{python}
# Plays Nsight Compute and the process it watches: answers what the test prepared for the job's first program.
import json, shutil, sys
from pathlib import Path
if "--version" in sys.argv:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1)")
    sys.exit()
arguments = sys.argv[1:]
assert arguments[arguments.index("--cache-control") + 1] == "none"
assert "dram__bytes_write.sum" in arguments[arguments.index("--metrics") + 1]
job = json.loads(Path(arguments[-2]).read_text())
prepared = Path({prepared!r}) / job["programs"][0]["impl"].partition(".")[0]
if (prepared / "answers").exists():
    shutil.copy(prepared / "answers", arguments[-1])
    shutil.copy(prepared / "log", arguments[arguments.index("--log-file") + 1])
print("the end of its output")
sys.exit(3)
"""


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of answers by stack, and an ``ncu`` on PATH that gives them."""
    script = tmp_path / "bin" / "ncu"
    script.parent.mkdir()
    script.write_text(textwrap.dedent(NCU).lstrip().format(python=sys.executable, prepared=str(tmp_path / "prepared")))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    return tmp_path / "prepared"


def prepare(prepared: Path, stack: str, answers: list[dict], text: str) -> None:
    (prepared / stack).mkdir(parents=True)
    lines = [{"reason": None, "config": {"tile": 1}, "window": None, "status": "ok"} | answer for answer in answers]
    (prepared / stack / "answers").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (prepared / stack / "log").write_text(text)


def profiled(tmp_path: Path, programs: list[profile.Program], missing: dict[str, str]) -> list[dict]:
    stacks = {impl.partition(".")[0] for impl, _ in (*programs, PRODUCT, COPY)} - set(missing)
    writer = records.Writer(tmp_path / "records" / "r1.jsonl", "r1")
    run = profile.Run(
        programs,
        device=DEVICE,
        environments={s: Environment(s, Path(sys.executable), {}, None, "mapped") for s in stacks},
        missing=missing,
        writer=writer,
        seed=1,
    )
    assert run.run(lambda _: None)
    writer.close()
    return [line for line in records.read(writer.path).lines if line["kind"] == "profile"]


def test_a_run_records_every_program_once(prepared: Path, tmp_path: Path) -> None:
    other = "gemm:16x8192x8192:bf16:nt"
    wgmmas = 4 * 4096**3 // (64 * 128 * 16)
    prepare(
        prepared,
        "cublas",
        [
            {"impl": PRODUCT[0], "case": PRODUCT[1], "window": 0},
            {"impl": "cublas.default", "case": other, "status": "failed", "reason": "RuntimeError: x", "window": 1},
            {"impl": "cublas.searched", "case": other, "window": 2},
        ],
        log(
            *(sweep(), kernel("nvjet", read=10**8, write=10**7, wgmma=wgmmas), sweep(10**6)),
            *(sweep(), sweep()),
            *(sweep(3), kernel("a", read=50), kernel("b", read=60), sweep(70)),
        ),
    )
    programs = [("xla.default", other), ("cublas.default", other), ("cublas.searched", other), PRODUCT]
    lines = profiled(tmp_path, programs, {"xla": "xla has no environment here."})
    found = {(line["impl"], line["case"]): line for line in lines}
    assert len(found) == len(lines) == 5
    # The stacks as they were asked for, what calibrates first in its own.
    assert [line["impl"] for line in lines] == [programs[0][0], PRODUCT[0], programs[1][0], programs[2][0], COPY[0]]
    product, searched = found[PRODUCT], found["cublas.searched", other]
    assert product["status"] == "ok"
    assert product["counters"]["tensor_instructions"]["wgmma"] == wgmmas
    assert product["ncu"] == "2025.3.1.0"
    assert (searched["kernels"], searched["residue_bytes"]) == (["a", "b"], 3)
    assert searched["counters"]["write_back_bytes"] == 70
    assert searched["config"] == {"tile": 1}
    assert found["cublas.default", other]["reason"] == "RuntimeError: x"
    assert found["cublas.default", other]["counters"] is None
    assert found["xla.default", other]["status"] == "unsupported"
    # Nothing was prepared for the copy: its process ended at once.
    assert found[COPY]["status"] == "failed"
    assert "status 3; it last said: the end of its output" in found[COPY]["reason"]

    console = Console(width=140, record=True, file=(tmp_path / "out").open("w"))
    console.print(counted.rich_table(lines))
    shown = console.export_text()
    # Read 100.0 MB, written 11.0, 1.0 of it after the call: 1.103 of three matrices of 33.55 MB.
    assert all(cell in shown for cell in ("100.0", "11.0", "1.103", "65536"))
    assert "failed. RuntimeError: x" in shown


def test_a_budget_ends_the_run_between_stacks_and_in_one(prepared: Path, tmp_path: Path) -> None:
    environment = Environment("cublas", Path(sys.executable), {}, None, "mapped")
    prepared.parent.joinpath("bin", "ncu").write_text(
        f"#!{sys.executable}\nimport sys, time\nprint('Version 1')\nif '--version' not in sys.argv: time.sleep(60)\n"
    )
    writer = records.Writer(tmp_path / "r1.jsonl", "r1")
    run = profile.Run(
        [("cublas.searched", PRODUCT[1])],
        device=DEVICE,
        environments=dict.fromkeys(("cublas", "ceilings"), environment),
        missing={},
        writer=writer,
        seed=1,
        budget_s=1.0,
    )
    begin = time.monotonic()
    assert not run.run(lambda _: None)
    assert time.monotonic() - begin < 30
    writer.close()
    assert [line["impl"] for line in run.lines] == [PRODUCT[0], "cublas.searched"]
    assert all("it was ended after 1 s" in line["reason"] for line in run.lines)
    assert records.read(writer.path).lines[-1]["interrupted"]


def test_what_time_did_not_suffice_for_has_no_line(prepared: Path, tmp_path: Path) -> None:
    prepare(prepared, "cublas", [{"impl": PRODUCT[0], "case": PRODUCT[1], "status": "left"}], "")
    environment = Environment("cublas", Path(sys.executable), {}, None, "mapped")
    writer = records.Writer(tmp_path / "r1.jsonl", "r1")
    run = profile.Run(
        [PRODUCT],
        device=DEVICE,
        environments=dict.fromkeys(("cublas", "ceilings"), environment),
        missing={},
        writer=writer,
        seed=1,
    )
    assert not run.run(lambda _: None)
    writer.close()
    assert [line["impl"] for line in run.lines] == [COPY[0]]


def test_a_run_that_counts_is_not_gone_on_with(prepared: Path, tmp_path: Path) -> None:
    writer = records.Writer(records.folder(tmp_path, "h200") / "r1.jsonl", "r1")
    writer.append("run", plan={"regime": records.COUNTED})
    writer.close()
    assert records.unfinished(tmp_path, "h200") is None


def test_counters_of_unknown_devices_are_not_guessed(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(profile.NoProfiler, match="sm_120"):
        profile.Run(
            [],
            device=Device("cuda", "other", "sm_120", 2, 1),
            environments={},
            missing={},
            writer=None,  # type: ignore[arg-type]
            seed=1,
        )
