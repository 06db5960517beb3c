"""Ends, hangs, eats memory, raises."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import numpy as np

from impls.contract import Device, Program, Unsupported
from impls.workloads.base import Case
from tests.adversaries.cheats.honest import Adversary, HonestProgram, Loaded

EXIT_CODE = 3
# Eats at most this much, in case nobody stops it.
MOST_BYTES = 4 * 2**30


class Killed(Adversary):
    name = "cheats.killed"
    summary = "dies by SIGKILL in a call, as of the kernel's out-of-memory killer"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            os.kill(os.getpid(), signal.SIGKILL)
            return loaded


class Segfaults(Adversary):
    name = "cheats.segfaults"
    summary = "reads from address 0 in a call"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            ctypes.string_at(0)
            return loaded


class SegfaultsInPrepare(Adversary):
    name = "cheats.segfaults_in_prepare"
    summary = "reads from address 0 while it is built"

    def prepare(self, case: Case, device: Device) -> Program:
        ctypes.string_at(0)
        return HonestProgram()


class Aborts(Adversary):
    name = "cheats.aborts"
    summary = "calls abort in a call, as a failed assertion in C does"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            ctypes.CDLL(None).abort()
            return loaded


class Exits(Adversary):
    name = "cheats.exits"
    summary = "leaves the process in a call"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            print("leaving")
            os._exit(EXIT_CODE)


class ExitsInPrepare(Adversary):
    name = "cheats.exits_in_prepare"
    summary = "calls sys.exit while it is built"

    def prepare(self, case: Case, device: Device) -> Program:
        sys.exit(EXIT_CODE)


class HangsInPrepare(Adversary):
    name = "cheats.hangs_in_prepare"
    summary = "never finishes building, and cannot be asked to stop"

    def prepare(self, case: Case, device: Device) -> Program:
        hang()
        return HonestProgram()


class HangsInRun(Adversary):
    name = "cheats.hangs_in_run"
    summary = "never comes back from a call, and cannot be asked to stop"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            hang()
            return loaded


class HangsInRelease(Adversary):
    name = "cheats.hangs_in_release"
    summary = "is right, and never finishes letting go"

    class program(HonestProgram):
        def release(self) -> None:
            hang()


class EatsMemory(Adversary):
    name = "cheats.eats_memory"
    summary = "holds 32 MiB more every 10 ms of a call"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            held = []
            for _ in range(MOST_BYTES // 2**25):
                held.append(np.ones(2**25, np.uint8))
                time.sleep(0.01)
            return super().run(loaded)


class RaisesInPrepare(Adversary):
    name = "cheats.raises_in_prepare"
    summary = "raises while it is built"

    def prepare(self, case: Case, device: Device) -> Program:
        raise ValueError("no tile fits\nand more that nobody needs")


class RaisesInRun(Adversary):
    name = "cheats.raises_in_run"
    summary = "raises in a call"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            raise RuntimeError("launch failed")


class RefusesLate(Adversary):
    name = "cheats.refuses_late"
    summary = "says only while it is built that it cannot"

    def prepare(self, case: Case, device: Device) -> Program:
        raise Unsupported("Its compiler knows no such tile.")


def hang() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(3600)
