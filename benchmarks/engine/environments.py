"""The Python environment of each stack's worker: found, built from a lock, or mapped to a ready-made interpreter.

Owns ``impls/<stack>/env.toml`` (what a stack needs, per device family), the pinned locks beside the stacks
(``impls/locks/<stack>-<family>.lock``), the cache of built environments and the map of ready-made interpreters. It does
not start workers, and it shows nothing itself: ``build`` and ``lock`` say what they do through a callback.

A built environment lives in ``<cache>/envs/<hash>-cpython-<version>``, where ``<hash>`` is the first 12 hex digits of
the lock file's SHA-256 and ``<cache>`` is ``RIDGEMARK_CACHE`` or the user's cache folder. Two stacks with the same lock
share it. A marker written last tells a finished build from an interrupted one.

``python -m benchmarks.engine.environments {find,build,lock} STACK`` prints the interpreter's (the lock's) path.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs
from filelock import FileLock, Timeout
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from impls import registry

FAMILIES = ("cpu", "cuda")
#: Every worker exchanges arrays through NumPy with ml_dtypes' storage types, whatever its stack.
WORKER_MODULES = ("numpy", "ml_dtypes")

_MARKER = "complete.json"
_PROBE_SECONDS = 120.0
_LOG_TAIL_LINES = 15

Progress = Callable[[str], None]


class EnvironmentFailure(Exception):
    """An environment cannot be had.

    Attributes:
        message: what is wrong, one sentence.
        remedy: what to do about it, one sentence.
        detail: the end of the log, where a program's own words explain the failure; else empty.
    """

    def __init__(self, message: str, remedy: str, detail: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}" + (f"\n{self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Needs:
    """What a stack needs on one device family, as its ``env.toml`` says.

    Attributes:
        stack: the stack's name.
        family: ``cpu`` or ``cuda``.
        python: version specifier of the interpreter, e.g. ``>=3.11,<3.15``.
        requires: abstract requirements that the lock is made from.
        lock: the pinned requirements, ``<owner>-<family>.lock``.
        owner: the stack that the lock belongs to: another one where this stack shares its lock.
        environ: variables that the worker is started with.
        report: distributions whose versions go into the record.
        probe: module whose import proves that the environment works.
    """

    stack: str
    family: str
    python: str
    requires: tuple[str, ...]
    lock: Path
    owner: str
    environ: dict[str, str]
    report: tuple[str, ...]
    probe: str


@dataclass(frozen=True)
class Environment:
    """An interpreter in which a stack's worker can be started.

    Attributes:
        stack: the stack's name.
        python: path of the interpreter (not resolved: a virtual environment's link is what makes it one).
        environ: variables that the worker is started with.
        lock: first 12 hex digits of the lock's SHA-256; None for a mapped interpreter.
        origin: ``built`` from the lock, or ``mapped`` by the user.
    """

    stack: str
    python: Path
    environ: dict[str, str]
    lock: str | None
    origin: Literal["built", "mapped"]


@dataclass(frozen=True)
class Missing:
    """Why a stack has no environment yet, and what to do, one sentence each."""

    reason: str
    remedy: str


# --- what a stack needs ---------------------------------------------------------------------------------------------


def load_needs(stack: str, family: str) -> Needs:
    """What ``stack`` needs on ``family`` (``cpu`` or ``cuda``).

    Raises:
        EnvironmentFailure: no such stack, no such section, or a malformed ``env.toml``.
    """
    known = registry.stacks()
    if stack not in known:
        raise EnvironmentFailure(f"There is no stack {stack!r}.", f"Choose one of {', '.join(known)}.")
    file = known[stack] / "env.toml"
    try:
        sections = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise EnvironmentFailure(f"{file} cannot be read: {error}.", "Correct the file.") from None
    if family not in sections:
        raise EnvironmentFailure(
            f"{stack} has no environment for {family}: its env.toml has no [{family}] section.",
            f"Leave {stack} out on this device, or add the section to {file}.",
        )
    section = sections[family]
    try:
        return _needs_of(stack, family, section)
    except (TypeError, ValueError, KeyError) as error:
        raise EnvironmentFailure(f"{file}, [{family}]: {error}.", "Correct the file.") from None


def _needs_of(stack: str, family: str, section: object) -> Needs:
    if not isinstance(section, dict):
        raise TypeError("it must be a table")
    unknown = set(section) - {"python", "requires", "lock", "environ", "report", "probe"}
    if unknown:
        raise ValueError(f"unknown key {sorted(unknown)[0]!r}")
    if ("lock" in section) == ("requires" in section):
        raise ValueError("give either 'requires' or 'lock', the name of the stack whose lock is shared")
    probe = section.get("probe")
    if not isinstance(probe, str):
        raise ValueError("'probe' must name the module whose import proves that the environment works")
    environ = section.get("environ", {})
    if not isinstance(environ, dict) or not all(isinstance(v, str) for v in environ.values()):
        raise ValueError("'environ' must map names to strings")
    report = _strings(section, "report")
    if "lock" in section:
        if not {"python", "requires"}.isdisjoint(section):
            raise ValueError("'python' and 'requires' belong to the stack that owns the lock")
        owner = load_needs(str(section["lock"]), family)
        return Needs(stack, family, owner.python, owner.requires, owner.lock, owner.owner, environ, report, probe)
    python = section.get("python", ">=3.11")
    try:
        SpecifierSet(str(python))
        requires = tuple(str(Requirement(r)) for r in _strings(section, "requires"))
    except (InvalidSpecifier, InvalidRequirement) as error:
        raise ValueError(str(error)) from None
    lock = registry.stacks()[stack].parent / "locks" / f"{stack}-{family}.lock"
    return Needs(stack, family, str(python), requires, lock, stack, environ, report, probe)


def _strings(section: dict[str, object], key: str) -> tuple[str, ...]:
    value = section.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{key!r} must be a list of strings")
    return tuple(value)


# --- interpreters ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interpreter:
    """A CPython that can make virtual environments: its path and version."""

    python: Path
    version: str


_DESCRIBE = """
import json, platform, sys, sysconfig, importlib.util
print(json.dumps([sys.executable, list(sys.version_info[:3]), sys.version_info.releaselevel,
                  platform.python_implementation(), bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
                  importlib.util.find_spec("ensurepip") is not None]))
"""


@functools.cache
def describe_interpreter(python: Path) -> Interpreter | None:
    """What ``python`` is, by running it; None where it does not run or cannot be used.

    Unusable are other implementations than CPython, free-threaded builds and pre-releases (their wheels differ), and
    interpreters without ``ensurepip`` (Debian ships it apart, as python3-venv).
    """
    try:
        reply = subprocess.run(
            [python, "-I", "-c", _DESCRIBE], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
        )
        executable, version, level, implementation, free_threaded, ensurepip = json.loads(reply.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None  # e.g. a pyenv shim of a version that is not active
    if implementation != "CPython" or free_threaded or level != "final" or not ensurepip:
        return None
    return Interpreter(Path(executable), ".".join(map(str, version)))


def candidates() -> Iterator[Path]:
    """Interpreters in the order they are tried: the running one, PATH's, then those of pyenv, uv, asdf and mise."""
    yield Path(sys.executable)
    for name in (*(f"python3.{minor}" for minor in range(20, 10, -1)), "python3", "python"):
        found = shutil.which(name)
        if found:
            yield Path(found)
    home = Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    for folder in (
        Path(os.environ.get("PYENV_ROOT") or home / ".pyenv") / "versions",
        Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv" / "python"),
        Path(os.environ.get("ASDF_DATA_DIR") or home / ".asdf") / "installs" / "python",
        Path(os.environ.get("MISE_DATA_DIR") or data / "mise") / "installs" / "python",
    ):
        if folder.is_dir():
            yield from sorted(folder.glob("*/bin/python3"), reverse=True)


def find_interpreter(spec: str) -> Interpreter | None:
    """The first of ``candidates`` whose version satisfies ``spec``, e.g. ``>=3.11,<3.15``."""
    specifier = SpecifierSet(spec)
    for candidate in candidates():
        interpreter = describe_interpreter(candidate)
        if interpreter is not None and Version(interpreter.version) in specifier:
            return interpreter
    return None


# --- the map of ready-made interpreters -----------------------------------------------------------------------------


def interpreter_map_file() -> Path:
    """The file that maps stacks to ready-made interpreters: ``RIDGEMARK_INTERPRETERS`` or the user's own."""
    named = os.environ.get("RIDGEMARK_INTERPRETERS")
    return Path(named) if named else platformdirs.user_config_path("ridgemark") / "interpreters.toml"


def mapped_interpreter(stack: str) -> Path | None:
    """The ready-made interpreter that the user's map gives ``stack`` (or every stack, ``"*"``), or None.

    The map reads ``[stacks]``, then ``blas = "/usr/bin/python3"``. A relative path is relative to the map's folder.

    Raises:
        EnvironmentFailure: the map is malformed, or ``RIDGEMARK_INTERPRETERS`` names a file that cannot be read.
    """
    file = interpreter_map_file()
    if not file.is_file() and not os.environ.get("RIDGEMARK_INTERPRETERS"):
        return None
    try:
        stacks = tomllib.loads(file.read_text(encoding="utf-8")).get("stacks", {})
        if not isinstance(stacks, dict) or not all(isinstance(v, str) for v in stacks.values()):
            raise ValueError('[stacks] must map names to paths, e.g. blas = "/usr/bin/python3"')
    except (OSError, ValueError) as error:
        raise EnvironmentFailure(
            f"The interpreter map {file} cannot be used: {getattr(error, 'strerror', error)}.",
            "Correct the file, or unset RIDGEMARK_INTERPRETERS.",
        ) from None
    entry = stacks.get(stack, stacks.get("*"))
    if entry is None:
        return None
    return file.parent.absolute() / Path(entry).expanduser()


# --- find and build -------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where environments are kept: ``RIDGEMARK_CACHE`` or the user's cache folder."""
    named = os.environ.get("RIDGEMARK_CACHE")
    return Path(named).absolute() if named else platformdirs.user_cache_path("ridgemark")


def find(stack: str, family: str) -> Environment | Missing:
    """The environment of ``stack`` on ``family`` where there is one. Builds and installs nothing."""
    try:
        needs = load_needs(stack, family)
        mapped = _mapped(needs)
        if mapped is not None:
            return mapped
        folder, _ = _place(needs)
    except EnvironmentFailure as failure:
        return Missing(failure.message, failure.remedy)
    if not _complete(folder):
        return Missing(
            f"The environment of {stack} has not been built on this machine.",
            f"Build it with: python -m benchmarks.engine.environments build {stack} --family {family}",
        )
    return _built(needs, folder)


def build(stack: str, family: str, progress: Progress) -> Environment:
    """The environment of ``stack`` on ``family``, built from its lock where it is not there yet.

    Args:
        stack: the stack's name.
        family: ``cpu`` or ``cuda``.
        progress: called with a short line whenever something new begins.

    Raises:
        EnvironmentFailure: nothing could be built, or what was built does not work.
    """
    needs = load_needs(stack, family)
    mapped = _mapped(needs)
    if mapped is not None:
        return mapped
    folder, interpreter = _place(needs)
    if _complete(folder):
        return _built(needs, folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        guard = FileLock(folder.with_name(folder.name + ".guard"))
        try:
            guard.acquire(blocking=False)
        except Timeout:
            progress(f"{stack}: waiting for another process that builds the same environment")
            guard.acquire()
        try:
            if not _complete(folder):
                _fill(needs, interpreter, folder, progress)
        finally:
            guard.release()
    except OSError as error:
        raise EnvironmentFailure(
            f"The environment of {stack} cannot be written to {folder.parent}: {error.strerror or error}.",
            "Free space there, or set RIDGEMARK_CACHE to a folder that can be written.",
        ) from None
    return _built(needs, folder)


def lock(stack: str, family: str, progress: Progress) -> Path:
    """Make ``stack``'s lock anew: its requirements, resolved by pip in a fresh environment, every version pinned.

    For a CPU they are installed and imported. For a GPU they are resolved only: their wheels are several GB, and the
    machine that makes the lock need not have a GPU.

    Pins carry no local version (``torch==2.13.0``, not ``2.13.0+cpu``) and no hashes: the same release comes as
    different wheels from different sources.

    Returns:
        The lock's path.

    Raises:
        EnvironmentFailure: the requirements cannot be installed.
    """
    needs = load_needs(stack, family)
    if needs.owner != stack:
        raise EnvironmentFailure(f"{stack} shares the lock of {needs.owner}.", f"Make that lock: lock({needs.owner}).")
    interpreter = _interpreter_for(needs)
    with tempfile.TemporaryDirectory(prefix="ridgemark-lock-") as scratch:
        log = Path(scratch) / "pip.log"
        python = _new_venv(needs, interpreter, Path(scratch) / "env", log, progress)
        distributions = (_installed if family == "cpu" else _resolved)(needs, python, log, progress)
    chosen = {str(canonicalize_name(d["name"])): d["version"] for d in distributions}
    pins = {name: Version(version).public for name, version in chosen.items() if name != "pip"}
    header = (
        f'# Made by `nox -s "lock({stack})"` from {", ".join(needs.requires)}\n'
        f"# with CPython {interpreter.version} on {sys.platform} {platform.machine()}; serves Python {needs.python}.\n"
    )
    needs.lock.parent.mkdir(exist_ok=True)
    needs.lock.write_text(header + "".join(f"{name}=={pins[name]}\n" for name in sorted(pins)), encoding="utf-8")
    return needs.lock


def _installed(needs: Needs, python: Path, log: Path, progress: Progress) -> list[dict[str, str]]:
    """Name and version of all that the requirements bring into a new environment, in which everything imports."""
    # Some Pythons put setuptools into every environment: it belongs into the lock only where something needs it.
    _logged(needs, [python, "-m", "pip", "uninstall", "--yes", "setuptools"], log, progress)
    _logged(needs, [python, "-m", "pip", "install", *needs.requires], log, progress)
    _check_imports(needs, python, log)
    listing = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    found: list[dict[str, str]] = json.loads(listing.stdout)
    return found


def _resolved(needs: Needs, python: Path, log: Path, progress: Progress) -> list[dict[str, str]]:
    """The same as pip would install it, by the wheels' metadata alone."""
    report = log.with_name("report.json")
    command: list[str | Path] = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--report", report]
    _logged(needs, [*command, *needs.requires], log, progress)
    return [entry["metadata"] for entry in json.loads(report.read_text(encoding="utf-8"))["install"]]


def _mapped(needs: Needs) -> Environment | None:
    python = mapped_interpreter(needs.stack)
    if python is None:
        return None
    trouble = import_trouble(python, needs)
    if trouble is not None:
        raise EnvironmentFailure(
            f"The interpreter {python} that {interpreter_map_file()} gives {needs.stack} does not work: {trouble}.",
            f"Install {' and '.join(needs.report or (needs.probe,))} there, or correct the map.",
        )
    return Environment(needs.stack, python, needs.environ, None, "mapped")


def _built(needs: Needs, folder: Path) -> Environment:
    return Environment(needs.stack, folder / "bin" / "python", needs.environ, _lock_hash(needs), "built")


def _interpreter_for(needs: Needs) -> Interpreter:
    interpreter = find_interpreter(needs.python)
    if interpreter is None:
        raise EnvironmentFailure(
            f"{needs.stack} needs Python {needs.python} with the venv and ensurepip modules, and none was found.",
            "Install one (a distribution's package with its -venv part, pyenv, uv, asdf or mise), "
            "or map a ready-made interpreter in " + str(interpreter_map_file()) + ".",
        )
    return interpreter


def _lock_hash(needs: Needs) -> str:
    try:
        return hashlib.sha256(needs.lock.read_bytes()).hexdigest()[:12]
    except OSError:
        raise EnvironmentFailure(
            f"{needs.stack} has no lock for {needs.family}: {needs.lock} cannot be read.",
            f'Make it with: nox -s "lock({needs.owner})"',
        ) from None


def _place(needs: Needs) -> tuple[Path, Interpreter]:
    lock_hash = _lock_hash(needs)
    interpreter = _interpreter_for(needs)
    return cache_folder() / "envs" / f"{lock_hash}-cpython-{interpreter.version}", interpreter


def _complete(folder: Path) -> bool:
    # The second test fails where the interpreter that the environment was made from has been removed since.
    return (folder / _MARKER).is_file() and (folder / "bin" / "python").exists()


def _fill(needs: Needs, interpreter: Interpreter, folder: Path, progress: Progress) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_name(folder.name + ".log")
    log.write_bytes(b"")
    python = _new_venv(needs, interpreter, folder, log, progress)
    _logged(needs, [python, "-m", "pip", "install", "-r", needs.lock], log, progress)
    progress(f"{needs.stack}: importing {needs.probe}")
    _check_imports(needs, python, log)
    marker = folder / (_MARKER + ".new")
    marker.write_text(json.dumps({"lock": needs.lock.name, "python": str(interpreter.python)}), encoding="utf-8")
    marker.replace(folder / _MARKER)


def _new_venv(needs: Needs, interpreter: Interpreter, folder: Path, log: Path, progress: Progress) -> Path:
    progress(f"{needs.stack}: new environment with Python {interpreter.version}")
    _logged(needs, [interpreter.python, "-m", "venv", folder], log, progress)
    return folder / "bin" / "python"


def _check_imports(needs: Needs, python: Path, log: Path) -> None:
    trouble = import_trouble(python, needs)
    if trouble is not None:
        raise EnvironmentFailure(
            f"The environment of {needs.stack} was built but does not work: {trouble}.",
            f"See {log}; correct the requirements in env.toml and make the lock anew.",
        )


def import_trouble(python: Path, needs: Needs) -> str | None:
    """What goes wrong when ``python`` imports what a worker of the stack needs; None where all imports work."""
    modules = tuple(dict.fromkeys((*WORKER_MODULES, needs.probe)))
    return _import_trouble(python, modules, tuple(sorted(needs.environ.items())))


@functools.cache
def _import_trouble(python: Path, modules: tuple[str, ...], environ: tuple[tuple[str, str], ...]) -> str | None:
    try:
        done = subprocess.run(
            [python, "-c", "import " + ", ".join(modules)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            env=_clean_environ() | dict(environ),
            stdin=subprocess.DEVNULL,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return f"importing {modules[-1]} took more than {_PROBE_SECONDS:.0f} s"
    except OSError as error:
        return f"it cannot be started ({error.strerror or error})"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"importing {modules[-1]} ended with status {done.returncode}"


def _clean_environ() -> dict[str, str]:
    """This process's variables without those that would mix another environment's modules into a stack's."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def _logged(needs: Needs, command: list[str | Path], log: Path, progress: Progress) -> None:
    """Run ``command`` with its output in ``log``; pip's steps go to ``progress``."""
    with log.open("ab") as sink:
        sink.write(("$ " + " ".join(map(str, command)) + "\n").encode())
        sink.flush()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=_clean_environ()
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                sink.write(line)
                text = line.decode(errors="replace").strip()
                if text.startswith(("Collecting ", "Downloading ", "Processing ", "Installing collected ")):
                    progress(f"{needs.stack}: {text[:100]}")
    if process.returncode != 0:
        with log.open(encoding="utf-8", errors="replace") as text_log:
            tail = "".join(text_log.readlines()[-_LOG_TAIL_LINES:])
        raise EnvironmentFailure(
            f"Installing the environment of {needs.stack} failed (status {process.returncode}).",
            f"Read the end of pip's output below (all of it is in {log}), mend what it names, and try again.",
            tail,
        )


# --- command --------------------------------------------------------------------------------------------------------


def main() -> int:
    """``python -m benchmarks.engine.environments``: exit status 0, or 2 with a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.environments", description=main.__doc__)
    parser.add_argument("action", choices=("find", "build", "lock"))
    parser.add_argument("stack")
    parser.add_argument("--family", choices=FAMILIES, default="cpu")
    arguments = parser.parse_args()

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        if arguments.action == "lock":
            print(lock(arguments.stack, arguments.family, progress))
            return 0
        if arguments.action == "build":
            print(build(arguments.stack, arguments.family, progress).python)
            return 0
        found = find(arguments.stack, arguments.family)
        if isinstance(found, Missing):
            raise EnvironmentFailure(found.reason, found.remedy)
        print(found.python)
        return 0
    except EnvironmentFailure as failure:
        print(failure, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
