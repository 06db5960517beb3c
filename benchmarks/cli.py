"""The command ``ridgemark``: doctor, list, check, compare, show, profile, report.

Owns arguments, messages and exit codes. Exit codes: 0 done; 1 done, and something was wrong; 2 nothing could be done,
with one sentence that says why and what to do; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from analysis import counted, table
from analysis import frame as frames
from analysis import report as reports
from benchmarks import profile as profiles
from benchmarks.engine import cases as case_files
from benchmarks.engine import doctor as doctors
from benchmarks.engine import environments, machine, memory, records, session, trial
from benchmarks.engine.progress import Progress
from benchmarks.engine.reference import VARIANTS
from impls import registry
from impls.baselines import baseline_of
from impls.contract import Device, Implementation
from impls.workloads.base import Case, CaseError, parse_case
from impls.workloads.ceiling import Ceiling

app = typer.Typer(
    help="For this GEMM or attention, on this device: which stack, how far from the hardware's limit, "
    "and when is it worth leaving the baseline?",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
out = Console()
err = Console(stderr=True)

CasesOption = Annotated[
    str | None,
    typer.Option("--cases", metavar="NAME|FILE", help="Cases by name (quick, standard, llm, flagship) or TOML file."),
]
ImplOption = Annotated[
    list[str] | None,
    typer.Option("--impl", metavar="GLOB", help="Implementations, e.g. 'xla' or 'blas.*'; repeatable. Default: all."),
]
GemmOption = Annotated[
    list[str] | None, typer.Option("--gemm", metavar="SPEC", help="A GEMM, e.g. 512x512x512:f32; repeatable.")
]
AttentionOption = Annotated[
    list[str] | None,
    typer.Option("--attention", metavar="SPEC", help="An attention, e.g. b1h8s1024d64:bf16:causal; repeatable."),
]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Results folder.")]


class UsageError(Exception):
    """What was asked cannot be done; the message says what to do instead."""


# What a user may cause, and is told in a sentence; anything else is a defect and keeps its traceback.
_EXPECTED = (
    UsageError,
    CaseError,
    case_files.CaseFileError,
    registry.UnknownName,
    records.RecordError,
    environments.EnvironmentFailure,
    machine.NoDevice,
    profiles.NoProfiler,
)


def main() -> NoReturn:
    """Entry point: runs the command, turns expected errors into one sentence and exit code 2."""
    try:
        app(standalone_mode=True)
    except _EXPECTED as error:
        err.print(
            f"[bold red]error:[/] {escape(str(error.args[0] if isinstance(error, KeyError) else error))}",
            highlight=False,
        )
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(0)


@app.command()
def doctor() -> None:
    """What this machine can run, what not and why, and what to install.

    Exits 0 where the baseline can run, 1 otherwise.

    [bold]Example[/]   ridgemark doctor
    """
    diagnosis = doctors.diagnose()
    grid = Table(box=None, pad_edge=False)
    for heading in ("", "check", "found", "what to do"):
        grid.add_column(heading, overflow="fold")
    for check in diagnosis.checks:
        mark = "[green]ok[/]" if check.ok else "[red]no[/]"
        grid.add_row(mark, escape(check.name), escape(check.found), escape(check.remedy or ""))
    out.print(grid)
    if not diagnosis.baseline_ok:
        err.print("The baseline cannot run here yet; see what to do above.")
        raise typer.Exit(1)


@app.command("list")
def list_implementations(
    cases: CasesOption = None,
    impl: ImplOption = None,
    gemm: GemmOption = None,
    attention: AttentionOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Implementations, which of the given cases they support here, and why not where they don't.

    [bold]Examples[/]
      ridgemark list
      ridgemark list --impl xla --gemm 512x512x512:f8e4m3
      ridgemark list --cases flagship --json
    """
    device = machine.default_device()
    chosen = _cases(cases, gemm, attention, device, default="quick")
    rows: list[dict[str, Any]] = []
    for implementation in _implementations(impl):
        environment = None
        if device.kind in implementation.devices:
            environment = environments.find(implementation.stack, device.kind)
        supports = {
            case.id: registry.refusal(implementation, case, device)
            for case in chosen
            if case.workload == implementation.workload
        }
        rows.append(
            {
                "impl": implementation.name,
                "workload": implementation.workload,
                "devices": list(implementation.devices),
                "summary": implementation.summary,
                "baseline": implementation.name == baseline_of(implementation.workload, device.kind),
                "environment": environment.reason if isinstance(environment, environments.Missing) else None,
                "cases": supports,
            }
        )
    if as_json:
        out.print_json(json.dumps(rows))
        return
    grid = Table(box=None, pad_edge=False, expand=True)
    for heading in ("implementation", "workload", "cases", "what it is, and what it refuses here"):
        grid.add_column(heading, overflow="fold")
    for row in rows:
        reasons = {reason for reason in row["cases"].values() if reason}
        if row["environment"]:
            reasons.add(row["environment"])
        able = sum(reason is None for reason in row["cases"].values())
        text = escape(row["summary"]) + "".join(f"\n[dim]no: {escape(reason)}[/]" for reason in sorted(reasons))
        star = " [bold](baseline)[/]" if row["baseline"] else ""
        grid.add_row(escape(row["impl"]) + star, row["workload"], f"{able}/{len(row['cases'])}", text)
    out.print(grid)


@app.command()
def check(
    cases: CasesOption = None, impl: ImplOption = None, gemm: GemmOption = None, attention: AttentionOption = None
) -> None:
    """Judge only: are the outputs right? Nothing is timed and nothing is recorded.

    Exits 1 where an implementation is wrong, fails, crashes or runs out of time.

    [bold]Examples[/]
      ridgemark check --cases quick
      ridgemark check --impl xla --attention b1h8q1k1024d64:f32
    """
    device = machine.default_device()
    chosen = _cases(cases, gemm, attention, device, default="quick")
    implementations = _taking_part(impl, device)
    built, missing = _environments(implementations, device, named=bool(impl))
    plan = session.Plan(chosen, implementations, None, secrets.randbits(31))
    one = session.Session(plan, device=device, environments=built, missing=missing, writer=None)
    with Progress(err, len(chosen)) as progress:
        finished = one.run(progress, measure=False)
    grid = Table(box=None, pad_edge=False)
    grid.add_column("implementation", no_wrap=True)
    grid.add_column("outputs", no_wrap=True)
    grid.add_column("error / tolerance", justify="right", no_wrap=True)
    grid.add_column("reason", overflow="fold")
    for case in chosen:
        grid.add_row(f"[bold]{escape(case.id)}[/]")
        for result in (r for r in one.results if r["case"] == case.id):
            worst = max((e["worst"] for e in result["errors"].values()), default=None)
            style = {"checked": "green", "unsupported": "dim"}.get(result["status"], "bold red")
            grid.add_row(
                f"  {escape(result['impl'])}",
                f"[{style}]{'right' if result['status'] == 'checked' else result['status']}[/]",
                "" if worst is None else f"{worst:.3f}",
                escape(result["reason"] or ""),
            )
    out.print(grid)
    if not finished:
        raise typer.Exit(130)
    if any(r["status"] not in ("checked", "unsupported") for r in one.results):
        raise typer.Exit(1)


@app.command()
def compare(
    cases: CasesOption = None,
    impl: ImplOption = None,
    gemm: GemmOption = None,
    attention: AttentionOption = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time that the run should take, e.g. 90s, 5m, 1h.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the last run that did not come to its end.")
    ] = False,
    prepare_limit: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Longest that an implementation may take to prepare a case. Default: 5m, with --budget a tenth of it.",
        ),
    ] = None,
    folder: OutOption = Path("results"),
) -> None:
    """Check, then measure in interleaved rounds, record, and show the table.

    The baseline of each workload always takes part, and once more in a second process: that
    pair's ratio is the noise floor.
    Cases run in the order of their file: put first what must not be lacking. With --budget, which
    the last ones may exceed, there are fewer rounds where time is short.
    Ctrl-C keeps all that was measured; --resume goes on from there.

    [bold]Examples[/]
      ridgemark compare                                   the quick cases, everything that runs here
      ridgemark compare --gemm 1024x1024x1024:f32 --impl xla
      ridgemark compare --cases standard --budget 20m --out /tmp/mine
      ridgemark compare --cases my-shapes.toml
      ridgemark compare --resume
    """
    device = machine.default_device()
    if resume:
        if cases or impl or gemm or attention:
            raise UsageError(
                "--resume goes on with the last run's own plan: leave out --cases, --impl, --gemm and --attention."
            )
        run = _unfinished_run(folder)
    else:
        chosen = _with_ceilings(_cases(cases, gemm, attention, device, default="quick"), device, folder)
        run = _new_run(chosen, _taking_part(impl, device), _sustained(cases, chosen), folder, _without(cases))
    seconds = _seconds(budget) if budget else None
    deadlines = trial.Deadlines.within(seconds, _seconds(prepare_limit) if prepare_limit else None)
    finished = _measure(run, device, seconds, deadlines, named=bool(impl))
    rows = table.rows(records.read(run.path.parent), run=run.name)
    if finished and any(row.sol_fraction is not None and row.sol_fraction > 1 for row in rows):
        err.print("Something was faster than a measured ceiling: measuring the ceilings again.")
        ceilings = machine.ceiling_cases(device, _compute_dtypes(run.cases))
        _measure(_new_run(ceilings, (), frozenset(), folder, {}), device, None, trial.Deadlines(), named=False)
        rows = table.rows(records.read(run.path.parent), run=run.name)
    out.print(table.rich_table(rows))
    out.print(f"Records: {run.path}", highlight=False)
    if not finished:
        err.print("Interrupted. All that was measured is kept; go on with: ridgemark compare --resume")
        raise typer.Exit(130)


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="Records file, or results folder.")] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="As CSV.")] = False,
) -> None:
    """The table from records: time, ratio to the baseline, share of what the hardware allows, class, reason.

    [bold]Examples[/]
      ridgemark show
      ridgemark show results/records/h200 --csv > h200.csv
    """
    loaded = records.read(path)
    for repair in loaded.repairs:
        err.print(f"[yellow]repaired:[/] {escape(repair)}")
    if not any(line["kind"] == "result" for line in loaded.lines):
        raise UsageError(f"{path} holds no results yet. Measure some with: ridgemark compare")
    rows = table.rows(loaded)
    if as_json:
        print(table.to_json(rows))
    elif as_csv:
        print(table.to_csv(rows), end="")
    else:
        out.print(table.rich_table(rows))


@app.command()
def profile(
    cases: CasesOption = None,
    impl: ImplOption = None,
    gemm: GemmOption = None,
    attention: AttentionOption = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time that the run may take, e.g. 90s; what is left over is not counted."),
    ] = None,
    folder: OutOption = Path("results"),
) -> None:
    """Count what calls move and execute, by Nsight Compute: DRAM and L2 bytes, tensor instructions.

    What this machine's records hold as right and timed is counted, and what they do not hold where --impl names it.
    Stack after stack, in the order of --impl. Calls of known traffic are counted in every run, for calibration.
    Exits 1 where something could not be counted.

    [bold]Examples[/]
      ridgemark profile                                  the flagship cases
      ridgemark profile --gemm 4096x4096x4096:bf16 --impl cublas --impl xla
    """
    device = machine.default_device()
    if device.kind != "cuda":
        raise UsageError("Counters are read on an NVIDIA GPU only, and none is visible here.")
    place = records.folder(folder, machine.name())
    known = profiles.judged(records.read(place)) if place.is_dir() else {}
    chosen = _cases(cases, gemm, attention, device, default="flagship")
    taking_part = [i for p in impl for i in registry.select([p])] if impl else list(registry.implementations())
    programs = {
        (i.name, case.id): i
        for i in taking_part
        for case in chosen
        if known.get((i.name, case.id), bool(impl)) and registry.refusal(i, case, device) is None
    }
    if not programs:
        raise UsageError("Nothing of that has been measured here. Measure it first, with: ridgemark compare")
    # By stack, and the programs of one case together: they share its inputs.
    stacks, order = session.stacks_of(taking_part), {case.id: number for number, case in enumerate(chosen)}
    ordered = sorted(programs, key=lambda p: (stacks.index(programs[p].stack), order[p[1]]))
    calibrating = registry.select([profiles.PRODUCT[0], profiles.COPY[0]])
    built, missing = _environments((*calibrating, *programs.values()), device, named=bool(impl))
    name = records.new_run_id()
    writer = records.Writer(place / f"{name}.jsonl", name)
    try:
        run = profiles.Run(
            ordered,
            device=device,
            environments=built,
            missing=missing,
            writer=writer,
            seed=secrets.randbits(31),
            budget_s=_seconds(budget) if budget else None,
        )
        finished = run.run(lambda text: err.print(escape(text), highlight=False))
    finally:
        writer.close()
    out.print(counted.rich_table(run.lines))
    out.print(f"Records: {writer.path}", highlight=False)
    if not finished:
        raise typer.Exit(130)
    if any(line["status"] != "ok" for line in run.lines):
        raise typer.Exit(1)


# -- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One run: where it is recorded, what it does, and what it holds already where it is resumed."""

    name: str
    path: Path
    seed: int
    cases: tuple[Case, ...]
    implementations: tuple[Implementation, ...]
    sustained: frozenset[str]
    without: Mapping[str, Sequence[str]]
    already: records.Loaded | None = None


def _new_run(
    cases: tuple[Case, ...],
    implementations: tuple[Implementation, ...],
    sustained: frozenset[str],
    folder: Path,
    without: Mapping[str, Sequence[str]],
) -> Run:
    name = records.new_run_id()
    path = records.folder(folder, machine.name()) / f"{name}.jsonl"
    return Run(name, path, secrets.randbits(31), cases, implementations, sustained, without)


def _unfinished_run(folder: Path) -> Run:
    """The newest run that has not come to its end, at the commit at which it began."""
    place = records.folder(folder, machine.name())
    path = records.unfinished(folder, machine.name())
    if path is None:
        raise UsageError(f"No unfinished run in {place}. Start one without --resume.")
    already = records.read(path)
    begun = next((line for line in already.lines if line["kind"] == "run"), None)
    if begun is None:
        raise UsageError(f"{path} ends before its plan. Start a new run without --resume.")
    here = session.provenance(session.ROOT)
    if here["commit"] != begun["commit"]:
        raise UsageError(
            f"The run began at commit {begun['commit']}, and this is {here['commit']}: results of two commits do "
            "not belong in one run. Check that commit out again, or start a new run without --resume."
        )
    plan = begun["plan"]
    return Run(
        begun["run"],
        path,
        begun["seed"],
        tuple(map(parse_case, plan["cases"])),
        registry.select(plan["impls"]),
        frozenset(plan.get("sustained", ())),
        plan.get("without", {}),
        already,
    )


def _measure(run: Run, device: Device, budget_s: float | None, deadlines: trial.Deadlines, *, named: bool) -> bool:
    """Measure what the run still lacks; False where Ctrl-C ended it. ``named``: its stacks were asked for by name."""
    writer = records.Writer(run.path, run.name)
    for repair in [*writer.repairs, *(run.already.repairs if run.already else [])]:
        err.print(f"[yellow]repaired:[/] {escape(repair)}")
    try:
        implementations = _with_baselines(run.implementations, run.cases, device)
        built, missing = _environments(implementations, device, named=named)
        plan = session.Plan(run.cases, implementations, budget_s, run.seed, run.sustained, run.without)
        one = session.Session(
            plan,
            device=device,
            environments=built,
            missing=missing,
            writer=writer,
            already=run.already,
            deadlines=deadlines,
        )
        try:
            with Progress(err, len(run.cases) - len(one.finished)) as progress:
                return one.run(progress)
        finally:
            err.print(_where_the_time_went(one.phases.seconds), style="dim", highlight=False)
    finally:
        writer.close()


def _where_the_time_went(seconds: Mapping[str, float]) -> str:
    """One line: the phases of a run, longest first, what a phase consists of in brackets, and the rest."""
    wall = seconds.get("wall", 0.0)
    phases = {name: s for name, s in seconds.items() if "." not in name and name not in ("wall", "kernel")}
    told = []
    for name, spent in sorted(phases.items(), key=lambda item: -item[1]):
        parts = [f"{p.partition('.')[2]} {s:.1f}" for p, s in seconds.items() if p.startswith(f"{name}.")]
        told.append(f"{name} {spent:.1f}" + (f" ({', '.join(parts)})" if parts else ""))
    told.append(f"other {max(0.0, wall - sum(phases.values())):.1f}")
    return f"{wall:.1f} s, {seconds.get('kernel', 0.0):.1f} of them in timed calls: {', '.join(told)}"


@app.command()
def report(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATH]...", help="Records files, or results folders.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to write it.")] = Path("site/report"),
) -> None:
    """The decision report from records: index.html (one file, works offline), report.md, report.json.

    [bold]Examples[/]
      ridgemark report
      ridgemark report results/records/h200 --out /tmp/h200
    """
    paths = paths or [Path("results")]
    for path in paths:
        if not path.exists():
            raise UsageError(f"There is no {path}. Give a records file or a results folder.")
    try:
        made = reports.write(frames.load(paths), folder)
    except OSError as error:
        raise UsageError(f"Cannot write {folder}: {error.strerror}. Give another folder with --out DIR.") from error
    for note in made["notes"]:
        err.print(f"[yellow]note:[/] {escape(table.printable(note))}", highlight=False)
    out.print(f"Report: {folder / reports.FILES[0]}", highlight=False, soft_wrap=True)
    if not made["counts"]["results"]:
        raise UsageError(f"{', '.join(map(str, paths))}: no results yet. Measure some with: ridgemark compare")


# -- what the arguments mean ------------------------------------------------------------------------------------------


def _cases(
    cases: str | None, gemm: list[str] | None, attention: list[str] | None, device: Device, default: str
) -> tuple[Case, ...]:
    """The cases asked for, once each. One given by its spec must fit the machine; a file's are refused one by one."""
    single = [parse_case(f"gemm:{spec}") for spec in gemm or []]
    single += [parse_case(f"attention:{spec}") for spec in attention or []]
    for case in single:
        reason = memory.too_large(case, device, VARIANTS)
        if reason:
            raise UsageError(f"{case.id} is too large for this machine. {reason} Give a smaller shape.")
    chosen = list(single)
    if cases or not single:
        chosen = [entry.case for entry in case_files.load(cases or default)] + chosen
    return tuple({case.id: case for case in chosen}.values())


def _sustained(cases: str | None, chosen: tuple[Case, ...]) -> frozenset[str]:
    """Ids of the cases that their file also wants back to back, and of the ceilings of power that go with them."""
    named = {e.case.id for e in case_files.load(cases) if "sustained" in e.regimes} if cases else set()
    if named:
        named |= {c.id for c in chosen if isinstance(c, Ceiling) and _draws_power(c)}
    return frozenset(c.id for c in chosen if c.id in named)


def _without(cases: str | None) -> dict[str, list[str]]:
    """Case id -> names of the implementations that its file leaves out there."""
    entries = case_files.load(cases) if cases else []
    return {e.case.id: sorted({i.name for i in registry.select(e.without)}) for e in entries if e.without}


def _draws_power(case: Ceiling) -> bool:
    """Whether the ceiling is another one back to back. Of buffers that two sets leave in L2, one pass tells nothing."""
    return case.probe in ("rate", "exp") or case.bytes >= 128 << 20 or (case.bytes > 0 and case.repeats > 1)


def _implementations(patterns: list[str] | None) -> tuple[Implementation, ...]:
    return registry.select(patterns) if patterns else registry.implementations()


def _taking_part(patterns: list[str] | None, device: Device) -> tuple[Implementation, ...]:
    """Those named; where none is, all but those that this device only simulates, which takes them minutes."""
    return tuple(i for i in _implementations(patterns) if patterns or device.kind not in i.simulated_on)


def _with_baselines(
    implementations: tuple[Implementation, ...], cases: tuple[Case, ...], device: Device
) -> tuple[Implementation, ...]:
    """And what the cases' workloads are compared with, and the ceilings' own implementations."""
    chosen = {(i.name, i.workload): i for i in implementations}
    for workload in {case.workload for case in cases}:
        baseline = baseline_of(workload, device.kind)
        if baseline is not None:
            chosen.setdefault((baseline, workload), registry.find(baseline, workload))
        if workload == "ceiling":
            chosen.update({(i.name, i.workload): i for i in registry.select(["ceilings"])})
    return tuple(chosen[key] for key in sorted(chosen))


def _with_ceilings(cases: tuple[Case, ...], device: Device, folder: Path) -> tuple[Case, ...]:
    """The cases, after the ceilings that they are measured against and that this machine has no record of."""
    place = records.folder(folder, machine.name())
    known = set()
    if place.is_dir():
        measured = (r for r in records.results(records.read(place)) if r["status"] == "ok")
        known = {r["case"] for r in measured if r["regime"] != "sustained"}
    wanted = machine.ceiling_cases(device, _compute_dtypes(cases))
    return (*(c for c in wanted if c.id not in known and c not in cases), *cases)


def _compute_dtypes(cases: tuple[Case, ...]) -> list[str]:
    return sorted({case.compute_dtype for case in cases if case.workload != "ceiling"})


def _environments(
    implementations: tuple[Implementation, ...], device: Device, *, named: bool
) -> tuple[dict[str, environments.Environment], dict[str, str]]:
    """The environment of every stack, built where it is not there; and why a stack has none.

    One that holds a baseline must have one, and of those that were asked for by name at least one: EnvironmentFailure
    is raised.
    """
    needed = [
        s
        for s in session.stacks_of(implementations)
        if any(device.kind in i.devices for i in implementations if i.stack == s)
    ]
    vital = {name.partition(".")[0] for w in ("gemm", "attention") if (name := baseline_of(w, device.kind))}
    built: dict[str, environments.Environment] = {}
    missing: dict[str, str] = {}
    with err.status("environments"), ThreadPoolExecutor(max(1, len(needed))) as threads:
        # What can be seen without building anything, together: a mapped interpreter's imports take seconds.
        list(threads.map(lambda stack: environments.find(stack, device.kind), needed))
    failures = []
    for stack in needed:
        try:
            with err.status(f"environment of {stack}") as status:
                built[stack] = environments.build(stack, device.kind, status.update)
        except environments.EnvironmentFailure as failure:
            if stack in vital:
                raise
            failures.append(failure)
            missing[stack] = f"{failure.message} {failure.remedy}"
    if named and failures and set(built) <= vital:
        raise failures[0]
    for stack, reason in missing.items():
        err.print(f"[yellow]without {stack}:[/] {escape(reason)}", highlight=False)
    return built, missing


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)", text.strip())
    value = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if value <= 0:
        raise UsageError(f"{text!r} is no time: write 90s, 5m or 1h.")
    return value
