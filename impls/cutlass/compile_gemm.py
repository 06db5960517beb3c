"""``python -m impls.cutlass.compile_gemm [--candidates] CASE ...``: compile what GEMMs take, without a GPU.

Runs where nvidia-cutlass-dsl and gcc are installed, and writes into the folder that ``kernels/cute_host.py`` names; a
GPU node needs that folder alone. With ``--candidates`` it compiles all that tuning would try.
"""

from __future__ import annotations

import argparse
import sys
import time

from impls.cutlass.cute_gemm import Cute, CuteNoCluster, choose
from impls.support.h200 import H200
from impls.workloads.base import parse_case
from impls.workloads.gemm import Gemm


def main() -> int:
    """Compile for every case; the number of cases that are refused, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", action="store_true", help="all that tuning would try")
    parser.add_argument("case", nargs="+", help="case ids")
    arguments = parser.parse_args()
    refused = 0
    for case in map(parse_case, arguments.case):
        why = Cute().refuses(case, H200) if isinstance(case, Gemm) else "It is no GEMM."
        if why is not None:
            refused += 1
            print(f"{case.id}: {why}", flush=True)
            continue
        assert isinstance(case, Gemm)
        chosen, _ = choose(case, H200.name)
        choices = [one.variant(chosen) for one in (Cute(), CuteNoCluster())]
        if arguments.candidates:
            choices += Cute().space(case)
        begin = time.monotonic()
        libraries = {Cute().compile_ahead(case, choice, H200.arch): None for choice in choices}
        print(f"{case.id}: {len(libraries)} libraries, {time.monotonic() - begin:.0f} s", flush=True)
    return min(refused, 100)


if __name__ == "__main__":
    sys.exit(main())
