"""Right, but hard to live with."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

from impls.contract import Device, Program
from impls.workloads.base import Case
from tests.adversaries.cheats.honest import Adversary, HonestProgram, Loaded


class Chatty(Adversary):
    name = "cheats.chatty"
    summary = "writes a lot to standard output and error, from Python, C and straight to the descriptors"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            print('{"id": 1, "ok": true, "result": {}}\n' * 1000)
            print("to standard error\n" * 1000, file=sys.stderr)
            libc = ctypes.CDLL(None)
            libc.puts(b"from C\n" * 1000)
            libc.fflush(None)
            for descriptor in (1, 2):
                os.write(descriptor, b"straight\n" * 10_000)
            return super().run(loaded)


class LeavesChild(Adversary):
    name = "cheats.leaves_child"
    summary = "starts a process that moves to a session of its own and would outlive it"

    def prepare(self, case: Case, device: Device) -> Program:
        program = HonestProgram()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        program.config["child"] = child.pid
        return program


class ClosesDescriptors(Adversary):
    name = "cheats.closes_descriptors"
    summary = "closes every descriptor but the standard ones, the harness's pipes too, and goes on for ever"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            os.closerange(3, 1024)
            while True:
                super().run(loaded)


class StopsItself(Adversary):
    name = "cheats.stops_itself"
    summary = "stops its own process"

    class program(HonestProgram):
        def run(self, loaded: Loaded) -> Loaded:
            os.kill(os.getpid(), signal.SIGSTOP)
            return super().run(loaded)


class UnreportableConfig(Adversary):
    name = "cheats.unreportable_config"
    summary = "has a configuration that is no JSON"

    class program(HonestProgram):
        def __init__(self) -> None:
            super().__init__()
            self.config["tile"] = object()
