"""What generated code consists of: instruction families, registers, memory, read from listings.

Owns the reading of SASS (a cubin, or any file that holds one, through cuobjdump), of PTX and of AMD's assembly, and
which opcodes make a family. It does not own compiling, nor what a count means for a time. The counts are static: how
often an instruction stands in the code, not how often it is executed.

    code = inspect(cubin, ptx=ptx, dynamic_shared_bytes=shared)
    program.config["code"] = code.facts
    program.artefacts |= code.artefacts("matmul")
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

# Families by the head of the opcode. Names of Hopper's and Blackwell's opcodes: CUDA binary utilities, "Instruction Set
# Reference"; those that it leaves unexplained were told apart by assembling the PTX instruction named on the right.
_SASS_FAMILIES: Mapping[str, re.Pattern[str]] = {
    family: re.compile(pattern)
    for family, pattern in {
        "wgmma": r"(HGMMA|QGMMA|IGMMA|BGMMA)\b",  # wgmma.mma_async
        "tcgen05": r"UTC[HQIO]MMA\b",  # tcgen05.mma
        "mma": r"(HMMA|QMMA|IMMA|BMMA|DMMA|OMMA)\b",  # mma.sync
        "tma_load": r"UTMALDG\b",  # cp.async.bulk.tensor, global to shared
        "tma_multicast": r"UTMALDG\.\S*MULTICAST\b",  # ... .multicast::cluster; also counted as tma_load
        "tma_store": r"UTMASTG\b",  # cp.async.bulk.tensor, shared to global
        "tma_reduce": r"UTMAREDG\b",  # cp.reduce.async.bulk.tensor
        "bulk_copy": r"UBLKCP\b",  # cp.async.bulk, without a tensor map
        "cp_async": r"LDGSTS\b",  # cp.async
        "mbarrier": r"SYNCS\b",  # mbarrier.*
        "setmaxnreg": r"USETMAXREG\b",
        "cluster": r"UCGABAR_(ARV|WAIT)\b",  # barrier.cluster.*
        "grid_dependency": r"(ACQBULK|PREEXIT)\b",  # griddepcontrol.wait, .launch_dependents
        "barrier": r"BAR\b",  # bar.sync and named barriers
        "ldmatrix": r"LDSM\b",
        "stmatrix": r"STSM\b",
        "shared_load": r"LDS\b",
        "shared_store": r"STS\b",
        "global_load": r"LDG\b",
        "global_store": r"STG\b",
        "local_load": r"LDL\b",  # spills, and arrays that registers cannot index
        "local_store": r"STL\b",
        "ffma": r"FFMA2?\b",
        "ex2": r"MUFU\.EX2\b",
    }.items()
}
# Opcodes kept with their modifiers: they name the shape and the dtypes of a product, or the width of an access.
_SASS_IN_FULL = re.compile(r"(HGMMA|QGMMA|IGMMA|BGMMA|UTC[HQIO]MMA|HMMA|QMMA|IMMA|BMMA|DMMA|OMMA|UTMA(LDG|STG|REDG))\b")
_WIDTH = re.compile(r"\.[US]?(8|16|64|128|256)\b")

_SASS_FUNCTION = re.compile(r"^\s*Function : (\S+)\s*$")
# `/*0120*/   @!P0 HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4] ... ;`: address, predicate, opcode. What stands under @!PT is
# never executed (ptxas puts such loads before LDGSTS) and does not match.
_SASS_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(?!!PT)!?U?P\w+\s+)?([A-Z][\w.]*)")
_SASS_ENCODING = re.compile(r"\s*/\* 0x[0-9a-f]{16} \*/\s*$")
_RESOURCE_FUNCTION = re.compile(r"^\s*Function ([^\s:]+):\s*$")
_RESOURCES = re.compile(r"\bREG:(\d+) STACK:(\d+) SHARED:(\d+)")

_PTX_COUNTS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "cp.async.bulk.tensor load": r"\bcp\.async\.bulk\.tensor\.[\w.]*\.shared::\w+\.global\b",
        "cp.async.bulk.tensor multicast": r"\bcp\.async\.bulk\.tensor\.[\w.:]*\.multicast::cluster\b",
        "cp.async.bulk.tensor store": r"\bcp\.async\.bulk\.tensor\.[\w.]*\.global\.shared::cta\b",
        "cp.reduce.async.bulk.tensor": r"\bcp\.reduce\.async\.bulk\.tensor\b",
        "cp.async.bulk": r"\bcp\.async\.bulk\.(?:shared|global)\b",
        "cp.async": r"\bcp\.async\.c[ag]\b",
        "mbarrier": r"\bmbarrier\.\w+",
        "barrier.cluster": r"\bbarrier\.cluster\.\w+",
        "ldmatrix": r"\bldmatrix\.",
        "stmatrix": r"\bstmatrix\.",
        "ex2.approx": r"\bex2\.approx\b",
    }.items()
}
_PTX_SHAPES: Mapping[str, re.Pattern[str]] = {
    "wgmma.mma_async": re.compile(r"\bwgmma\.mma_async\.(?:sp\.)?sync\.aligned\.(m\d+n\d+k\d+(?:\.(?!satfinite)\w+)*)"),
    "mma.sync": re.compile(r"\bmma\.(?:sp\S*\.)?sync\.aligned\.(m\d+n\d+k\d+(?:\.\w+)*)"),
    "tcgen05.mma": re.compile(r"\btcgen05\.mma\.([\w.:]+)"),
    "setmaxnreg": re.compile(r"\bsetmaxnreg\.((?:inc|dec))\.sync\.aligned\.u32\s+(\d+)"),
    "griddepcontrol": re.compile(r"\bgriddepcontrol\.(\w+)"),
}
_PTX_TARGET = re.compile(r"^\s*\.target\s+(\w+)", re.MULTILINE)
_PTX_VERSION = re.compile(r"^\s*\.version\s+([\d.]+)", re.MULTILINE)

_AMD_FAMILIES: Mapping[str, re.Pattern[str]] = {
    family: re.compile(pattern)
    for family, pattern in {
        "mfma": r"v_s?mfmac?_",
        "buffer_load": r"buffer_load_",
        "buffer_store": r"buffer_store_",
        "global_load": r"global_load_",
        "global_store": r"global_store_",
        "scratch": r"scratch_(load|store)_",
        "lds_load": r"ds_read",
        "lds_store": r"ds_write",
        "barrier": r"s_barrier\b",
        "exp": r"v_exp_f",
        "fma": r"v_(pk_)?fmac?_f32",
    }.items()
}
_AMD_INSTRUCTION = re.compile(r"^\s+([a-z][a-z0-9_]+)\b(?!:)")
_AMD_KERNEL = re.compile(r"^\s*\.amdhsa_kernel\s+(\S+)")
_AMD_END = re.compile(r"^\s*\.end_amdhsa_kernel\b")
# Resource name here -> the directive of the kernel's descriptor that states it (LLVM, "User Guide for AMDGPU Backend").
_AMD_DESCRIPTOR = {
    "vgprs": "amdhsa_next_free_vgpr",
    "sgprs": "amdhsa_next_free_sgpr",
    "lds_bytes": "amdhsa_group_segment_fixed_size",
    "scratch_bytes": "amdhsa_private_segment_fixed_size",
}
_AMD_SPILLS = {"vgpr_spills": "vgpr_spill_count", "sgpr_spills": "sgpr_spill_count"}

_TOOL_SECONDS = 120
_LONGEST_NAME = 120


@dataclass(frozen=True)
class Code:
    """What was read from generated code.

    Attributes:
        facts: JSON values for a record's ``config["code"]``: ``kernels`` {name: ``registers`` per thread,
            ``static_shared_bytes`` (with the 1 KiB that the system reserves from sm_90 on), ``dynamic_shared_bytes``
            where the caller knew it, ``stack_bytes`` per thread, ``instructions`` {family: count}, ``opcodes`` {tensor
            and TMA opcodes in full: count}, ``widths`` {``global_load.128``: count}}, ``ptx`` (see ``of_ptx``), and
            ``unread``, a sentence, where the machine code could not be read.
        sass: the disassembly; None where it could not be made.
        ptx: the PTX that was given.
    """

    facts: dict[str, Any]
    sass: str | None = None
    ptx: str | None = None

    def artefacts(self, name: str) -> dict[str, str | bytes]:
        """The listings as artefacts of a program: ``name.sass`` and ``name.ptx``."""
        listings = {f"{name}.sass": self.sass, f"{name}.ptx": self.ptx}
        return {file: text for file, text in listings.items() if text is not None}


@dataclass
class _Kernel:
    instructions: Counter[str] = field(default_factory=Counter)
    opcodes: Counter[str] = field(default_factory=Counter)
    widths: Counter[str] = field(default_factory=Counter)


class ToolTrouble(RuntimeError):
    """The disassembler is missing or failed; the message says which and what to do."""


def inspect(image: bytes, *, ptx: str | None = None, dynamic_shared_bytes: int | None = None) -> Code:
    """Facts about every kernel of ``image``: a cubin, a fat binary, or a library that holds some.

    Missing tools, and an image that they reject, are said in ``facts["unread"]``; nothing is raised.

    Args:
        image: the file's contents.
        ptx: the PTX it was assembled from.
        dynamic_shared_bytes: shared memory asked for at launch, which the image does not tell.
    """
    facts: dict[str, Any] = {}
    sass = None
    try:
        sass = disassemble(image)
        facts["kernels"] = of_sass(sass)
    except ToolTrouble as trouble:
        facts["unread"] = str(trouble)
    if dynamic_shared_bytes is not None:
        for kernel in facts.get("kernels", {}).values():
            kernel["dynamic_shared_bytes"] = dynamic_shared_bytes
    if ptx is not None:
        facts["ptx"] = of_ptx(ptx)
    return Code(facts, sass, ptx)


def of_sass(listing: str) -> dict[str, dict[str, Any]]:
    """Facts by kernel from the output of ``cuobjdump -res-usage -sass``, or of either alone.

    A kernel name beyond 120 characters (C++ templates) is cut there and ends in a hash of the whole.
    """
    resources: dict[str, dict[str, Any]] = {}
    kernels: dict[str, _Kernel] = {}
    current: _Kernel | None = None
    described = ""
    for line in listing.splitlines():
        if found := _SASS_FUNCTION.match(line):
            current = kernels.setdefault(found[1], _Kernel())
        elif found := _RESOURCE_FUNCTION.match(line):
            described = found[1]
        elif described and (found := _RESOURCES.search(line)):
            registers, stack, shared = map(int, found.groups())
            resources[described] = {
                "registers": registers,
                "static_shared_bytes": shared,
                "stack_bytes": stack,
            }
            described = ""
        elif current is not None and (found := _SASS_INSTRUCTION.match(line)):
            _count(current, found[1])
    facts: dict[str, dict[str, Any]] = {}
    for name in kernels | resources:
        one = facts[_short(name)] = dict(resources.get(name, {}))
        if name in kernels:
            kernel = kernels[name]
            one["instructions"] = dict(sorted(kernel.instructions.items()))
            one["opcodes"] = dict(sorted(kernel.opcodes.items()))
            one["widths"] = dict(sorted(kernel.widths.items()))
    return facts


def of_ptx(text: str) -> dict[str, Any]:
    """Facts of a PTX module: ``target``, ``version``, ``shapes`` {instruction: {shape and dtypes: count}}, ``counts``.

    Comments do not count. The shapes of ``setmaxnreg`` are ``inc 232`` and ``dec 40``; those of ``griddepcontrol`` are
    ``wait`` and ``launch_dependents``.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    facts: dict[str, Any] = {}
    for key, pattern in (("target", _PTX_TARGET), ("version", _PTX_VERSION)):
        if found := pattern.search(text):
            facts[key] = found[1]
    shapes = {name: Counter(" ".join(m.groups()) for m in p.finditer(text)) for name, p in _PTX_SHAPES.items()}
    facts["shapes"] = {name: dict(sorted(counter.items())) for name, counter in shapes.items() if counter}
    counts = {name: sum(1 for _ in p.finditer(text)) for name, p in _PTX_COUNTS.items()}
    facts["counts"] = {name: count for name, count in counts.items() if count}
    return facts


def of_amdgcn(text: str) -> dict[str, Any]:
    """Facts of an AMD assembly listing: ``kernels`` {name: vgprs (with accumulators), sgprs, lds_bytes, scratch_bytes,
    vgpr_spills, sgpr_spills}, and over the whole file ``instructions`` {family: count}, ``opcodes`` {MFMA in full}.

    LDS that is asked for at launch is not in the listing.
    """
    instructions: Counter[str] = Counter()
    opcodes: Counter[str] = Counter()
    kernels: dict[str, dict[str, int]] = {}
    current: dict[str, int] | None = None
    for line in text.splitlines():
        if found := _AMD_KERNEL.match(line):
            current = kernels.setdefault(found[1], {})
        elif _AMD_END.match(line):
            current = None
        elif current is not None:
            for name, directive in _AMD_DESCRIPTOR.items():
                if stated := re.match(rf"\s*\.{directive}\s+(\d+)\s*$", line):
                    current[name] = int(stated[1])
        elif found := _AMD_INSTRUCTION.match(line):
            for family, pattern in _AMD_FAMILIES.items():
                if pattern.match(found[1]):
                    instructions[family] += 1
                    if family == "mfma":
                        opcodes[found[1]] += 1
    # The metadata names kernels in the order of their descriptors; each states its spills once.
    for name, entry in _AMD_SPILLS.items():
        spills = re.findall(rf"^\s*\.{entry}:\s+(\d+)\s*$", text, re.MULTILINE)
        if len(spills) == len(kernels):
            for kernel, count in zip(kernels.values(), spills, strict=True):
                kernel[name] = int(count)
    return {
        "kernels": kernels,
        "instructions": dict(sorted(instructions.items())),
        "opcodes": dict(sorted(opcodes.items())),
    }


@lru_cache(maxsize=16)  # half a second each, and cases of other shapes often have the same kernel
def disassemble(image: bytes) -> str:
    """The output of ``cuobjdump -res-usage -sass`` without the encodings.

    Raises:
        ToolTrouble: a tool is missing, or rejects the image.
    """
    cuobjdump, nvdisasm = (_tool(name) for name in ("cuobjdump", "nvdisasm"))
    # cuobjdump starts nvdisasm and looks for it on PATH only.
    environ = os.environ | {"PATH": os.pathsep.join((str(nvdisasm.parent), os.environ.get("PATH", "")))}
    with tempfile.TemporaryDirectory(prefix="ridgemark-sass-") as folder:
        file = Path(folder) / "image"
        file.write_bytes(image)
        try:
            done = subprocess.run(
                [cuobjdump, "-res-usage", "-sass", file],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TOOL_SECONDS,
                env=environ,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolTrouble(f"{cuobjdump} does not disassemble: {error}.") from error
    if done.returncode != 0 or "Function : " not in done.stdout:
        said = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()[-1]
        raise ToolTrouble(f"{cuobjdump} does not disassemble: {said}")
    return "".join(_without_encodings(done.stdout))


def _without_encodings(listing: str) -> Iterator[str]:
    for line in listing.splitlines():
        kept = _SASS_ENCODING.sub("", line)
        if kept or not line:
            yield kept + "\n"


def _tool(name: str) -> Path:
    for folder in _places():
        if found := shutil.which(name, path=str(folder)):
            return Path(found)
    raise ToolTrouble(
        f"There is no {name} here: install the CUDA toolkit, or nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm."
    )


@cache
def _places() -> tuple[Path, ...]:
    """Folders that may hold the tools: PATH, the toolkit, Triton's wheel, NVIDIA's wheels."""
    places = [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep) if p]
    places += [Path(os.environ[v]) / "bin" for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    places.append(Path("/usr/local/cuda/bin"))
    for package in _package_folders("triton"):
        places.append(package / "backends" / "nvidia" / "bin")
    for package in _package_folders("nvidia"):
        places += sorted(package.glob("*/bin"))
    return tuple(places)


def _package_folders(name: str) -> Iterator[Path]:
    """The folders of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    yield from map(Path, (spec.submodule_search_locations or ()) if spec else ())


def _count(kernel: _Kernel, opcode: str) -> None:
    for family, pattern in _SASS_FAMILIES.items():
        if not pattern.match(opcode):
            continue
        kernel.instructions[family] += 1
        if family in ("global_load", "global_store"):
            width = _WIDTH.search(opcode)
            kernel.widths[f"{family}.{width[1] if width else '32'}"] += 1
    if _SASS_IN_FULL.match(opcode):
        kernel.opcodes[opcode] += 1


def _short(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    return name[: _LONGEST_NAME - 9] + "~" + hashlib.sha256(name.encode()).hexdigest()[:8]
