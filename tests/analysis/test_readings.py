"""The tables that pages quote say what the records say: rates, busy units per cycle, power, counted traffic."""

import numpy as np
import pytest

from analysis import frame, readings

CASE = "gemm:8192x8192x8192:bf16"
FLOPS = 2 * 8192**3
COMPULSORY = 3 * 2 * 8192**2


@pytest.fixture
def gpu(records):
    """A rate of 800e12/s at 1600 MHz, 4e12 bytes/s; the baseline takes half of the rate at the same clock."""
    records.run("r2", machine="h200", kind="cuda")

    def measured(case, impl, seconds, clock_mhz, power_w=100.0, **fields):
        records.result(case, impl, np.array([1.0, 1.0, 1.0]) * seconds * 1e6, run="r2", regime="burst", **fields)
        for block in records.lines[-1]["rounds"]:
            block |= {"clock_mhz": clock_mhz, "power_w": power_w}

    measured("ceiling:rate:bf16", "ceilings.gpu", 2 * 64**3 * 16384 / 800e12, 1600.0)
    measured("ceiling:read:1GiB", "ceilings.gpu", (1 << 30) / 4e12, 1980.0)
    measured(CASE, "cublas.default", FLOPS / 400e12, 1600.0)
    measured(CASE, "cublas.default", FLOPS / 400e12, 1600.0, replica=1)
    measured(CASE, "xla.default", FLOPS / 500e12, 1250.0, flags=["a remark"])
    records.result(CASE, "iree.cuda", run="r2", regime="burst", status="unsupported", reason="It is not built here.")
    records.profile(
        CASE, "cublas.default", run="r2", read=2 * COMPULSORY, written=COMPULSORY // 2, back=COMPULSORY // 2
    )
    return records


def rows(text):
    """Entry -> its cells."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: [cell.strip() for cell in cells] for cells in lines}


def test_an_entry_s_rate_share_and_busy_units(gpu):
    found = rows(readings.tables(frame.from_lines(gpu.lines)))
    baseline, faster = found["cublas.default"], found["xla.default"]
    assert baseline[3:5] == ["400.0 TFLOP/s", "50.0 %"]
    # Half the rate at the ceiling's own clock.
    assert baseline[6:8] == ["1600 MHz", "50.0 %"]
    assert baseline[9].endswith("3.00")
    assert faster[2].startswith("0.8000")
    # 500e12 at 1250 MHz is 0.4e6 per cycle of the ceiling's 0.5e6.
    assert faster[6:8] == ["1250 MHz", "80.0 %"]
    assert "a remark" in faster[-1]


def test_power_is_read_in_sustained_only_and_a_refusal_says_why(gpu):
    text = readings.tables(frame.from_lines(gpu.lines))
    assert " W |" not in text
    assert "| iree.cuda | unsupported |" in text
    assert "It is not built here." in text
    for line in gpu.lines:
        if line.get("regime") == "burst":
            line["regime"] = "sustained"
    assert "| 100 W |" in readings.tables(frame.from_lines(gpu.lines))


def test_short_calls_have_no_busy_units(gpu):
    case = "gemm:1024x1024x1024:bf16"
    gpu.result(case, "cublas.default", [10.0, 10.0, 10.0], run="r2", regime="burst")
    for block in gpu.lines[-1]["rounds"]:
        block["clock_mhz"] = 1900.0
    text = readings.tables(frame.from_lines(gpu.lines))
    [line] = [line for line in text[text.index(case) :].splitlines() if line.startswith("| cublas.default")]
    assert "1900 MHz |  |" in line
