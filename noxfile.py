"""The project's tasks: ``nox`` compares, ``nox -s tests`` tests, ``nox --list`` shows the rest.

All sessions run in one light environment, the harness's, in ``.nox/harness``: one per session would install the same
packages a dozen times. The stacks' environments are built from their locks by ``benchmarks.engine.environments`` and
are kept outside the clone.
"""

import argparse
import sys
import tomllib
from pathlib import Path

import nox

nox.options.sessions = ["compare"]
nox.options.default_venv_backend = "none"

HARNESS = Path(".nox", "harness").absolute()
#: What is written in CUTLASS' CuTe DSL is compiled here: half a gigabyte beside PyTorch.
DSL = Path(".nox", "dsl").absolute()
PYPROJECT = nox.project.load_toml("pyproject.toml")
#: stack -> its env.toml: one section per device family.
NEEDS = {p.parent.name: tomllib.loads(p.read_text()) for p in sorted(Path("impls").glob("*/env.toml"))}
CPU_STACKS = [stack for stack, families in NEEDS.items() if "cpu" in families]
# A stack that shares another's lock has none of its own.
LOCKED_STACKS = [stack for stack, families in NEEDS.items() if any("requires" in f for f in families.values())]

STACKS = [stack for stack in NEEDS if stack != "ceilings"]
PORT = "8765"

_installed: set[str | None] = set()
_benched: set[str] = set()


def harness(session: nox.Session, group: str | None = None) -> None:
    """Install the harness, editable, and one of its dependency groups; once in a run of nox."""
    if not (HARNESS / "bin" / "pip").exists():
        session.run(sys.executable, "-m", "venv", str(HARNESS), external=True)
    if group not in _installed:
        packages = nox.project.dependency_groups(PYPROJECT, group) if group else ()
        run(session, "pip", "install", "--quiet", "--editable", ".", *packages)
        _installed.add(group)


def run(session: nox.Session, tool: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> None:
    """Run a tool of the harness's environment, which must end with one of these exit codes."""
    session.run(str(HARNESS / "bin" / tool), *arguments, external=True, success_codes=codes)


def environment(session: nox.Session, action: str, stack: str, family: str) -> None:
    """Find, build or lock the environment of a stack."""
    run(session, "python", "-m", "benchmarks.engine.environments", action, stack, "--family", family)


@nox.session
def compare(session: nox.Session) -> None:
    """Measure the quick cases in every stack: table, report, site. Arguments go to ``ridgemark compare``."""
    harness(session)
    folder, others = arguments(session)
    run(session, "ridgemark", "compare", "--out", folder, *(others or ("--cases", "quick", "--budget", "3m")))
    build_site(session)


@nox.session
@nox.parametrize("stack", [nox.param(s, id=s) for s in ("all", *STACKS)])
def bench(session: nox.Session, stack: str) -> None:
    """Measure the cases that asv follows, in one stack and its baseline; arguments go to ``ridgemark compare``."""
    if "all" in _benched:
        session.skip("bench(all) has measured it together with the others")
    harness(session)
    chosen = () if stack == "all" else ("--impl", stack)
    run(session, "python", "-m", "benchmarks.tracking", "measure", *chosen, *session.posargs)
    _benched.add(stack)


@nox.session
def asv(session: nox.Session) -> None:
    """Run asv over the records: ``nox -s asv -- show HEAD``, ``-- compare A B``, ``-- run -b gemm.Square``."""
    harness(session)
    command, *more = session.posargs or ("show", "HEAD")
    if command == "publish":
        build_site(session)  # asv's own page would fetch its scripts from the network
    elif command == "run":
        # 2: something failed, which is a result like any other.
        run(session, "asv", "run", "--record-samples", *more, codes=(0, 2))
        run(session, "python", "-m", "benchmarks.tracking", "ingest")
    else:
        run(session, "python", "-m", "benchmarks.tracking", "ingest")
        run(session, "asv", command, *more)


@nox.session
def publish(session: nox.Session) -> None:
    """Build the site and the report from all records; ``-- --out DIR``: from those of another results folder."""
    harness(session)
    build_site(session)


@nox.session
def show(session: nox.Session) -> None:
    """Serve the site on this machine."""
    harness(session)
    session.log(f"The site is at http://127.0.0.1:{PORT}/ until you press Ctrl-C.")
    run(session, "python", "-m", "http.server", PORT, "--bind", "127.0.0.1", "--directory", "site")


def arguments(session: nox.Session) -> tuple[str, list[str]]:
    """The results folder, which ``--out`` names as in ``ridgemark compare``, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", default="results")
    known, others = parser.parse_known_args(session.posargs)
    return known.out, others


def build_site(session: nox.Session) -> None:
    """The site, the report in it, and where things are. What has nothing to show says so (2) and stops nothing."""
    folder, _ = arguments(session)
    run(session, "python", "-m", "benchmarks.tracking", "publish", "--out", folder, codes=(0, 2))
    run(session, "ridgemark", "report", folder, "--out", "site/report", codes=(0, 2))
    again = "" if folder == "results" else f" {folder}"
    session.log(f"Table:  above, and again with .nox/harness/bin/ridgemark show{again}")
    if Path("site", "report", "index.html").exists():
        session.log("Report: site/report/index.html, which opens in any browser")
    if Path("site", "index.html").exists():
        session.log("Site:   nox -s show")


@nox.session
@nox.parametrize("part", [nox.param(p, id=p) for p in ("unit", *CPU_STACKS)])
def tests(session: nox.Session, part: str) -> None:
    """Unit tests of the harness; conformance tests of one stack in its environment. Arguments go to pytest."""
    harness(session, "test")
    if part == "unit":
        run(session, "pytest", "tests", "--ignore", "tests/conformance", *session.posargs)
    else:
        environment(session, "build", part, "cpu")
        run(session, "pytest", "tests/conformance", "--stack", part, *session.posargs)


@nox.session
@nox.parametrize("stack", [nox.param(s, id=s) for s in LOCKED_STACKS])
def lock(session: nox.Session, stack: str) -> None:
    """Make a stack's locks anew from the requirements in its env.toml, one per device family."""
    harness(session)
    for family, needs in NEEDS[stack].items():
        if "requires" in needs:
            environment(session, "lock", stack, family)


@nox.session
@nox.parametrize("stack", [nox.param(s, id=s) for s in ("cublas", "cutlass", "pallas", "triton")])
def tune(session: nox.Session, stack: str) -> None:
    """Search, on this machine's GPU, what a stack's kernels run with; arguments (--seconds 300) go to the search."""
    harness(session)
    find = ("-m", "benchmarks.engine.environments", "find", stack, "--family", "cuda")
    python = session.run(str(HARNESS / "bin" / "python"), *find, external=True, silent=True)
    session.run(str(python).strip(), "-m", "benchmarks.tuning", stack, *session.posargs, external=True)


@nox.session
def build(session: nox.Session) -> None:
    """Compile, without a GPU, what stacks compile for an H200; arguments (cases) go to benchmarks.beforehand."""
    harness(session)
    # Headers only: what the package requires is for its Python interface, which is not used.
    run(session, "pip", "install", "--quiet", "--no-deps", *nox.project.dependency_groups(PYPROJECT, "cutlass"))
    if not (DSL / "bin" / "pip").exists():
        session.run(sys.executable, "-m", "venv", str(DSL), external=True)
    needs = nox.project.dependency_groups(PYPROJECT, "dsl")
    session.run(str(DSL / "bin" / "pip"), "install", "--quiet", *needs, external=True)
    run(session, "python", "-m", "benchmarks.beforehand", "--dsl", str(DSL / "bin" / "python"), *session.posargs)


@nox.session
def bundle(session: nox.Session) -> None:
    """What a GPU node without a network needs, in dist/bundle; arguments (--has node.json) go to benchmarks.bundle."""
    harness(session)
    run(session, "python", "-m", "benchmarks.bundle", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, formatting and types."""
    harness(session, "lint")
    run(session, "ruff", "check")
    run(session, "ruff", "format", "--check")
    run(session, "mypy")
