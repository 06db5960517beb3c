"""The bundle: what is missing, what a wheel requires, parts, the stamp, the installer."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import zipfile

import pytest

from benchmarks import bundle
from benchmarks.engine import session


def wheel(folder, name, requires=()):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requires)]
        archive.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines))
    return path


@pytest.fixture
def downloads(monkeypatch):
    """Takes the place of pip: makes the wheel that was asked for. Lists the requirements."""
    asked = []
    needs = {"alpha": ["beta>=1", 'gamma; extra == "more"', 'delta; python_version < "3.8"', "present"]}
    real = subprocess.run

    def run(command, **options):
        if "download" not in command:
            return real(command, **options)
        asked.append(command[-1])
        name = command[-1].split(">")[0]
        wheel(pathlib_of(command), name, needs.get(name, ()))
        return None

    def pathlib_of(command):
        from pathlib import Path

        return Path(command[command.index("--dest") + 1])

    monkeypatch.setattr(bundle.subprocess, "run", run)
    return asked


def test_only_what_the_node_lacks_is_fetched_with_what_that_needs(tmp_path, downloads):
    bundle.missing(["alpha", "present>=2", "old>=3"], {"present": "2.5", "old": "1.0"}, tmp_path, "3.12")
    # present is there; old is too old; beta comes with alpha; extras and markers of other Pythons do not.
    assert sorted(downloads) == ["alpha", "beta>=1", "old>=3"]


def test_parts_joined_hold_the_commit_its_stamp_and_the_wheels(tmp_path, downloads, monkeypatch):
    monkeypatch.setattr(bundle, "roots", lambda: ["alpha"])
    monkeypatch.setenv("RIDGEMARK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "cutlass").mkdir(parents=True)
    (tmp_path / "cache" / "cutlass" / "kernel.so").write_bytes(b"code")
    # Environments lie in the same cache, and stay.
    (tmp_path / "cache" / "envs").mkdir()
    (tmp_path / "cache" / "envs" / "python").touch()
    files = bundle.make(tmp_path, {}, "3.12", 100_000)
    parts = [f for f in files if f.name.startswith("part-")]
    assert len(parts) > 1
    assert all(p.stat().st_size <= 100_000 for p in parts)
    with tarfile.open(fileobj=io.BytesIO(b"".join(p.read_bytes() for p in parts))) as archive:
        names = archive.getnames()
        stamp = json.load(archive.extractfile(session.STAMP))
        assert archive.extractfile("compiled/cutlass/kernel.so").read() == b"code"
    head = subprocess.run(["git", "-C", bundle.ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert stamp == {"commit": head.strip(), "dirty": False}
    assert {"impls/contract.py", "wheels/alpha-1.0-py3-none-any.whl", "wheels/beta-1.0-py3-none-any.whl"} <= set(names)
    assert not any(n.startswith("results/") or "envs" in n for n in names)


def test_a_copy_without_git_says_the_commit_of_its_stamp(tmp_path):
    (tmp_path / session.STAMP).write_text('{"commit": "abc", "dirty": true}')
    assert session.provenance(tmp_path) == {"commit": "abc", "dirty": True}


def test_the_installer_is_a_shell_script():
    subprocess.run(["sh", "-n"], input=bundle.INSTALL, text=True, check=True)


@pytest.mark.parametrize("given", [[], ["python3"], ["beside/python3"], ["./beside/python3"]])
def test_an_environment_is_not_made_beside_itself(tmp_path, given):
    """PATH may lead into the environment that is renewed, and PYTHON be relative to where one stands."""
    beside, folder, log = tmp_path / "beside", tmp_path / "copy", tmp_path / "log"
    own = folder / ".environment" / "bin"
    for place, script in ((own, "exit 9"), (beside, f'echo "$1 $2" >> {log}')):
        place.mkdir(parents=True)
        (place / "python3").write_text(f"#!/bin/sh\n{script}\n")
        (place / "python3").chmod(0o755)
    (folder / ".environment" / "lib" / "python3" / "site-packages").mkdir(parents=True)
    (tmp_path / "install.sh").write_text(bundle.INSTALL)
    (tmp_path / "part-00").write_bytes(packed({"wheels/none.whl": b""}))
    subprocess.run(
        ["sh", "install.sh", "copy", *given], cwd=tmp_path, env={"PATH": f"{own}:{beside}:/usr/bin:/bin"}, check=True
    )
    assert [line for line in log.read_text().splitlines() if line.startswith("-m")] == ["-m venv", "-m pip", "-m pip"]
    assert (folder / "interpreters.toml").read_text().endswith(f'"{folder}/.environment/bin/python"\n')


def packed(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()
