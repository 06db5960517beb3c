"""Compiles the stack's C++ kernels beforehand: a shared library for each, cached by the hash of what it is made of.

``python -m impls.cutlass.build [CASE ...] [--device NAME] [--jobs N]`` compiles what ``cutlass.cpp`` and its variants
run these cases with; without cases, everything that tuning chose for the device. It needs nvcc, 12.3 or newer, and
CUTLASS' headers, and no GPU. The machine that measures needs neither: a bundle brings it the libraries, which lie in
``<cache>/cutlass/<name>-<hash>.so``, ``<cache>`` as for environments: ``RIDGEMARK_CACHE`` or the user's cache folder.

Owns the cache and the compiler's flags. What is compiled is written by ``kernels.cpp_source``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from impls.cutlass import cpp_choices
from impls.cutlass.cpp_choices import Kernel
from impls.cutlass.kernels.cpp_source import source
from impls.support import tuned
from impls.support.h200 import H200
from impls.workloads.base import parse_case

#: The version that the sources are written for; part of every library's name.
CUTLASS = "4.2.0"
FLAGS = (
    "-gencode=arch=compute_90a,code=sm_90a",
    "-std=c++17",
    "--expt-relaxed-constexpr",
    "-O3",
    "-DNDEBUG",
    "-shared",
    # PyTorch has loaded the same runtime.
    "--cudart=shared",
    "-Xcompiler=-fPIC,-O1",
)
# One of wgmma's shapes in CuTe's headers, the instruction or its traits: the head, the width, then the body.
_SHAPE = re.compile(
    r"^(struct (?:MMA_Traits<[\w:]*?|G?MMA_)64x(\d+)x\d+_[^\n]*\n)\{\n.*?^\};", re.MULTILINE | re.DOTALL
)
# ptxas: C7510 and C7511 say that wgmma instructions wait for one another.
_SERIALIZED = re.compile(r"\((C751\d)\)[^\n]*serialized[^\n]*?(?= in the function|\n)")


class BuildError(Exception):
    """A library is not there and cannot be made; the message says what is missing and what to do."""


def folder() -> Path:
    """Where the libraries lie."""
    named = os.environ.get("RIDGEMARK_CACHE")
    cache = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ridgemark"
    return cache.absolute() / "cutlass"


def library(kernel: Kernel) -> Path:
    """The file of a kernel's library, whether it is there or not."""
    made_of = "\n".join((CUTLASS, *FLAGS, source(kernel)))
    return folder() / f"{kernel.name}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}.so"


def ensure(kernel: Kernel) -> Path:
    """The library, compiled now (half a minute) if it is not there.

    Raises:
        BuildError: it is not there, and there is no nvcc or no CUTLASS; or it does not compile.
    """
    file = library(kernel)
    if not file.exists():
        _compile(kernel, file)
    return file


def build(kernels: Iterable[Kernel], jobs: int, say: Callable[[str], None]) -> dict[Kernel, str]:
    """Compile what is not there yet, several at a time, and say how far it is.

    Returns:
        What did not compile, and why.
    """
    missing = [kernel for kernel in dict.fromkeys(kernels) if not library(kernel).exists()]
    failed: dict[Kernel, str] = {}
    begin = time.monotonic()
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        waiting = {pool.submit(_compile, kernel, library(kernel)): kernel for kernel in missing}
        for done, future in enumerate(as_completed(waiting), 1):
            kernel = waiting[future]
            how = f"{time.monotonic() - begin:.0f} s"
            try:
                future.result()
            except BuildError as error:
                failed[kernel] = str(error)
                how += f", failed: {error}"
            say(f"[{done}/{len(missing)}] {kernel.name} ({how})")
    return failed


def chosen(device_name: str) -> list[Kernel]:
    """The kernels that ``cutlass.cpp`` and its variants take for everything that was tuned on a device."""
    from impls.contract import Device
    from impls.cutlass import cpp

    device = Device("cuda", device_name, "sm_90", 1, 0)
    cases = [case for case, _ in tuned.choices(tuned.file(Path(__file__).parent, device_name), cpp_choices.NAME)]
    return [kernel for case in cases for kernel in cpp.kernels(case, device)]


def headers() -> Path:
    """CUTLASS' include folder: of ``CUTLASS_PATH``, a checkout or the like, or of the package nvidia-cutlass.

    Raises:
        BuildError: there is none, or another version.
    """
    remedy = (
        f"Install nvidia-cutlass=={CUTLASS}.0 without its dependencies (pip install --no-deps), or set CUTLASS_PATH."
    )
    if named := os.environ.get("CUTLASS_PATH"):
        include = Path(named) / "include"
    else:
        package = importlib.util.find_spec("cutlass_library")
        if package is None or package.origin is None:
            raise BuildError(f"There are no CUTLASS headers here. {remedy}")
        include = Path(package.origin).parent / "source" / "include"
    version = include / "cutlass" / "version.h"
    if not version.is_file():
        raise BuildError(f"{include} has no CUTLASS headers. {remedy}")
    found = ".".join(re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", version.read_text()))
    if found != CUTLASS:
        raise BuildError(f"{include} is CUTLASS {found}; the kernels are written for {CUTLASS}. {remedy}")
    return include


def nvcc() -> Path:
    """The compiler: ``CUDA_HOME``'s, else PATH's, else that of /usr/local/cuda.

    Raises:
        BuildError: there is none.
    """
    home = os.environ.get("CUDA_HOME")
    places = [Path(home) / "bin" / "nvcc"] if home else []
    places += [Path(found)] if (found := shutil.which("nvcc")) else []
    for place in (*places, Path("/usr/local/cuda/bin/nvcc")):
        if place.is_file():
            return place
    raise BuildError("There is no nvcc here: install the CUDA toolkit, 12.3 or newer, or set CUDA_HOME.")


def thin(include: Path, columns: int, into: Path) -> None:
    """CuTe's headers of wgmma's shapes, to be found before CUTLASS' own: all declared, but only those that a tile of so
    many columns can use defined. There are 2112: reading all of them takes the compiler as long as all else.

    Args:
        include: CUTLASS' include folder.
        columns: of the tile.
        into: the include folder to write.
    """

    def declared(shape: re.Match[str]) -> str:
        return f"{shape[1]}{{}};"

    def defined_if_used(shape: re.Match[str]) -> str:
        return shape[0] if columns % int(shape[2]) == 0 else declared(shape)

    for file in (*include.glob("cute/arch/mma_sm90_gmma*.hpp"), *include.glob("cute/atom/mma_traits_sm90_gmma*.hpp")):
        text = _SHAPE.sub(declared if "sparse" in file.name else defined_if_used, file.read_text())
        written = into / file.relative_to(include)
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(text)


def _compile(kernel: Kernel, file: Path) -> None:
    try:
        compiler, include = nvcc(), headers()
    except BuildError as error:
        raise BuildError(
            f"{file.name} is not in the cache, and cannot be compiled: {error} Or compile it elsewhere (nox -s build) "
            "and copy it into the cache's folder cutlass."
        ) from error
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ridgemark-cutlass-") as scratch:
        text, made = Path(scratch) / f"{kernel.name}.cu", Path(scratch) / file.name
        text.write_text(source(kernel))
        thin(include, kernel.n, own := Path(scratch) / "include")
        command: list[str | Path] = [compiler, *FLAGS, f"-I{own}", f"-I{include}", "-o", made, text]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
        said = done.stdout + done.stderr
        if done.returncode != 0:
            errors = [line for line in said.splitlines() if "error" in line] or said.splitlines()[-1:] or ["nothing"]
            raise BuildError(f"{kernel.name} does not compile; nvcc says: {errors[0][:300]}")
        if serialized := _SERIALIZED.search(said):
            raise BuildError(
                f"{kernel.name} would be slow: ptxas says {serialized[1]}, its wgmma instructions are serialized. "
                "Choose a smaller tile."
            )
        new = file.with_name(f"{file.name}.{os.getpid()}.new")
        shutil.copyfile(made, new)
        new.replace(file)  # a killed build leaves no torn library under the name of its content


def main() -> None:
    """Compile, with a line for each library."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help="cases in place of those that were tuned")
    parser.add_argument("--device", default=H200.name, help="whose tuned choices (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time")
    arguments = parser.parse_args()
    from impls.contract import Device
    from impls.cutlass import cpp

    device = Device("cuda", arguments.device, "sm_90", 1, 0)
    cases = [parse_case(case) for case in arguments.case]
    kernels = [k for case in cases for k in cpp.kernels(case, device)] if cases else chosen(arguments.device)
    failed = build(kernels, arguments.jobs, lambda line: print(line, flush=True))
    print(f"{len(dict.fromkeys(kernels)) - len(failed)} libraries are in {folder()}.")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
