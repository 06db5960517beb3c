"""What a call's time is, from made-up activity; blocks and sustained calls over a made-up device and tracer."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.engine.timing import cupti, gpu
from impls.contract import Program


def spans(activity, *windows):
    return cupti.attribute(sorted(activity), windows)


def test_span_runs_from_first_start_to_last_end_and_busy_is_the_union():
    # 10-20 and 15-40 overlap, 50-60 follows a gap of 10: span 50, busy 30 + 10.
    (call,) = spans([(10_000, 20_000, "a"), (15_000, 40_000, "b"), (50_000, 60_000, "c")], (0, 100_000))
    assert call == {"span_us": 50.0, "busy_us": 40.0, "kernels": 3}


def test_activity_belongs_to_the_window_it_starts_in():
    first, second = spans([(10, 20, "a"), (210, 250, "b")], (0, 100), (200, 300))
    assert (first["span_us"], second["span_us"]) == (0.01, 0.04)


def test_the_harness_own_kernels_are_not_counted():
    (call,) = spans([(10, 20, "ridgemark_read"), (30, 50, "gemm"), (60, 90, "ridgemark_stamp")], (0, 100))
    assert call == {"span_us": 0.02, "busy_us": 0.02, "kernels": 1}


def test_a_kernel_stamped_before_the_gate_opened_starts_when_it_opens():
    (call,) = spans([(0, 10_000, gpu.GATE), (500, 13_000, "gemm")], (0, 90_000))
    assert call["span_us"] == 3.0


def test_a_kernel_that_begins_while_the_gate_leaves_is_counted_from_its_own_start():
    (call,) = spans([(0, 10_000, gpu.GATE), (9_500, 13_000, "gemm")], (0, 90_000))
    assert call["span_us"] == 3.5


def test_the_wait_for_the_first_kernel_after_the_gate_is_not_counted():
    (call,) = spans([(0, 1000, gpu.GATE), (1700, 3000, "gemm")], (0, 9000))
    assert call["span_us"] == 1.3


@pytest.mark.parametrize("kind", [cupti.COPY, cupti.MEMSET])
def test_a_copy_or_memset_cannot_hide_behind_the_gate(kind):
    # Copied wholly before the gate opened (300 ns), and then a kernel of 1 us.
    (call,) = spans([(0, 1000, gpu.GATE), (500, 800, kind), (1000, 2000, "gemm")], (0, 9000))
    assert call["span_us"] == pytest.approx(1.3)
    # Half of it before, half after.
    (call,) = spans([(0, 1000, gpu.GATE), (500, 1500, kind)], (0, 9000))
    assert call["span_us"] == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["copy", "memset"])
def test_a_kernel_of_such_a_name_waits_for_the_gate_as_others_do(name):
    (call,) = spans([(0, 10_000, gpu.GATE), (500, 13_000, name)], (0, 90_000))
    assert call["span_us"] == 3.0


def test_a_call_that_did_nothing_is_an_error():
    with pytest.raises(cupti.NothingSeen):
        spans([(0, 10, "ridgemark_read")], (0, 100))


class Device:
    """Remembers what is done to it, in the tracer's time."""

    def __init__(self, log, waits=False):
        self.log, self.waits = log, waits

    def ramp_up(self):
        self.log.append("ramp")

    def flush_l2(self):
        self.log.append("flush")

    def stamp(self, which):
        pass

    def synchronize(self):
        self.log.append("idle")

    def stamps(self):
        """1.98 cycles a nanosecond, but for one multiprocessor that was asleep."""
        return np.array([[[0, 0]] * 3, [[1980, 1000], [1980, 1000], [990, 1000]]], np.uint64)

    @contextlib.contextmanager
    def gated(self):
        self.log.append("closed")
        gate = gpu.Gate()
        yield gate
        gate.held = not self.waits
        self.log.append("opened")


class Tracer:
    """Every call of the program leaves one kernel of 7 us in the window that is open."""

    def __init__(self, log):
        self.log, self.clock, self.seen = log, 0, []

    def now(self):
        self.clock += 100_000
        return self.clock

    def launch(self):
        self.seen.append((self.clock + 1000, self.clock + 8000, "kernel"))

    def take(self):
        seen, self.seen = self.seen, []
        return seen

    @contextlib.contextmanager
    def off(self):
        self.log.append("untraced")
        yield
        self.log.append("traced")


class Work(Program):
    def __init__(self, log, trace):
        super().__init__()
        self.log, self.trace = log, trace

    def load(self, inputs):
        return inputs

    def refill(self, loaded, inputs):
        return inputs

    def run(self, loaded):
        self.log.append(f"run {loaded}")
        self.trace.launch()
        return loaded

    def poison(self, loaded):
        self.log.append("poison")

    def read_outputs(self, result):
        self.log.append(f"read {result}")
        return {"C": np.full(2, result, np.float32)}

    def read_inputs(self, loaded):
        return {}


@pytest.fixture
def made_up(monkeypatch):
    def make(waits=False):
        log = []
        trace = Tracer(log)
        reading = SimpleNamespace(clock_mhz=1980.0, power_w=300.0, temperature_c=40.0, reasons=0)
        monkeypatch.setattr(gpu, "gpu", lambda: Device(log, waits))
        monkeypatch.setattr(cupti, "tracer", lambda: trace)
        monkeypatch.setattr(gpu, "reading", lambda: reading)
        monkeypatch.setattr(gpu, "energy_j", lambda: 5.0)
        monkeypatch.setattr(gpu, "foreign_processes", list)
        return log, Work(log, trace)

    return make


def test_every_call_is_alone_behind_a_closed_gate_with_a_cold_l2(made_up):
    log, program = made_up()
    copy = np.zeros(2, np.float32)
    block = cupti.block(program, {0: 10, 1: 11}, [0, 1], {1: {"C": copy}}, poison=True)
    assert block["samples_us"] == [7.0, 7.0]
    assert copy.tolist() == [11.0, 11.0]
    assert block["telemetry"]["held"] and block["telemetry"]["clock_mhz"] == 1980.0
    at = log.index("run 10")
    assert log[:at] == ["ramp", "poison", "flush", "idle", "closed"]
    assert log[at : at + 3] == ["run 10", "opened", "idle"]
    assert log.index("read 11") > log.index("run 11")


def test_a_program_that_waits_for_its_work_runs_without_the_gate_from_then_on(made_up):
    log, program = made_up(waits=True)
    block = cupti.block(program, {0: 10}, [0, 0, 0], {}, poison=False)
    assert log.count("closed") == 1
    assert not block["telemetry"]["held"]


def test_sustained_calls_take_turns_untraced_and_keep_the_last_output(made_up, monkeypatch):
    for name, value in (("_CHUNK_S", 1e-3), ("_SETTLE_S", 0.01)):
        monkeypatch.setattr(cupti, name, value)
    log, program = made_up()
    copy = np.zeros(2, np.float32)
    block = cupti.sustain(program, {0: 10, 1: 11}, [0, 1], {"C": copy}, hot=False)
    runs = [entry for entry in log if entry.startswith("run")]
    assert runs[:4] == ["run 10", "run 11", "run 10", "run 11"]
    assert copy.tolist() == [11.0, 11.0]
    assert len(block["samples_us"]) == 4
    assert block["telemetry"]["calls"] % 2 == 0
    assert log.index("untraced") < log.index("run 10") < log.index("traced")


@pytest.mark.parametrize(("drained_s", "host_bound"), [(1.5e-3, True), (2.5e-3, False)])
def test_a_device_that_is_idle_when_the_last_call_is_launched_waits_for_the_host(
    made_up, monkeypatch, drained_s, host_bound
):
    """Of calls of 1 ms: what is left after the last launch is that call and its like, or a queue."""
    monkeypatch.setattr(cupti, "_SETTLE_S", 0.0)
    monkeypatch.setattr(cupti, "_chunk", lambda program, *_: (program.run(11), 1e-3, 1980.0, drained_s))
    _, program = made_up()
    block = cupti.sustain(program, {0: 10, 1: 11}, [0, 1], {"C": np.zeros(2, np.float32)}, hot=False)
    assert block["telemetry"]["host_bound"] == host_bound
    assert block["samples_us"] == pytest.approx([1000.0] * 4)


def test_only_heat_and_hardware_make_a_block_worthless():
    idle, power_cap = 0x1, 0x4
    assert gpu.throttled(idle | power_cap) == []
    assert gpu.throttled(0x40 | power_cap) == ["hardware thermal slowdown"]


def test_records_are_read_where_they_lie():
    """Two layouts of made-up records: kind, start, end, and a pointer to a name or none."""
    layouts = {3: cupti.Layout(8, 16, 24), 7: cupti.Layout(16, 8, None, cupti.COPY)}
    names = [ctypes.create_string_buffer(text) for text in (b"mine", gpu.GATE.encode(), b"ridgemark_read")]
    rows = [
        (3, 100, 200, ctypes.addressof(names[0])),
        (3, 5, 90, ctypes.addressof(names[1])),
        (3, 1, 4, ctypes.addressof(names[2])),
        (9, 0, 0, 0),
        (7, 42, 40, 0),
        (3, 2**63, 2**63 + 1, 0),
    ]
    buffer = np.array(rows, np.uint64)

    def next_record(address, valid, record):
        held, record = record._obj, ctypes.cast(record, ctypes.POINTER(ctypes.c_void_p))
        at = address.value if held.value is None else held.value + 32
        if at >= address.value + valid.value:
            return 12
        record[0] = at
        return 0

    read = list(cupti.activities(buffer.ctypes.data, buffer.nbytes, layouts, next_record))
    assert read == [(100, 200, "mine"), (5, 90, gpu.GATE), (40, 42, cupti.COPY), (2**63, 2**63 + 1, "kernel")]
    with pytest.raises(RuntimeError, match="CUPTI says 1"):
        list(cupti.activities(buffer.ctypes.data, buffer.nbytes, layouts, lambda *_: 1))


def test_the_clock_has_settled_where_it_agrees_with_the_last_reading(monkeypatch):
    device = gpu.Gpu.__new__(gpu.Gpu)
    device.sms, device._settled_mhz = 1, 0.0
    readings = iter([500, 1200, 1979, 1980, 1981, 700, 1980, 1980])
    spins = []
    monkeypatch.setattr(device, "stamp", lambda which: None)
    monkeypatch.setattr(device, "synchronize", lambda: None)
    monkeypatch.setattr(device, "_launch", lambda name, *_: spins.append(name))
    monkeypatch.setattr(device, "stamps", lambda: np.array([[[0, 0]], [[next(readings), 1000]]], np.uint64))
    assert device.ramp_up() == pytest.approx(1980) and len(spins) == 4
    assert device.ramp_up() == pytest.approx(1981) and len(spins) == 5
    assert device.ramp_up() == pytest.approx(1980) and len(spins) == 8
