"""``python -m impls.cutlass.compile_attention CASE ...``: compile what cases of attention need, without a GPU.

Runs where nvidia-cutlass-dsl and gcc are installed, and writes into the folder that ``kernels/cute_host.py`` names; a
GPU node needs that folder alone.
"""

from __future__ import annotations

import argparse
import sys

from impls.cutlass.cute_attention import Cute, CuteNoPingPong
from impls.support.h200 import H200
from impls.workloads.attention import Attention
from impls.workloads.base import parse_case


def main() -> int:
    """Compile for every case; the number of cases that both implementations refuse, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="+", help="case ids")
    refused = 0
    for case in map(parse_case, parser.parse_args().case):
        taken = False
        for implementation in (Cute(), CuteNoPingPong()):
            if not isinstance(case, Attention):
                print(f"{case.id} is no attention", flush=True)
            elif (why := implementation.refuses(case, H200)) is not None:
                print(f"{case.id}: {implementation.name}: {why}", flush=True)
            else:
                taken = True
                for built in implementation.libraries(case):
                    print(f"{case.id}: {implementation.name}: {built.path}", flush=True)
        refused += not taken
    return min(refused, 100)


if __name__ == "__main__":
    sys.exit(main())
