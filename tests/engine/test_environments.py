"""Environments are built from local wheels made here: nothing is fetched, and stacks are temporary folders."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.engine import environments
from benchmarks.engine.environments import Environment, EnvironmentFailure, Missing
from impls import registry

THIS_VERSION = ".".join(map(str, sys.version_info[:3]))


def write_wheel(folder: Path, name: str, version: str, source: str = "", requires: tuple[str, ...] = ()) -> None:
    """A pure-Python wheel with one module (binary distribution format, packaging.python.org)."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {r}\n" for r in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text.encode())}\n")
    files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"])
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    write_wheel(folder, "numpy", "2.0")
    write_wheel(folder, "ml-dtypes", "0.5", requires=("numpy",))
    write_wheel(folder, "toylib", "1.5+cpu", "VALUE = 42\n", requires=("numpy",))
    write_wheel(folder, "brokenlib", "1.0", "raise ImportError('libbroken.so: cannot open shared object file')\n")
    return folder


@pytest.fixture(scope="module")
def bare_venv(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


@pytest.fixture
def stacks(tmp_path, monkeypatch, wheels):
    """Add a stack by calling this: ``stacks(name, env_toml, lock=None)``. Its lock is ``<name>-cpu.lock``."""
    known = {}
    monkeypatch.setattr(registry, "stacks", lambda: known)
    monkeypatch.setenv("RIDGEMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RIDGEMARK_INTERPRETERS", "")
    monkeypatch.setattr(environments.platformdirs, "user_config_path", lambda _: tmp_path / "config")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))

    def add(name, env_toml, lock=None):
        folder = tmp_path / "stacks" / name
        folder.mkdir(parents=True)
        (folder / "env.toml").write_text(env_toml)
        known[name] = folder
        if lock is not None:
            file = tmp_path / "stacks" / "locks" / f"{name}-cpu.lock"
            file.parent.mkdir(exist_ok=True)
            file.write_text(lock)
            return file
        return None

    return add


@pytest.fixture
def copied_venv(monkeypatch, bare_venv):
    """Environments begin as copies of one that was made before, which is faster than making each."""

    def copy(needs, interpreter, folder, log, progress):
        progress("new environment")
        shutil.copytree(bare_venv, folder, symlinks=True)
        return folder / "bin" / "python"

    monkeypatch.setattr(environments, "_new_venv", copy)


TOY = '[cpu]\npython = ">=3.11"\nrequires = ["toylib", "ml_dtypes"]\nreport = ["toylib"]\nprobe = "toylib"\n'
TOY_LOCK = "ml-dtypes==0.5\nnumpy==2.0\ntoylib==1.5\n"


def silent(line):
    pass


# --- what a stack needs


def test_needs_are_read(stacks):
    lock = stacks("toy", TOY + '[cpu.environ]\nTOY_MODE = "fast"\n', TOY_LOCK)
    needs = environments.load_needs("toy", "cpu")
    assert (needs.python, needs.requires, needs.report) == (">=3.11", ("toylib", "ml_dtypes"), ("toylib",))
    assert (needs.lock, needs.probe, needs.environ) == (lock, "toylib", {"TOY_MODE": "fast"})


def test_shared_lock_brings_its_owners_python_and_requirements(stacks):
    lock = stacks("toy", TOY, TOY_LOCK)
    stacks("other", '[cpu]\nlock = "toy"\nprobe = "numpy"\n')
    needs = environments.load_needs("other", "cpu")
    assert (needs.lock, needs.owner, needs.python, needs.probe) == (lock, "toy", ">=3.11", "numpy")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[cpu", "cannot be read"),
        ('[cuda]\nprobe = "x"\nrequires = []\n', "no [cpu] section"),
        ('[cpu]\nprobe = "x"\n', "either 'requires' or 'lock'"),
        ('[cpu]\nprobe = "x"\nrequires = []\nlock = "toy"\n', "either 'requires' or 'lock'"),
        ('[cpu]\nprobe = "x"\nrequires = []\npyhton = ">=3.11"\n', "unknown key 'pyhton'"),
        ('[cpu]\nrequires = ["numpy"]\n', "'probe' must name"),
        ('[cpu]\nprobe = "x"\nrequires = "numpy"\n', "'requires' must be a list of strings"),
        ('[cpu]\nprobe = "x"\nrequires = ["numpy=2"]\n', "numpy=2"),
        ('[cpu]\nprobe = "x"\nrequires = []\npython = "3.11 or so"\n', "3.11 or so"),
        ('[cpu]\nprobe = "x"\nrequires = []\nenviron = { A = 1 }\n', "'environ' must map"),
        ('[cpu]\nprobe = "x"\nlock = "nobody"\n', "no stack 'nobody'"),
        ('cpu = "numpy"\n', "must be a table"),
    ],
)
def test_malformed_needs_are_refused_in_a_sentence(stacks, text, complaint):
    stacks("toy", text)
    with pytest.raises(EnvironmentFailure) as failure:
        environments.load_needs("toy", "cpu")
    assert complaint in failure.value.message
    assert failure.value.remedy
    found = environments.find("toy", "cpu")
    assert isinstance(found, Missing)
    assert complaint in found.reason


def test_unknown_stack_names_the_known_ones(stacks):
    stacks("toy", TOY)
    with pytest.raises(EnvironmentFailure, match=r"no stack 'tyo'.*toy"):
        environments.load_needs("tyo", "cpu")


# --- building


def test_build_from_a_lock(stacks, tmp_path):
    lock = stacks("toy", TOY + '[cpu.environ]\nTOY_MODE = "fast"\n', TOY_LOCK)
    assert isinstance(environments.find("toy", "cpu"), Missing)
    lines = []
    built = environments.build("toy", "cpu", lines.append)
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    folder = tmp_path / "cache" / "envs" / f"{digest}-cpython-{THIS_VERSION}"
    assert built == Environment("toy", folder / "bin" / "python", {"TOY_MODE": "fast"}, digest, "built")
    said = (
        "import toylib, sys; from importlib.metadata import version; print(toylib.VALUE, version('toylib'), sys.prefix)"
    )
    reply = subprocess.run([built.python, "-c", said], capture_output=True, text=True, check=True)
    assert reply.stdout.split() == ["42", "1.5+cpu", str(folder)]
    assert any("toylib" in line for line in lines)
    assert environments.find("toy", "cpu") == built


def test_interrupted_build_is_built_anew(stacks, copied_venv, monkeypatch):
    stacks("toy", TOY, TOY_LOCK)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environments, "_check_imports", interrupted)
        with pytest.raises(KeyboardInterrupt):
            environments.build("toy", "cpu", silent)
    (folder,) = (p for p in (environments.cache_folder() / "envs").iterdir() if p.is_dir())
    (folder / "left-behind").write_text("")
    assert isinstance(environments.find("toy", "cpu"), Missing)
    environments.build("toy", "cpu", silent)
    assert not (folder / "left-behind").exists()
    assert isinstance(environments.find("toy", "cpu"), Environment)


def test_environment_whose_interpreter_was_removed_is_missing(stacks, copied_venv):
    stacks("toy", TOY, TOY_LOCK)
    built = environments.build("toy", "cpu", silent)
    built.python.unlink()
    built.python.symlink_to("/nowhere/python3")
    assert isinstance(environments.find("toy", "cpu"), Missing)


def test_same_lock_same_environment_other_lock_another(stacks, copied_venv):
    stacks("toy", TOY, TOY_LOCK)
    stacks("sharer", '[cpu]\nlock = "toy"\nprobe = "numpy"\n')
    stacks("twin", TOY, TOY_LOCK)
    stacks("newer", TOY, "# bumped\n" + TOY_LOCK)
    lines = []
    pythons = {s: environments.build(s, "cpu", lines.append).python for s in ("toy", "sharer", "twin", "newer")}
    assert pythons["toy"] == pythons["sharer"] == pythons["twin"] != pythons["newer"]
    assert lines.count("new environment") == 2


def test_builds_at_the_same_time_are_one_build(stacks, copied_venv):
    stacks("toy", TOY, TOY_LOCK)
    lines, built = [], []
    threads = [
        threading.Thread(target=lambda: built.append(environments.build("toy", "cpu", lines.append))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 3
    assert len(set(b.python for b in built)) == 1
    assert lines.count("new environment") == 1
    assert sum("waiting for another process" in line for line in lines) >= 1


def test_failed_install_quotes_pip_and_keeps_its_log(stacks, copied_venv):
    stacks("toy", TOY, "nosuchlib==1.0\n")
    with pytest.raises(EnvironmentFailure) as failure:
        environments.build("toy", "cpu", silent)
    assert "nosuchlib==1.0" in failure.value.detail
    (log,) = (environments.cache_folder() / "envs").glob("*.log")
    assert str(log) in failure.value.remedy
    assert "nosuchlib" in log.read_text()
    assert isinstance(environments.find("toy", "cpu"), Missing)


def test_environment_that_does_not_import_is_not_kept(stacks, copied_venv):
    stacks("toy", TOY.replace('probe = "toylib"', 'probe = "brokenlib"'), TOY_LOCK + "brokenlib==1.0\n")
    with pytest.raises(EnvironmentFailure, match=r"libbroken\.so: cannot open shared object file"):
        environments.build("toy", "cpu", silent)
    assert isinstance(environments.find("toy", "cpu"), Missing)


def test_worker_modules_are_asked_for_too(stacks, copied_venv):
    stacks("toy", TOY, "numpy==2.0\ntoylib==1.5\n")
    with pytest.raises(EnvironmentFailure, match="ml_dtypes"):
        environments.build("toy", "cpu", silent)


def test_unwritable_cache_is_said(stacks, tmp_path, monkeypatch):
    stacks("toy", TOY, TOY_LOCK)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RIDGEMARK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(EnvironmentFailure, match=r"cannot be written.*RIDGEMARK_CACHE"):
        environments.build("toy", "cpu", silent)


def test_missing_lock_is_said(stacks):
    stacks("toy", TOY)
    found = environments.find("toy", "cpu")
    assert isinstance(found, Missing)
    assert "toy-cpu.lock" in found.reason
    assert 'nox -s "lock(toy)"' in found.remedy


# --- locking


def test_lock_pins_everything_without_local_versions(stacks, copied_venv):
    stacks("toy", TOY)
    file = environments.lock("toy", "cpu", silent)
    header, pins = file.read_text().split("\nml-dtypes", 1)
    assert "ml-dtypes" + pins == TOY_LOCK
    assert all(line.startswith("#") for line in header.splitlines())
    assert "toylib, ml_dtypes" in header


def test_lock_for_a_gpu_is_resolved_without_installing_or_importing(stacks, copied_venv):
    stacks("toy", TOY.replace("[cpu]", "[cuda]").replace('"ml_dtypes"]', '"brokenlib", "ml_dtypes"]'))
    pins = environments.lock("toy", "cuda", silent).read_text().splitlines()[2:]
    assert pins == ["brokenlib==1.0", *TOY_LOCK.splitlines()]


def test_shared_lock_is_made_by_its_owner(stacks):
    stacks("toy", TOY, TOY_LOCK)
    stacks("sharer", '[cpu]\nlock = "toy"\nprobe = "numpy"\n')
    with pytest.raises(EnvironmentFailure, match=r"shares the lock of toy"):
        environments.lock("sharer", "cpu", silent)


OWN_LOCKS = [
    (stack, family)
    for stack, folder in registry.stacks().items()
    for family, section in tomllib.loads((folder / "env.toml").read_text()).items()
    if "requires" in section
]


@pytest.mark.parametrize(("stack", "family"), OWN_LOCKS)
def test_committed_lock_serves_its_requirements(stack, family):
    needs = environments.load_needs(stack, family)
    pins = {}
    for line in needs.lock.read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            assert name == canonicalize_name(name)
            assert "+" not in version
            pins[name] = version
    assert {"numpy", "ml-dtypes"} <= set(pins)
    for requirement in map(Requirement, needs.requires):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier
    assert {canonicalize_name(d) for d in needs.report} <= set(pins)


# --- interpreters


def fake_python(file: Path, version=(3, 99, 1), level="final", implementation="CPython", free=False, ensurepip=True):
    file.parent.mkdir(parents=True, exist_ok=True)
    description = json.dumps([str(file), version, level, implementation, free, ensurepip])
    file.write_text(f"#!/bin/sh\necho '{description}'\n")
    file.chmod(0o755)
    return file


@pytest.fixture
def no_interpreters(tmp_path, monkeypatch):
    """Only what a test puts there: an empty PATH and home."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "PYENV_ROOT", "UV_PYTHON_INSTALL_DIR", "ASDF_DATA_DIR", "MISE_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_running_interpreter_comes_first(no_interpreters):
    fake_python(no_interpreters / "bin" / "python3.15")
    found = environments.find_interpreter(">=3.11")
    assert (found.python, found.version) == (Path(sys.executable), THIS_VERSION)


@pytest.mark.parametrize(
    "place",
    [
        "bin/python3.15",
        ".pyenv/versions/3.99.1/bin/python3",
        ".local/share/uv/python/cpython-3.99.1-linux-x86_64-gnu/bin/python3",
        ".asdf/installs/python/3.99.1/bin/python3",
        ".local/share/mise/installs/python/3.99.1/bin/python3",
    ],
)
def test_interpreter_is_found_where_tools_put_it(no_interpreters, place):
    file = fake_python(no_interpreters / place)
    assert environments.find_interpreter(">=3.99") == environments.Interpreter(file, "3.99.1")


def test_path_comes_before_the_tools(no_interpreters):
    fake_python(no_interpreters / ".pyenv/versions/3.99.2/bin/python3", (3, 99, 2))
    on_path = fake_python(no_interpreters / "bin" / "python3")
    assert environments.find_interpreter(">=3.99").python == on_path


def test_what_cannot_serve_is_passed_over(no_interpreters):
    binaries = no_interpreters / "bin"
    shim = fake_python(binaries / "python3.19")
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.19: command not found' >&2\nexit 127\n")
    fake_python(binaries / "python3.18", level="candidate")
    fake_python(binaries / "python3.17", implementation="PyPy")
    fake_python(binaries / "python3.16", free=True)
    fake_python(binaries / "python3.15", ensurepip=False)
    assert environments.find_interpreter(">=3.99") is None
    good = fake_python(binaries / "python3.14")
    assert environments.find_interpreter(">=3.99").python == good
    assert environments.find_interpreter(">=3.99,<3.99.1") is None


def test_missing_interpreter_is_said(stacks, no_interpreters):
    stacks("toy", TOY.replace(">=3.11", ">=3.99"), TOY_LOCK)
    found = environments.find("toy", "cpu")
    assert isinstance(found, Missing)
    assert "needs Python >=3.99" in found.reason
    assert "interpreters.toml" in found.remedy


# --- the map


@pytest.fixture
def mapping(tmp_path, monkeypatch, stacks):
    """Write the interpreter map."""
    stacks("toy", TOY.replace('probe = "toylib"', 'probe = "json"'), TOY_LOCK)
    file = tmp_path / "map" / "interpreters.toml"
    file.parent.mkdir()

    def write(text):
        file.write_text(text)
        monkeypatch.setenv("RIDGEMARK_INTERPRETERS", str(file))
        return file

    return write


@pytest.mark.parametrize("key", ["toy", '"*"'])
def test_mapped_interpreter_is_used_as_it_is(mapping, key):
    mapping(f"[stacks]\n{key} = {json.dumps(sys.executable)}\n")
    expected = Environment("toy", Path(sys.executable), {}, None, "mapped")
    assert environments.find("toy", "cpu") == expected
    assert environments.build("toy", "cpu", silent) == expected
    assert not environments.cache_folder().exists()


def test_map_of_other_stacks_changes_nothing(mapping):
    mapping(f"[stacks]\nelse = {json.dumps(sys.executable)}\n")
    assert environments.mapped_interpreter("toy") is None


def test_users_own_map_and_paths_relative_to_it(mapping, tmp_path, monkeypatch):
    monkeypatch.delenv("RIDGEMARK_INTERPRETERS")
    file = tmp_path / "config" / "interpreters.toml"
    file.parent.mkdir()
    file.write_text('[stacks]\ntoy = "../envs/toy/bin/python"\n')
    assert Path(os.path.normpath(environments.mapped_interpreter("toy"))) == tmp_path / "envs/toy/bin/python"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[stacks]\ntoy = "/nowhere/python3"\n', "cannot be started"),
        ("[stacks]\ntoy = 3\n", "must map names to paths"),
        ("[stacks\n", "cannot be used"),
    ],
)
def test_unusable_map_is_said(mapping, text, complaint):
    file = mapping(text)
    found = environments.find("toy", "cpu")
    assert isinstance(found, Missing)
    assert complaint in found.reason
    assert str(file) in found.reason
    with pytest.raises(EnvironmentFailure):
        environments.build("toy", "cpu", silent)


def test_map_that_is_not_there_is_said(mapping, monkeypatch):
    monkeypatch.setenv("RIDGEMARK_INTERPRETERS", "/nowhere/map.toml")
    assert "/nowhere/map.toml" in environments.find("toy", "cpu").reason


def test_mapped_interpreter_without_the_library_is_said(mapping, bare_venv):
    mapping(f"[stacks]\ntoy = {json.dumps(str(bare_venv / 'bin' / 'python'))}\n")
    found = environments.find("toy", "cpu")
    assert "No module named 'numpy'" in found.reason
    assert "toylib" in found.remedy


# --- the command


def test_command_prints_the_path_or_a_sentence(stacks, copied_venv, monkeypatch, capsys):
    stacks("toy", TOY, TOY_LOCK)
    monkeypatch.setattr(sys, "argv", ["environments", "find", "toy"])
    assert environments.main() == 2
    assert "has not been built" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["environments", "build", "toy"])
    assert environments.main() == 0
    python = Path(capsys.readouterr().out.strip())
    assert python == environments.find("toy", "cpu").python
