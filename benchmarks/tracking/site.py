"""The site: what ``asv publish`` writes, unfolded, under the offline interface of asv-tachyon.

Owns the tree below ``site``. asv's own page fetches its scripts from the network, so the interface is asv-tachyon's.
That interface averages over the parameters of a benchmark and draws bands and samples only where there are none. The
site therefore holds one benchmark per suite, metric and case, with machine and implementation as selectors, in the same
format (asv-tachyon's data contract): points are ``[revision, {"v", "lo", "hi", "samples"}]``. Values, regressions,
revisions and dates are asv's.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import math
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

import asv_tachyon.cli
import asv_tachyon.paths
from asv.benchmarks import Benchmarks
from asv.commands.publish import Publish
from asv.results import iter_results
from asv.util import UserError

from impls.baselines import baseline_of

#: Where the decision report lies in the site, for the links to it.
REPORT = "report/index.html"
#: What a visitor sees first: times, not the alphabetically first metric.
_START = """<script>if (!location.hash) location.hash = "view=overview&types=time"</script>
  </head>"""
_LINK = f"""
    <a href="{REPORT}" style="position: fixed; right: 1rem; bottom: 1rem; z-index: 9; padding: .6rem 1rem;
      border-radius: .6rem; background: #0f766e; color: #fff; font: 600 14px system-ui, sans-serif;
      text-decoration: none; box-shadow: 0 2px 8px #0006">Decision report</a>
  </body>"""


class NothingToPublish(Exception):
    """There is no result to show; the message says what to do."""


def publish(conf: Any, repo: Any) -> Path:
    """Build the site in ``conf.html_dir`` from asv's files. What was there is replaced, but for the report.

    Raises:
        NothingToPublish: there are no results, or asv could not collate them.
    """
    benchmarks = Benchmarks.load(conf)
    if not benchmarks:
        raise NothingToPublish(f"{conf.results_dir} holds no results for asv. Measure some with: nox")
    site = Path(conf.html_dir)
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = copy.copy(conf)
        elsewhere.html_dir = folder
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                Publish.run(elsewhere, pull=False)
        except UserError as error:
            raise NothingToPublish(f"asv publish failed:\n{said.getvalue()}{error}") from error
        index = json.loads((Path(folder) / "index.json").read_text())
        regressions = json.loads((Path(folder) / "regressions.json").read_text())
    for old in site.iterdir() if site.is_dir() else ():
        if old.name != Path(REPORT).parts[0]:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    site.mkdir(exist_ok=True)

    described, graphs = _unfold(conf, repo, benchmarks, index)
    states = _in_order(graphs)
    # Whatever state is chosen, the interface asks for all benchmarks: an empty series where there is nothing, no error.
    for name, state in itertools.product(described, states):
        points = graphs.get((name, state), [])
        _write(site / _path(name, dict(state)), sorted(points, key=lambda point: point[0]))
    for asked in ("profiles.json", "regressions-ignore.json"):
        _write(site / asked, [])
    keys = dict.fromkeys(key for state in states for key, _ in state)
    _write(
        site / "index.json",
        index
        | {
            "project_url": REPORT,
            "show_commit_url": "",
            "benchmarks": described,
            "graph_param_list": [dict(state) for state in states],
            "params": {key: sorted({dict(state)[key] for state in states}) for key in keys},
            "pages": [],
        },
    )
    _write(site / "regressions.json", {"regressions": list(_regressions(benchmarks, regressions["regressions"]))})
    _write(site / "commits.json", _subjects(repo, index["revision_to_hash"].values()))
    with contextlib.redirect_stdout(io.StringIO()):
        asv_tachyon.cli.cmd_install(site, backup=False)
    page = site / "index.html"
    html = page.read_text()
    page.write_text(html.replace("</head>", _START, 1).replace("</body>", _LINK.strip(), 1))
    return page


#: The selectors' values: machine and implementation.
State: TypeAlias = tuple[tuple[str, str], tuple[str, str]]


def _unfold(
    conf: Any, repo: Any, benchmarks: Mapping[str, Any], index: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[tuple[str, State], list[Any]]]:
    """Descriptions by name, and points by name and state (machine and implementation)."""
    revisions = {commit: int(revision) for revision, commit in index["revision_to_hash"].items()}
    shown = set(repo.get_branch_commits(conf.branches[0])) & revisions.keys()
    described: dict[str, Any] = {}
    graphs: dict[tuple[str, State], list[Any]] = defaultdict(list)
    for results in iter_results(conf.results_dir):
        if results.commit_hash not in shown:
            continue
        for key in results.get_result_keys(benchmarks):
            benchmark = benchmarks[key]
            params = results.get_result_params(key)
            columns = zip(
                itertools.product(*params),
                results.get_result_value(key, params),
                results.get_result_stats(key, params),
                results.get_result_samples(key, params),
                strict=True,
            )
            for place, value, stats, samples in columns:
                if value is None or math.isnan(value):
                    continue
                name = _name(benchmark, place)
                described.setdefault(name, _described(benchmark, name))
                state = (("machine", results.params["machine"]), ("impl", place[0]))
                graphs[name, state].append([revisions[results.commit_hash], _point(value, stats, samples)])
    return described, graphs


def _name(benchmark: Mapping[str, Any], place: tuple[str, ...]) -> str:
    """``gemm.Square.time[f32, n=1024]``. No round brackets: the interface cuts a name there."""
    suite, _, metric = benchmark["name"].rpartition(".track_")
    axes = zip(benchmark["param_names"][1:], place[1:], strict=True)
    return f"{suite}.{metric}[{', '.join(f'{axis}={v}' if v.isdigit() else v for axis, v in axes)}]"


def _in_order(graphs: Iterable[tuple[str, State]]) -> list[State]:
    """Every state once: by machine and by the first benchmark that it has, baselines first.

    The interface starts with the first state, lists benchmarks by name, and compares the first two states.
    """
    baselines = {baseline_of(workload, kind) for workload in ("attention", "gemm") for kind in ("cpu", "cuda")}
    first: dict[State, str] = {}
    for name, state in graphs:
        workload = name.partition(".")[0]
        first[state] = min(workload, first.get(state, workload))

    def position(state: State) -> tuple[str, str, bool, str]:
        (_, machine), (_, impl) = state
        return machine, first[state], impl not in baselines, impl

    return sorted(first, key=position)


def _described(benchmark: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A benchmark without parameters. Its type lets the interface show times alone."""
    timing = benchmark["name"].endswith(".track_time")
    kept = {key: benchmark[key] for key in ("unit", "version", "less_is_better", "pretty_name")}
    return kept | {"name": name, "type": "time" if timing else "track", "params": [], "param_names": []}


def _point(value: float, stats: Mapping[str, Any] | None, samples: list[float] | None) -> Any:
    """The value, with asv's 99 % interval of the median and the rounds where it has them."""
    if not stats or not samples:
        return value
    ends = {end: stats.get(f"ci_99_{name}") for end, name in (("lo", "a"), ("hi", "b"))}
    finite = {end: v for end, v in ends.items() if v is not None and math.isfinite(v)}
    return {"v": value, **finite, "samples": samples}


def _regressions(benchmarks: Mapping[str, Any], found: list[list[Any]]) -> Iterator[list[Any]]:
    """asv's regressions under the site's names."""
    for entry, graph, _, number, last, best, jumps in found:
        benchmark = benchmarks[entry.partition("(")[0]]
        place = next(itertools.islice(itertools.product(*benchmark["params"]), number, None))
        name = _name(benchmark, place)
        machine = next(part for part in Path(graph).parts if part.startswith("machine-")).removeprefix("machine-")
        state = {"machine": machine, "impl": place[0]}
        yield [name, _path(name, state), state, None, last, best, jumps]


def _subjects(repo: Any, commits: Any) -> dict[str, str]:
    """Full hash -> subject."""
    lines = repo._run_git(["log", "--no-walk", "--format=%H %s", *commits], dots=False).splitlines()
    return dict(line.split(" ", 1) for line in lines if " " in line)


def _path(name: str, state: Mapping[str, str]) -> str:
    """Where the interface looks for a graph."""
    return unquote(asv_tachyon.paths.graph_to_path(name, dict(state)))


def _write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, separators=(",", ":"), allow_nan=False))
