"""Case files: which shapes are measured, and why. TOML, the repository's and a user's alike.

Owns the format and its errors. What a shape means belongs to the workloads; how a model's configuration becomes shapes
to ``benchmarks.engine.models``.

A file holds any number of these, in any order::

    about = "One sentence on what the cases are for."        # optional
    regimes = ["burst", "sustained"]                         # optional, for all cases of the file

    [[case]]                                                 # one case
    id = "gemm:4096x4096x4096:bf16"
    why = "..."                                              # optional: where the shape comes from
    tags = ["cpu"]                                           # optional: names of subsets
    regimes = ["burst"]                                      # optional: burst (default), sustained; a CPU has only warm
    without = ["triton.split_k"]                             # optional: implementations, as --impl, that it leaves out

    [[sweep]]                                                # one case for every combination of `over`
    id = "gemm:{n}x{n}x{n}:{dtype}"
    over = { n = [256, 512], dtype = ["f32", "bf16"] }
    why = "..."                                              # tags, regimes and without as above

    [[model]]                                                # cases derived from a model's public configuration,
    ...                                                      # under the [serving] table: see models.py

Cases run in the order of the file. One that is named twice is measured once, with both reasons and all tags.
"""

from __future__ import annotations

import difflib
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine import models
from impls.workloads.base import Case, CaseError, parse_case

FOLDER = Path(__file__).parent.parent / "cases"
REGIMES = ("burst", "sustained")
_KINDS = ("case", "sweep", "model")
_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*(case|sweep|model)[ \t]*\]\]", re.MULTILINE)
# More is a slip of a sweep, and would take days.
_MOST = 20_000


class CaseFileError(Exception):
    """A case file that cannot be used. The message names the file and the entry, and says what to write."""


@dataclass(frozen=True)
class Entry:
    """One case of a file.

    Attributes:
        case: the case.
        why: where its shape comes from or what it shows, in words; may be empty.
        tags: the subsets it belongs to.
        regimes: how a GPU measures it (a CPU always measures warm).
        without: patterns of implementations that are not worth their time here.
    """

    case: Case
    why: str
    tags: frozenset[str]
    regimes: tuple[str, ...]
    without: frozenset[str] = frozenset()


def names() -> list[str]:
    """Names of the case files that come with Ridgemark."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(spec: str) -> list[Entry]:
    """The cases of a file: ``quick``, ``my-shapes.toml``, ``standard:cpu``, ``llm:decode+tp1``.

    Args:
        spec: the name of a file in benchmarks/cases or a path; after a colon, tags joined by ``+`` that a case must
            all have.

    Raises:
        CaseFileError: no such file, not readable, malformed, or no case has all the tags.
    """
    path, tags = _locate(spec)
    entries = _limited(path, _entries(path, *_document(path)))
    if not entries:
        raise CaseFileError(f'{path} holds no case. Add one: [[case]] with id = "gemm:512x512x512:f32".')
    # Tags are looked at before entries of the same shape become one: each tag belongs to one of its reasons.
    chosen = [entry for entry in entries if tags <= entry.tags]
    if not chosen:
        known = sorted(set().union(*(entry.tags for entry in entries)))
        wanted = "+".join(sorted(tags))
        raise CaseFileError(f"{path}: no case has the tags {wanted}; known: {', '.join(known) or 'none'}.")
    return _merged(chosen)


def _locate(spec: str) -> tuple[Path, frozenset[str]]:
    for name, tags in ((spec, ""), spec.rpartition(":")[::2]):
        if not name:
            continue
        path = FOLDER / f"{name}.toml" if name in names() else Path(name).expanduser()
        if path.is_file():
            return path, frozenset(filter(None, tags.split("+")))
    name = spec.partition(":")[0]
    near = difflib.get_close_matches(name, names(), n=1)
    raise CaseFileError(
        f"There are no cases called {spec!r}"
        + (f": did you mean {near[0]}? " if near else ". ")
        + f"Give {', '.join(names())}, or the path of a TOML file."
    )


def _document(path: Path) -> tuple[dict[str, Any], list[str]]:
    """What the file says, and the kinds of its tables in the order in which they stand there."""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), _HEADER.findall(text)
    except OSError as error:
        raise CaseFileError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CaseFileError(f"{path} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        raise CaseFileError(f"{path} is not valid TOML: {error}.") from error


def _entries(path: Path, document: Mapping[str, Any], headers: list[str]) -> Iterator[Entry]:
    where = str(path)
    common = {"about": str, "tags": list, "regimes": list}
    _check(where, document, common | {"case": list, "sweep": list, "model": list, "serving": dict})
    for kind, number, table in _in_order(document, headers):
        if not isinstance(table, dict):
            raise CaseFileError(f"{path}: write {kind} as tables, [[{kind}]].")
        name = table.get("id", table.get("name"))
        at = f"{path}, [[{kind}]] number {number}" + (f" ({name})" if isinstance(name, str) else "")
        if kind == "model":
            yield from _derived(at, document, table)
            continue
        keys = {"id": str, "why": str, "tags": list, "regimes": list, "without": list}
        _check(at, table, keys if kind == "case" else keys | {"over": dict})
        if "id" not in table:
            raise CaseFileError(f'{at} has no id. Write one such as id = "gemm:512x512x512:f32".')
        for values in [{}] if kind == "case" else _combinations(at, table):
            case_id, why = (_filled(at, table.get(key, ""), values) for key in ("id", "why"))
            yield _entry(at, document, table, case_id, why)


def _in_order(document: Mapping[str, Any], headers: list[str]) -> Iterator[tuple[str, int, Any]]:
    """(kind, number among its kind, table) as they stand in the file.

    TOML keeps the order among tables of one kind only. Where the headers found in the text are not those of the
    document (inline tables, a text that looks like a header), tables come kind by kind.
    """
    tables = {kind: list(enumerate(document.get(kind, []), start=1)) for kind in _KINDS}
    if any(headers.count(kind) != len(tables[kind]) for kind in _KINDS):
        headers = [kind for kind in _KINDS for _ in tables[kind]]
    for kind in headers:
        number, table = tables[kind].pop(0)
        yield kind, number, table


def _entry(
    at: str,
    document: Mapping[str, Any],
    table: Mapping[str, Any],
    case_id: str,
    why: str,
    tags: frozenset[str] = frozenset(),
) -> Entry:
    try:
        case = parse_case(case_id)
    except CaseError as error:
        raise CaseFileError(f"{at}: {case_id!r} is no case: {error}") from error
    for holder in (document, table):
        wrong = [t for key in ("tags", "regimes", "without") for t in holder.get(key, []) if not isinstance(t, str)]
        if wrong:
            raise CaseFileError(f"{at}: tags, regimes and without are lists of strings; {wrong[0]!r} is none.")
    regimes = table.get("regimes", document.get("regimes", ["burst"]))
    if not regimes or set(regimes) - set(REGIMES):
        raise CaseFileError(f"{at}: regimes = {regimes}; write one or both of {', '.join(REGIMES)}.")
    tags = tags.union(document.get("tags", []), table.get("tags", []))
    return Entry(case, why, tags, tuple(regimes), frozenset(table.get("without", [])))


def _combinations(at: str, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    over = table.get("over")
    if not over or not all(isinstance(values, list) and values for values in over.values()):
        raise CaseFileError(f"{at}: a sweep needs values to go over, such as over = {{ n = [256, 512] }}.")
    combinations = itertools.product(*over.values())
    made = [dict(zip(over, values, strict=True)) for values in itertools.islice(combinations, _MOST + 1)]
    if len(made) > _MOST:
        raise CaseFileError(f"{at} makes more than {_MOST} cases. Give fewer values.")
    return made


def _filled(at: str, template: str, values: Mapping[str, Any]) -> str:
    """``template`` with {name} replaced; nothing else of Python's format language is wanted or let in."""
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", str(value))
    if values and "{" in template:
        raise CaseFileError(f"{at}: {template!r} still has braces; `over` gives values for {', '.join(values)}.")
    return template


def _derived(at: str, document: Mapping[str, Any], table: Mapping[str, Any]) -> Iterator[Entry]:
    try:
        serving = models.Serving.of(document.get("serving", {}))
        for case_id, why, tags in models.Model.of(table).cases(serving):
            yield _entry(at, document, {}, case_id, why, frozenset(tags))
    except models.ModelError as error:
        raise CaseFileError(f"{at}: {error}") from error


def _limited(path: Path, entries: Iterator[Entry]) -> list[Entry]:
    made = list(itertools.islice(entries, _MOST + 1))
    if len(made) > _MOST:
        raise CaseFileError(f"{path} holds more than {_MOST} cases. Split it.")
    return made


def _merged(entries: list[Entry]) -> list[Entry]:
    """Every case once, with all reasons, tags and regimes of its entries, without what they all leave out."""
    merged: dict[str, Entry] = {}
    reasons: dict[str, dict[str, None]] = {}
    for entry in entries:
        before = merged.get(entry.case.id, entry)
        reasons.setdefault(entry.case.id, {})[entry.why] = None
        regimes = tuple(r for r in REGIMES if r in before.regimes + entry.regimes)
        why = "; ".join(filter(None, reasons[entry.case.id]))
        without = before.without & entry.without
        merged[entry.case.id] = Entry(entry.case, why, before.tags | entry.tags, regimes, without)
    return list(merged.values())


def _check(at: str, table: Mapping[str, Any], known: Mapping[str, type]) -> None:
    """That ``table`` holds known keys of the right types only."""
    names: dict[type, str] = {str: "a string", list: "a list", dict: "a table"}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}."
            raise CaseFileError(f"{at}: unknown key {key!r}; {hint}")
        if not isinstance(value, known[key]):
            raise CaseFileError(f"{at}: {key} must be {names[known[key]]}.")
