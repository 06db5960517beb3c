"""Each check is held against places and settings made here; the whole diagnosis against fake stacks."""

import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from benchmarks.engine import doctor, environments, machine
from benchmarks.engine.environments import Environment, EnvironmentFailure, Missing
from benchmarks.engine.machine import Cpu

Usage = namedtuple("Usage", "total used free")


def free(monkeypatch, nbytes):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2 * nbytes, nbytes, nbytes))


def cpu(**changes):
    fields = {"features": frozenset({"avx2", "avx512f"}), "threads": 2, "cores": 2} | changes
    return Cpu("Chip", None, "x86_64", sockets=1, **fields)


def test_cpu():
    check = doctor.check_cpu(cpu(hypervisor="KVM", cores=1))
    assert check.ok
    for part in ("Chip", "1 cores, 2 threads", "KVM", "avx512f", "no AMX"):
        assert part in check.found
    assert "no AVX-512" not in check.found


def test_cpu_of_which_nothing_is_known():
    check = doctor.check_cpu(cpu(features=frozenset()))
    assert not check.ok
    assert "lscpu" in check.remedy


@pytest.mark.parametrize(
    ("text", "ok"), [("max 100000", True), ("200000 100000", True), ("150000 100000", False), (None, True)]
)
def test_quota_below_the_threads(tmp_path, text, ok):
    if text:
        (tmp_path / "cpu.max").write_text(text)
    check = doctor.check_quota(tmp_path, 2)
    assert check.ok is ok
    if not ok:
        assert "1.5 CPUs for 2 threads" in check.found
        assert "taskset -c 0-0" in check.remedy


def test_room(tmp_path, monkeypatch):
    deep = tmp_path / "not" / "there" / "yet"
    free(monkeypatch, 3 << 30)
    assert doctor.check_room("cache", deep, 2 << 30, "Free space.").ok
    check = doctor.check_room("cache", deep, 4 << 30, "Free space.")
    assert (check.ok, check.remedy) == (False, "Free space.")
    assert "3.0 GiB free, 4.0 GiB may be needed" in check.found
    assert not deep.exists()


def test_room_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    check = doctor.check_room("results", tmp_path / "file" / "results", 1, "Name another folder.")
    assert not check.ok
    assert "cannot be written" in check.found


def test_shared_memory(tmp_path, monkeypatch):
    free(monkeypatch, 64 << 20)
    check = doctor.check_shared_memory(tmp_path)
    assert not check.ok
    assert "0.06 GiB free" in check.found
    free(monkeypatch, 8 << 30)
    assert doctor.check_shared_memory(tmp_path).ok
    assert not doctor.check_shared_memory(tmp_path / "nowhere").ok


def test_variables():
    assert doctor.check_variables({"PATH": "/bin", "OMP_NUM_THREADS": "1"}).ok
    check = doctor.check_variables({"ONEDNN_MAX_CPU_ISA": "AVX2", "XLA_FLAGS": "--xla_x=1"})
    assert not check.ok
    assert "ONEDNN_MAX_CPU_ISA=AVX2, XLA_FLAGS=--xla_x=1" in check.found


@pytest.mark.parametrize(("governor", "ok"), [("performance", True), ("powersave", False), (None, True)])
def test_governor(tmp_path, governor, ok):
    if governor:
        file = tmp_path / "cpu0" / "cpufreq" / "scaling_governor"
        file.parent.mkdir(parents=True)
        file.write_text(governor)
    assert doctor.check_governor(tmp_path).ok is ok


def test_load_names_who_works():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        check = doctor.check_load(1.0)
    finally:
        busy.kill()
        busy.wait()
    assert not check.ok
    assert "python" in check.found


def test_gpu_without_nvml(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ())
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/dev/nvidiactl")
    check = doctor.check_gpu()
    assert not check.ok
    assert "ridgemark[gpu]" in check.remedy
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert doctor.check_gpu().ok


# --- stacks


@pytest.fixture
def stacks(monkeypatch):
    """Fake environments: stack -> what ``find`` answers, or the trouble that its imports make."""

    def install(found, trouble=None):
        def load_needs(stack, family):
            if isinstance(found[stack], EnvironmentFailure):
                raise found[stack]
            return environments.Needs(stack, family, ">=3.11", (), Path("x.lock"), stack, {}, (), stack)

        monkeypatch.setattr(doctor.registry, "stacks", lambda: dict.fromkeys(found))
        monkeypatch.setattr(environments, "load_needs", load_needs)
        monkeypatch.setattr(environments, "find", lambda stack, family: found[stack])
        monkeypatch.setattr(environments, "import_trouble", lambda python, needs: (trouble or {}).get(needs.stack))

    return install


def built(stack, origin="built"):
    return Environment(stack, Path(f"/envs/{stack}/bin/python"), {}, "0" * 12, origin)


def test_stack_states(stacks):
    stacks(
        {
            "good": built("good"),
            "absent": Missing("Not built.", "Build it."),
            "other": EnvironmentFailure("No [cpu] section.", "Leave it out."),
            "rotten": built("rotten"),
            "rotten_map": built("rotten_map", "mapped"),
        },
        {"rotten": "ImportError: libx.so", "rotten_map": "ImportError: liby.so"},
    )
    assert doctor.check_stack("good", "cpu") == doctor.Check("good (cpu)", True, "built: good")
    assert doctor.check_stack("absent", "cpu") == doctor.Check("absent (cpu)", False, "Not built.", "Build it.")
    assert doctor.check_stack("other", "cpu").found == "No [cpu] section."
    rotten = doctor.check_stack("rotten", "cpu")
    assert not rotten.ok
    assert "libx.so" in rotten.found
    assert "/envs/rotten and build" in rotten.remedy
    assert "interpreters.toml" in doctor.check_stack("rotten_map", "cpu").remedy


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setenv("RIDGEMARK_DEVICE", "cpu")
    monkeypatch.delenv("RIDGEMARK_INTERPRETERS", raising=False)


def test_baseline_can_run_without_the_other_stacks(stacks, on_a_cpu, tmp_path):
    stacks({"blas": built("blas"), "xla": Missing("Not built.", "Build it.")})
    diagnosis = doctor.diagnose(tmp_path)
    assert diagnosis.baseline_ok
    assert {c.name: c.ok for c in diagnosis.checks if "(cpu)" in c.name} == {"blas (cpu)": True, "xla (cpu)": False}
    assert all(c.remedy for c in diagnosis.checks if not c.ok)


@pytest.mark.parametrize(
    "found", [{"blas": Missing("Not built.", "Build it."), "xla": built("xla")}, {"xla": built("xla")}]
)
def test_baseline_cannot_run_without_its_stack(stacks, on_a_cpu, tmp_path, found):
    stacks(found)
    assert not doctor.diagnose(tmp_path).baseline_ok


def test_baseline_cannot_run_where_results_cannot_be_written(stacks, on_a_cpu, tmp_path):
    (tmp_path / "file").write_text("")
    stacks({"blas": built("blas")})
    assert not doctor.diagnose(tmp_path / "file" / "results").baseline_ok


def test_device_that_is_not_there(stacks, monkeypatch, tmp_path):
    stacks({"blas": built("blas")})
    monkeypatch.setenv("RIDGEMARK_DEVICE", "tpu")
    diagnosis = doctor.diagnose(tmp_path)
    assert not diagnosis.baseline_ok
    assert diagnosis.checks[-1] == doctor.Check(
        "RIDGEMARK_DEVICE", False, "There is no device kind 'tpu'.", "Write cpu or cuda."
    )
