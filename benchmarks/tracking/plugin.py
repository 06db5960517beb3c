"""asv's plugin: the one environment that benchmarks run in, and this machine as asv knows it.

Owns what becomes a key of every series: the environment's name, the machine's name and description. Versions are no
part of it, since a series that a version splits shows no regression; they are in the records. Loaded by asv through
``plugins`` in asv.conf.json.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asv import util
from asv.environment import Environment
from asv.machine import Machine, MachineCollection

from benchmarks.engine import machine
from benchmarks.engine.session import ROOT


class Harness(Environment):  # type: ignore[misc]
    """The interpreter that asv itself runs in, and the checkout as it is.

    Every stack has its own environment below the engine, so asv has none to build. An ``ExistingEnvironment`` would
    carry the interpreter's path into file names and graph keys, and save results only under a hash given by hand.
    """

    tool_name = "harness"
    matches_python_fallback = False
    #: In place of the interpreter's version, which is not what is measured.
    described_python = "per stack"

    def __init__(self, conf: Any, python: str, requirements: Any, tagged_env_vars: Any) -> None:
        self._requirements: dict[str, str] = {}  # asv asks for them before it has set them
        super().__init__(conf, self.described_python, self._requirements, {})
        self._results = os.path.abspath(conf.results_dir)
        self._commit = ""

    @property
    def name(self) -> str:
        """The name in result files."""
        return self.tool_name

    def check_presence(self) -> bool:
        """It is there: asv runs in it."""
        return True

    def create(self) -> None:
        """Nothing is to be created."""

    @property
    def installed_commit_hash(self) -> str | None:
        """asv asks for the commit to be installed at every run: see ``install_project``."""
        return None

    def can_install_project(self) -> bool:
        """No: ranges of commits are refused."""
        return False

    def install_project(self, conf: Any, repo: Any, commit_hash: str | None = None) -> None:
        """Accept the commit that is checked out.

        Raises:
            asv.util.UserError: another commit is asked for.
        """
        head = repo.get_hash_from_name("HEAD")
        if commit_hash != head:
            raise util.UserError(
                f"Ridgemark measures the checkout as it is, commit {head[:8]}. "
                f"Check out {str(commit_hash)[:8]} and run there."
            )
        self._commit = head

    def run(self, args: Sequence[str], **kwargs: Any) -> Any:
        """Run this interpreter; the suites learn where the records are and which commit asv means."""
        environ = dict(kwargs.pop("env", os.environ))
        environ |= {"RIDGEMARK_RESULTS": self._results, "RIDGEMARK_COMMIT": self._commit}
        environ["ASV_PYTHONPATH"] = str(ROOT)  # asv removes PYTHONPATH; suites and plugin are of one checkout
        return util.check_output([sys.executable, *args], env=environ, **kwargs)


def machine_of(facts: Mapping[str, Any], device_kind: str) -> dict[str, str]:
    """What asv keeps of a machine, from a run's record: what no update changes.

    A CPU that is measured on a machine with a GPU counts as a machine of its own.
    """
    gpus = [g["name"] for g in facts.get("gpu") or ()]
    name = str(facts.get("name") or "unknown")
    return {
        "machine": f"{name}-cpu" if gpus and device_kind == "cpu" else name,
        "cpu": str(facts.get("cpu") or ""),
        "arch": str(facts.get("arch") or ""),
        "cores": str(facts.get("cores") or ""),
        "gpu": gpus[0] if gpus and device_kind != "cpu" else "",
    }


def setup() -> None:
    """Called by asv. It would otherwise ask for the machine and keep the answer in the user's home."""
    here = machine_of(machine.describe(), machine.default_device().kind)

    def load(machine_name: str, _path: str | None = None) -> dict[str, str]:
        return here | {"machine": machine_name}

    def save(machine_name: str, machine_info: Any, _path: str | None = None) -> None:
        """The description is made anew at every run."""

    Machine.hardcoded_machine_name = here["machine"]
    MachineCollection.load, MachineCollection.save = load, save
    logging.getLogger().addFilter(_not_of_records)


def _not_of_records(said: logging.LogRecord) -> bool:
    """False for asv's warning that studies beside the records are no results of its: it looks in every folder."""
    text = said.getMessage()
    return not (text.startswith("Skipping results: could not load ") and "records" in Path(text).parts)
