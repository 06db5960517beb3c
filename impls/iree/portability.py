"""Where a case's StableHLO compiles to, and where not and why: every target from the same bytes.

``python -m impls.iree.portability --out FILE CASE...`` in the stack's environment writes the matrix as JSON. Compiling
is all that happens: what runs here is measured as an implementation of its own. Flags are the target's alone, without
those that the implementations choose for a case's speed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from impls.iree import targets
from impls.workloads.base import CaseError, parse_case

SCHEMA = 2
_DISTRIBUTIONS = ("iree-base-compiler", "jax", "jaxlib")


def matrix(case_ids: Sequence[str]) -> dict[str, Any]:
    """Every case for every target.

    Returns:
        ``cases`` [{``case``, ``stablehlo_sha256``, ``stablehlo_version``, ``stablehlo_bytes``}] and ``results``
        [{``case``, ``target``, ``compiles``, ``reason`` (where it does not), ``module_bytes``, ``dispatches``,
        ``cpu_seconds`` (CPU time of the compiler, which does not depend on what else the machine does)}], with
        ``schema``, ``versions``, ``host``, ``targets`` {name: flags} and ``when``.
    """
    from impls.support import jax_cases, stablehlo

    cases, results = [], []
    for case_id in case_ids:
        artefact = stablehlo.export(jax_cases.computation(parse_case(case_id)))
        cases.append({"case": case_id, **artefact.config(), "stablehlo_bytes": len(artefact.data)})
        for target in targets.TARGETS:
            results.append({"case": case_id, "target": target.name, **_attempt(artefact.data, target)})
            print(f"{case_id} {target.name}: {results[-1]['reason'] or 'compiles'}", file=sys.stderr, flush=True)
    return {
        "schema": SCHEMA,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {name: importlib.metadata.version(name) for name in _DISTRIBUTIONS},
        "host": {"machine": platform.machine(), "system": platform.system()},
        "targets": {target.name: list(target.flags) for target in targets.TARGETS},
        "cases": cases,
        "results": results,
    }


def _attempt(data: bytes, target: targets.Target) -> dict[str, Any]:
    before = _compilers_seconds()
    try:
        statistics = targets.compile_module(data, target).statistics
    except targets.CompilerRefusal as refusal:
        found: dict[str, Any] = {"compiles": False, "reason": str(refusal), "module_bytes": None, "dispatches": None}
    else:
        found = {"compiles": True, "reason": None, **{key: statistics[key] for key in ("module_bytes", "dispatches")}}
    return found | {"cpu_seconds": round(_compilers_seconds() - before, 2)}


def _compilers_seconds() -> float:
    """CPU seconds of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Exit status 0, or 2 with a sentence on stderr for a case that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m impls.iree.portability", description=__doc__)
    parser.add_argument("cases", nargs="+", metavar="CASE", help="a case's id, such as gemm:512x512x512:f32")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    try:
        for case_id in options.cases:
            parse_case(case_id)
    except CaseError as error:
        print(error, file=sys.stderr)
        return 2
    found = matrix(options.cases)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
