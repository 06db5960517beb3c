"""What a GPU node without a network needs to measure: this commit, wheels, compiled kernels, an installer. In parts.

Owns the making of a bundle and its installer's script. ``python -m benchmarks.bundle --has node.json`` (or ``nox -s
bundle``) writes into ``dist/bundle`` some parts of at most ``--part-mib`` MiB and ``install.sh``; copied together to
the node,

    sh install.sh FOLDER [PYTHON]

puts the commit into FOLDER with an environment beside PYTHON (default ``python3``): that Python's packages, torch and
jax among them, stay visible and untouched, what they lack comes from the bundle's wheels, and every stack is mapped to
that environment. There is no network access in it. Then, in FOLDER, ``./measure SECONDS ARGUMENTS`` runs ``ridgemark
compare ARGUMENTS`` for at most so long and goes on with ``./measure SECONDS --resume``: a run in chunks, cut between
or within cases without loss. ``./results-out FOLDER`` packs the records into files of under 16 MiB; here
they are unpacked over ``results/``.

``node.json`` is what ``python3 -m pip list --format=json`` prints on the node. What stacks have compiled beforehand for
a GPU that is not here (``nox -s build``) lies in ``<cache>/<stack>``, is bundled whole and put into the node's cache.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.engine.environments import cache_folder
from benchmarks.engine.session import ROOT, STAMP, provenance
from impls import registry

PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (28, 27, 24, 17)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]

INSTALL = r"""#!/bin/sh
# Puts the bundle beside this script into FOLDER. See benchmarks/bundle.py.
set -eu
[ $# -ge 1 ] || { echo "usage: sh install.sh FOLDER [PYTHON]" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
# FOLDER's own environment may be the first on PATH, and is not what it is made beside.
PATH=$(printf '%s' ":$PATH:" | sed "s|:$folder/\.environment/bin:|:|g; s|^:||; s|:\$||")
beside=$(command -v "${2:-python3}") || { echo "There is no ${2:-python3} here." >&2; exit 2; }
case $beside in /*) ;; *) beside=$(pwd)/$beside ;; esac
cd "$folder"
cat "$here"/part-* | tar xzf -
"$beside" -m venv --without-pip .environment
# The environment sees what the given Python sees, even where that is a virtual environment itself.
"$beside" -c 'import site, sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
    > "$(echo .environment/lib/python3*/site-packages)/beside.pth"
"$beside" -m pip --quiet --python .environment/bin/python install --no-index --no-deps --no-compile wheels/*.whl
"$beside" -m pip --quiet --python .environment/bin/python install \
    --no-index --no-deps --no-build-isolation --editable .
if [ -d compiled ]; then
    cache=${RIDGEMARK_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ridgemark}
    mkdir -p "$cache"
    cp -R compiled/. "$cache"
fi
printf '[stacks]\n"*" = "%s/.environment/bin/python"\n' "$(pwd)" > interpreters.toml
cat > measure <<'END'
#!/bin/sh
# ./measure SECONDS ARGUMENTS: ridgemark compare ARGUMENTS, interrupted after SECONDS; go on with --resume.
cd "$(dirname "$0")"
seconds=$1; shift
RIDGEMARK_INTERPRETERS=$(pwd)/interpreters.toml exec timeout --signal=INT --kill-after=60 "$seconds" \
    .environment/bin/ridgemark compare "$@"
END
cat > results-out <<'END'
#!/bin/sh
# ./results-out FOLDER: the records, packed into files of under 16 MiB.
cd "$(dirname "$0")"
tar czf - results | split -b 15m - "$1/results.tgz."
END
chmod +x measure results-out
"""


def missing(roots: list[str], has: dict[str, str], wheels: Path, python: str) -> None:
    """Download what ``roots`` need and ``has`` lacks into ``wheels``, for the node's Python.

    Args:
        roots: requirements.
        has: canonical name -> version of what the node has.
        wheels: folder.
        python: the node's Python, e.g. ``3.12``.

    Raises:
        SystemExit: pip finds no wheel for the node.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    todo = [Requirement(r) for r in roots]
    done: set[str] = set()
    while todo:
        need = todo.pop()
        name = canonicalize_name(need.name)
        if name in done or (need.marker and not need.marker.evaluate(environment)):
            continue
        done.add(name)
        if name in has and need.specifier.contains(has[name], prereleases=True):
            continue
        before = set(wheels.iterdir())
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", python, "--implementation", "cp", "--dest", str(wheels)]
        command += [f"--platform={p}" for p in PLATFORMS]
        subprocess.run([*command, str(Requirement(f"{need.name}{need.specifier}"))], check=True)
        for wheel in set(wheels.iterdir()) - before:
            todo += [Requirement(r) for r in _requires(wheel)]


def _requires(wheel: Path) -> list[str]:
    """What a wheel requires, its extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        text = archive.read(name).decode()
    found = re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE)
    return [r for r in found if "extra ==" not in r]


def roots() -> list[str]:
    """What the harness and the stacks with a [cuda] environment require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    for folder in registry.stacks().values():
        found += tomllib.loads((folder / "env.toml").read_text()).get("cuda", {}).get("requires", [])
    return found


def compiled() -> list[Path]:
    """What stacks have compiled beforehand: the files in their folders of the cache."""
    folders = [cache_folder() / stack for stack in registry.stacks()]
    return [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]


def make(out: Path, has: dict[str, str], python: str, part_bytes: int) -> list[Path]:
    """Write the bundle of the commit that is checked out into ``out``.

    Returns:
        The files written: the parts, and the installer.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("part-*"):
        old.unlink()
    commit = provenance(ROOT)["commit"]
    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(scratch)
        missing(roots(), has, wheels, python)
        source = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], capture_output=True, check=True).stdout
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as bundle:
            with tarfile.open(fileobj=io.BytesIO(source)) as tree:
                for member in tree:
                    # Records stay here: what the node measures is new.
                    if not member.name.startswith("results/"):
                        bundle.addfile(member, tree.extractfile(member) if member.isfile() else None)
            # What is bundled is the commit itself, whatever the working tree looks like.
            stamp = json.dumps({"commit": commit, "dirty": False}).encode()
            entry = tarfile.TarInfo(STAMP)
            entry.size = len(stamp)
            bundle.addfile(entry, io.BytesIO(stamp))
            for wheel in sorted(wheels.iterdir()):
                bundle.add(wheel, f"wheels/{wheel.name}")
            for file in compiled():
                bundle.add(file, f"compiled/{file.relative_to(cache_folder())}")
    data = packed.getvalue()
    files = []
    for number, start in enumerate(range(0, len(data), part_bytes)):
        files.append(out / f"part-{number:02d}")
        files[-1].write_bytes(data[start : start + part_bytes])
    installer = out / "install.sh"
    installer.write_text(INSTALL)
    return [*files, installer]


def main() -> None:
    """Make the bundle and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--has", type=Path, required=True, help="`pip list --format=json` of the node")
    parser.add_argument("--python", default="3.12", help="the node's Python (default 3.12)")
    parser.add_argument("--part-mib", type=int, default=48, help="largest part (default 48)")
    parser.add_argument("--out", type=Path, default=Path("dist/bundle"), help="folder (default dist/bundle)")
    arguments = parser.parse_args()
    has = {str(canonicalize_name(d["name"])): str(d["version"]) for d in json.loads(arguments.has.read_text())}
    for file in make(arguments.out, has, arguments.python, arguments.part_mib << 20):
        print(f"{file}  {file.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
