"""Records for the report's tests, and the files that the report makes of them."""

import base64
import gzip
import re
from pathlib import Path

import orjson
import pytest

from analysis import frame, report
from tests.analysis.conftest import Records

CASE = "gemm:1024x1024x1024:f32"
SIZES = (128, 256, 512)
#: Markup that would act if it reached a page, a plot, an attribute, a script or Markdown as anything but text.
HOSTILE = '</script><img src=x onerror="window.pwned=1"><b>b</b>&lt;i&gt;\'`|[x](javascript:window.pwned=1)'


@pytest.fixture
def records() -> Records:
    made = Records()
    made.run()
    return made


@pytest.fixture
def full(records: Records) -> Records:
    """Ceilings, three square GEMMs and one larger, an attention; a winner, a tie, a loser, and what went wrong."""
    records.ceilings()
    records.paired(CASE, {"xla.jit": 0.5, "tvm.a": 1.0, "iree.cpu": 2.0}, rounds=12, traffic_bytes=12 << 20)
    for size in SIZES:
        records.paired(f"gemm:{size}x{size}x{size}:f32", {"xla.jit": 1.0, "tvm.a": 1.5}, rounds=12, seed=size)
    attention = "attention:b1h8s1024d64:f32:causal"
    for replica in (0, 1):
        records.result(attention, "blas.sdpa", [5000.0 + i % 3 for i in range(12)], replica=replica)
    records.result(attention, "xla.plain", [9000.0 + i % 5 for i in range(12)], flags=["host_bound: 30 %"])
    records.result(attention, "tvm.a", status="wrong", reason="O[0, 3] is 1.0, expected 2.0.")
    for size in SIZES:
        records.result(f"gemm:{size}x{size}x{size}:f32", "iree.cpu", status="unsupported", reason="No f32 here.")
    for stack, versions in {"xla": {"jax": "0.10.2"}, "tvm": {"apache-tvm": "0.27.0"}}.items():
        records.lines.append(
            {
                "schema": 1,
                "kind": "stack",
                "run": "r1",
                "stack": stack,
                "versions": versions,
                "lock": "l0",
                "python": "3.11",
            }
        )
    records.lines.append({"schema": 1, "kind": "end", "run": "r1", "interrupted": False, "phases": {}})
    return records


@pytest.fixture
def hostile() -> Records:
    """Every text that a record may hold is markup."""
    made = Records()
    made.run(machine=HOSTILE, arch=HOSTILE)
    made.lines[0] |= {"commit": HOSTILE, "started": HOSTILE, "harness": {HOSTILE: HOSTILE}}
    made.lines[0]["machine"] |= {"os": HOSTILE, HOSTILE: HOSTILE, "caches": [{"level": HOSTILE, "kind": HOSTILE}]}
    made.lines[1] |= {"versions": {HOSTILE: HOSTILE}, "lock": HOSTILE, "python": HOSTILE}
    made.ceilings()
    made.paired(CASE, {f"xla.{HOSTILE}": 0.5, "tvm.a": 1.5}, rounds=12, flags=[HOSTILE], config={HOSTILE: HOSTILE})
    made.paired(f"gemm:{HOSTILE}", {"xla.jit": 0.5}, rounds=12)
    made.result(CASE, f"iree.{HOSTILE}", status="failed", reason=HOSTILE)
    made.result(f"nothing:{HOSTILE}", "iree.cpu", status="wrong", reason=HOSTILE)
    return made


class Report:
    """The files of a report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "index.html"
        self.html = self.path.read_text()
        self.markdown = (folder / "report.md").read_text()
        self.json = orjson.loads((folder / "report.json").read_bytes())

    def embedded(self, name: str) -> bytes:
        """What the page carries compressed under this id."""
        found = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', self.html)
        assert found
        return gzip.decompress(base64.b64decode(found[1], validate=True))

    def rows(self, table: str) -> list[dict]:
        """A table's rows."""
        columns = self.json[table]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@pytest.fixture
def write(tmp_path):
    """Writes the report of records' lines, or of paths."""

    def written(*sources) -> Report:
        loaded = (
            frame.from_lines(sources[0].lines) if isinstance(sources[0], Records) else frame.load(map(Path, sources))
        )
        report.write(loaded, tmp_path / "report")
        return Report(tmp_path / "report")

    return written
