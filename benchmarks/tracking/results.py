"""Records -> asv's result files, for records measured here and elsewhere alike.

Owns ``results/<machine>/<commit>-harness.json``, ``results/<machine>/machine.json`` and ``results/benchmarks.json``:
which result of the records they hold, under which machine and parameters. asv's own classes write them, so that they
are what ``asv run`` would have written; a file that is there already keeps what the records do not speak of.

A result is filed under the commit that its run was stamped with. Left out are results without a commit or with
uncommitted changes, since asv files by commit, and other regimes than a device's usual one (``sustained``).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from asv.benchmarks import Benchmarks
from asv.environment import get_environments
from asv.machine import Machine
from asv.repo import NoSuchNameError
from asv.results import Results, iter_results
from asv.runner import BenchmarkResult
from asv.util import is_nan

from analysis import frame as frames
from analysis.frame import Frame
from benchmarks.engine.session import REGIMES
from benchmarks.suites import attention, gemm
from benchmarks.suites._suite import METRICS, Suite, in_order
from benchmarks.tracking import metrics
from benchmarks.tracking.plugin import Harness, machine_of
from impls.workloads.base import CaseError, parse_case

SUITES: tuple[type[Suite], ...] = (
    *(gemm.Square, gemm.Llm, gemm.Shapes, gemm.Epilogues, gemm.Batched),
    *(attention.Prefill, attention.Decode, attention.Backward),
)


#: A combination of parameters, as asv writes them.
Place: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """What asv holds of one implementation and case, at one commit on one machine.

    Attributes:
        machine: asv's description of the machine.
        commit: full hash.
        case, impl: what ran.
        suite: ``gemm.Square``: the benchmarks' name without the metric.
        parameters: asv's, the implementation first.
        values: metric -> value.
        reason: why it failed, one sentence.
        when: ISO time of the result.
    """

    machine: Mapping[str, str]
    commit: str
    case: str
    impl: str
    suite: str
    parameters: tuple[str | int, ...]
    values: metrics.Values
    reason: str | None
    when: str | None


def cells(frame: Frame, notes: list[str]) -> list[Cell]:
    """The cells of all machines and commits in ``frame``: of several runs at the same commit, the latest.

    Args:
        notes: what is left out is said here, a sentence each.
    """
    values = metrics.of(frame)
    left_out: Counter[str] = Counter()
    latest: dict[tuple[str, str, str, str], tuple[str, Cell]] = {}
    for row in frame.results.itertuples():
        if row.workload == "ceiling" or row.replica or row.regime not in REGIMES.values():
            continue
        if not isinstance(row.commit, str):
            left_out["were not measured in a git checkout"] += 1
            continue
        if row.dirty:
            left_out["were measured with uncommitted changes"] += 1
            continue
        try:
            case = parse_case(row.case)
        except CaseError:
            left_out["have case ids that cannot be read here"] += 1
            continue
        place = next(((suite, p) for suite in SUITES if (p := suite.place(case)) is not None), None)
        if place is None:
            left_out["belong to no suite"] += 1
            continue
        machine = machine_of(frame.runs.at[row.run, "machine_facts"] or {"name": row.machine}, row.device_kind)
        key = (machine["machine"], row.commit, row.case, row.impl)
        if key in latest and latest[key][0] > row.run:  # Run ids sort by time.
            continue
        suite, where = place
        cell = Cell(
            machine,
            row.commit,
            row.case,
            row.impl,
            suite.key(),
            (row.impl, *where),
            values.get(row.Index, {}),
            row.reason,
            row.when if isinstance(row.when, str) else row.started,
        )
        latest[key] = (row.run, cell)
    notes += [f"{count} results {what}: asv does not get them." for what, count in left_out.items()]
    return [cell for _, cell in latest.values()]


def ingest(conf: Any, repo: Any) -> list[str]:
    """Bring asv's files below ``conf.results_dir`` up to date with the records there.

    Returns:
        What was left out or is missing, one sentence each.
    """
    folder = Path(conf.results_dir)
    if not any((folder / "records").rglob("*.jsonl")):
        return [f"{folder / 'records'} holds no records: measure some with nox, or copy a machine's folder there."]
    frame = frames.load([folder / "records"])
    notes = list(frame.notes)
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells(frame, notes):
        found.setdefault((cell.machine["machine"], cell.commit), []).append(cell)
    commits = {commit for _, commit in found}
    known = {commit for commit in commits if _has(repo, commit)}
    notes += _missing_commits(repo, commits, known)
    found = {(machine, commit): members for (machine, commit), members in found.items() if commit in known}

    files = {(results.params["machine"], results.commit_hash): results for results in iter_results(conf.results_dir)}
    for key, members in found.items():
        if key not in files:
            files[key] = _new_file(conf, repo, members[0])
    benchmarks = Benchmarks.discover(conf, repo, list(get_environments(conf, None)), [repo.get_hash_from_name("HEAD")])
    described = _described(
        benchmarks, files.values(), [c for c in itertools.chain(*found.values()) if c.commit in known]
    )
    for key, results in files.items():
        _update(results, described, found.get(key, []))
        results.save(conf.results_dir)
    benchmarks._all_benchmarks = described
    benchmarks.save()
    return notes


def _has(repo: Any, commit: str) -> bool:
    try:
        repo.get_hash_from_name(commit)
    except NoSuchNameError:
        return False
    return True


def _missing_commits(repo: Any, commits: set[str], known: set[str]) -> list[str]:
    notes = []
    if missing := sorted(c[:8] for c in commits - known):
        shallow = repo._run_git(["rev-parse", "--is-shallow-repository"]).strip() == "true"
        notes.append(
            f"{len(missing)} of {len(commits)} commits with results are not in this clone ({', '.join(missing[:5])}"
            + (", ..." if len(missing) > 5 else "")
            + "): their results are left out. "
            + ("The clone is shallow: git fetch --unshallow brings them." if shallow else "Fetch the fork they are of.")
        )
    aside = sorted(c[:8] for c in known - set(repo.get_branch_commits("HEAD")))
    if aside:
        notes.append(
            f"{', '.join(aside[:5])}{', ...' if len(aside) > 5 else ''}: not on the line of first parents of HEAD. "
            "asv show and compare have their results, the site does not."
        )
    return notes


def _new_file(conf: Any, repo: Any, cell: Cell) -> Results:
    """An empty file for a cell's machine and commit, and the description of the machine beside it."""
    machine = Machine()
    machine.__dict__.update(cell.machine)
    machine.save(conf.results_dir)
    params = {**cell.machine, "python": Harness.described_python}
    date = repo.get_date(cell.commit)
    return Results(params, {}, cell.commit, date, Harness.described_python, Harness.tool_name, {})


def _described(
    benchmarks: Mapping[str, Any], files: Iterable[Results], found: Iterable[Cell]
) -> dict[str, dict[str, Any]]:
    """The benchmarks that some file or cell has a result of, with those parameters only that their suite has any of.

    asv's parameters are a full product: what can run on no machine would fill every table with empty rows.
    """
    names: set[str] = set()
    held: dict[str, set[Place]] = defaultdict(set)
    for results in files:
        for name in results.get_result_keys(benchmarks):
            places = {place for place, value in _values(results, name).items() if not is_nan(value)}
            if places:
                names.add(name)
                held[name.rpartition(".track_")[0]] |= places
    for cell in found:
        if cell.values:
            names |= {f"{cell.suite}.track_{metric}" for metric in cell.values}
            held[cell.suite].add(tuple(map(str, cell.parameters)))
    described = {}
    for suite in SUITES:
        if held[suite.key()]:
            impls, *axes = zip(*held[suite.key()], strict=True)
            numbers = ([int(v) if v.isdigit() else v for v in values] for values in axes)
            params = [[str(v) for v in values] for values in in_order(suite, impls, *numbers)]
            for name in (f"{suite.key()}.track_{metric.name}" for metric in METRICS):
                if name in names:
                    described[name] = benchmarks[name] | {"params": params}
    return described


def _update(results: Results, described: Mapping[str, dict[str, Any]], found: list[Cell]) -> None:
    """Bring a file to these cells and parameters. What else it holds stays; for the rest it says "not run"."""
    for name, benchmark in described.items():
        suite, _, metric = name.rpartition(".track_")
        own = [cell for cell in found if cell.suite == suite and metric in cell.values]
        values = {tuple(map(str, cell.parameters)): cell.values[metric] for cell in own}
        before = _values(results, name) if name in results.get_all_result_keys() else {}
        places = list(itertools.product(*benchmark["params"]))
        if not values and (not before or list(before) == places):
            continue
        when = max((cell.when for cell in own if cell.when), default=None)
        earlier = results.started_at.get(name)
        started = datetime.fromisoformat(when) if when else earlier and datetime.fromtimestamp(earlier / 1e3, UTC)
        results.add_result(
            benchmark,
            _result([values.get(place, math.nan) for place in places]),
            started_at=started,
            record_samples=True,
            # asv takes for failed what a file does not mention.
            selected_idx={i for i, place in enumerate(places) if place in values or place not in before},
        )


def _values(results: Results, name: str) -> dict[Place, float | None]:
    """What a file holds of a benchmark: NaN was not run, None failed."""
    params = results.get_result_params(name)
    return dict(zip(itertools.product(*params), results.get_result_value(name, params), strict=True))


def _result(values: list[metrics.Value]) -> BenchmarkResult:
    """asv's form of these values."""
    sampled = [isinstance(value, list) for value in values]
    return BenchmarkResult(
        result=[True if s else v for s, v in zip(sampled, values, strict=True)],
        samples=[v if s else None for s, v in zip(sampled, values, strict=True)],
        number=[1 if s else None for s in sampled],
        errcode=0,
        stderr="",
        profile=None,
    )
