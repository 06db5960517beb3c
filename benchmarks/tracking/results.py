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
from datetime import datetime
from pathlib import Path
from typing import Any

from asv.benchmarks import Benchmarks
from asv.environment import get_environments
from asv.machine import Machine
from asv.repo import NoSuchNameError
from asv.results import Results, iter_results
from asv.runner import BenchmarkResult

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
    files: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells(frame, notes):
        files[cell.machine["machine"], cell.commit].append(cell)

    known = {commit for commit in {commit for _, commit in files} if _has(repo, commit)}
    notes += _missing_commits(repo, {commit for _, commit in files}, known)
    benchmarks = Benchmarks.discover(conf, repo, list(get_environments(conf, None)), [repo.get_hash_from_name("HEAD")])
    for (_, commit), members in files.items():
        if commit in known:
            _file(conf, repo, benchmarks, members)
    _save_benchmarks(conf, benchmarks)
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


def _file(conf: Any, repo: Any, benchmarks: Mapping[str, Any], members: list[Cell]) -> None:
    """Write one machine's results at one commit, keeping what else the file holds."""
    machine = Machine()
    machine.__dict__.update(members[0].machine)
    machine.save(conf.results_dir)
    commit = members[0].commit
    described = {**members[0].machine, "python": Harness.described_python}
    results = Results(described, {}, commit, repo.get_date(commit), Harness.described_python, Harness.tool_name, {})
    results.load_data(conf.results_dir)
    for suite in SUITES:
        own = [cell for cell in members if cell.suite == suite.key() and cell.values]
        places = [tuple(map(str, cell.parameters)) for cell in own]
        when = max((cell.when for cell in own if cell.when), default=None)
        for metric in METRICS:
            name = f"{suite.key()}.track_{metric.name}"
            values = {
                place: cell.values[metric.name]
                for place, cell in zip(places, own, strict=True)
                if metric.name in cell.values
            }
            if not values:
                continue
            before = results.get_result_params(name) if name in results.get_all_result_keys() else []
            params = _union(suite, [before, list(zip(*places, strict=True))])
            result, selected = _result(params, values)
            results.add_result(
                benchmarks[name] | {"params": params},
                result,
                started_at=datetime.fromisoformat(when) if when else None,
                record_samples=True,
                selected_idx=selected,
            )
    results.save(conf.results_dir)


def _result(
    params: list[list[str]], values: Mapping[tuple[str, ...], metrics.Value]
) -> tuple[BenchmarkResult, set[int]]:
    """asv's form of these values, NaN where there is none, and the numbers of those that there are."""
    places = list(itertools.product(*params))
    found: list[Any] = [values.get(place, math.nan) for place in places]
    sampled = [isinstance(value, list) for value in found]
    result = BenchmarkResult(
        result=[True if s else v for s, v in zip(sampled, found, strict=True)],
        samples=[v if s else None for s, v in zip(sampled, found, strict=True)],
        number=[1 if s else None for s in sampled],
        errcode=0,
        stderr="",
        profile=None,
    )
    return result, {i for i, place in enumerate(places) if place in values}


def _union(suite: type[Suite], lists: Iterable[Any]) -> list[list[str]]:
    """All values of every parameter, in the order that the suites keep."""
    columns: list[list[str]] = [[] for _ in ("impl", *suite.axes)]
    for params in lists:
        for column, values in zip(columns, params, strict=False):
            column += values
    impls, *words = columns
    axes = [[int(v) if v.isdigit() else v for v in values] for values in words]
    return [[str(v) for v in values] for values in in_order(suite, impls, *axes)]


def _save_benchmarks(conf: Any, benchmarks: Any) -> None:
    """Write benchmarks.json with those parameters only that some machine has results of.

    What cannot run on any of them would fill the site with empty rows: asv's parameters are a full product.
    """
    held: dict[str, list[Any]] = defaultdict(list)
    for results in iter_results(conf.results_dir):
        for name in results.get_result_keys(benchmarks):
            params = results.get_result_params(name)
            values = results.get_result_value(name, params)
            places = itertools.product(*params)
            some = [place for place, v in zip(places, values, strict=True) if v is None or not math.isnan(v)]
            held[name].append([list(dict.fromkeys(column)) for column in zip(*some, strict=True)])
    described = {}
    for suite in SUITES:
        for metric in METRICS:
            name = f"{suite.key()}.track_{metric.name}"
            params = _union(suite, held[name])
            if all(params):
                described[name] = benchmarks[name] | {"params": params}
    benchmarks._all_benchmarks = described
    benchmarks.save()
