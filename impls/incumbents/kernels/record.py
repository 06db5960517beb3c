"""``python -m impls.incumbents.kernels.record CASE ...``: compile FlashAttention-4 and QuACK for cases, without a GPU.

Runs where ``flash-attn-4``, ``quack-kernels``, ``nvidia-cutlass-dsl``, PyTorch and gcc are installed and writes what
``recording.folder`` says, for the implementations of this stack. What was recorded by the same versions is kept, and
added to. A choice that the library refuses is named and left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import metadata

from impls.contract import Implementation
from impls.incumbents import attention, gemm
from impls.incumbents.kernels import recording
from impls.incumbents.kernels.recording import Recorded
from impls.support.h200 import H200, MULTIPROCESSORS
from impls.workloads.attention import Attention
from impls.workloads.base import Case, parse_case
from impls.workloads.gemm import Gemm

#: The versions that ``libraries`` is written against: it calls functions that are not theirs to keep.
PINNED = {"flash-attn-4": "4.0.0b36", "quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.8.1"}


def _versions(implementation: str) -> dict[str, str]:
    """The distributions that an implementation's kernels come from; the library itself first."""
    library = "flash-attn-4" if implementation == "incumbents.fa4" else "quack-kernels"
    others = ("quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi")
    return {name: metadata.version(name) for name in dict.fromkeys((library, *others))}


def _there(implementation: str, case: Case) -> Recorded | None:
    """What was recorded of a case, by these versions, with its libraries."""
    try:
        there = Recorded.read(recording.file(implementation, case))
    except FileNotFoundError:
        return None
    libraries = {kernel["library"] for one in there.recordings for kernel in one.kernels}
    whole = all(recording.library(name).is_file() for name in libraries)
    return there if whole and there.versions == _versions(implementation) else None


def main() -> int:
    """Record every case; the number of cases of which nothing could be recorded, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--chosen", action="store_true", help="of QuACK, what is chosen by now; else all to choose from"
    )
    parser.add_argument("case", nargs="+", help="case ids")
    arguments = parser.parse_args()
    for name, version in PINNED.items():
        if (here := metadata.version(name)) != version:
            sys.exit(f"This is written for {name} {version}; here is {here}: install {name}=={version}.")

    from impls.incumbents.kernels import libraries
    from impls.incumbents.kernels.recorder import Kernels

    kernels = Kernels()
    kernels.watch()
    missing = 0
    for case in map(parse_case, arguments.case):
        one: Implementation = attention.FlashAttention4() if isinstance(case, Attention) else gemm.Quack()
        if (why := one.refuses(case, H200)) is not None:
            print(f"{case.id}: {why}", flush=True)
            continue
        begin, troubles = time.monotonic(), []
        choices: list[gemm.Configuration | None] = [None]
        if isinstance(case, Gemm):
            chosen, _ = gemm.choose(case, H200.name)
            choices = [chosen] if arguments.chosen else [*gemm.configurations(case)]
        there = _there(one.name, case)
        found, seconds = (there.recordings, there.compile_s) if there else ([], {})
        if not (missed := [c for c in choices if all(c != recorded.choice for recorded in found)]):
            print(f"{case.id}: {len(choices)} recorded already", flush=True)
            continue
        for choice in missed:
            try:
                with kernels.recording() as call:
                    if isinstance(case, Attention):
                        libraries.attend(case, call)
                    elif isinstance(case, Gemm) and choice is not None:
                        libraries.multiply(case, choice, call)
                found.append(call.recording(choice))
            except Exception as error:
                words = str(error).strip().splitlines() or [""]
                troubles.append(f"{choice}: {type(error).__name__}: {words[0][:200]}")
        for trouble in troubles:
            print(f"{case.id}: {trouble}", file=sys.stderr, flush=True)
        if not found:
            missing += 1
            continue
        used = {k["library"] for r in found for k in r.kernels}
        seconds = {name: (kernels.compile_s | seconds)[name] for name in sorted(used)}
        Recorded(_versions(one.name), MULTIPROCESSORS, seconds, found).write(recording.file(one.name, case))
        print(f"{case.id}: {len(found)} recorded, {len(used)} kernels, {time.monotonic() - begin:.1f} s", flush=True)
    return min(missing, 100)


if __name__ == "__main__":
    sys.exit(main())
