"""The worked example of CONTRIBUTING.md passes the conformance tests as it is printed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENV_TOML = '[cpu]\nrequires = ["numpy", "ml_dtypes"]\nprobe = "numpy"\n'


def test_worked_example_conforms(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    # It needs NumPy only, which this interpreter has: as a stack of its own it runs without blas's environment.
    assert 'name = "blas.numpy"' in block
    stack = tmp_path / "guests" / "guest"
    stack.mkdir(parents=True)
    for package in (stack.parent, stack):
        (package / "__init__.py").write_text("")
    (stack / "env.toml").write_text(ENV_TOML)
    (stack / "numpy_matmul.py").write_text(block.replace('"blas.numpy"', '"guest.numpy"'))
    (tmp_path / "map.toml").write_text(f"[stacks]\nguest = {json.dumps(sys.executable)}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/conformance", "--stack", "guest", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": str(tmp_path),
            "RIDGEMARK_EXTRA_STACKS": "guests",
            "RIDGEMARK_INTERPRETERS": str(tmp_path / "map.toml"),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50
    assert "skipped" not in done.stdout
