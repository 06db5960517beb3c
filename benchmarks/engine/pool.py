"""Worker processes as the harness sees them: started, asked, watched, stopped.

Owns what is kept from outside a worker: deadlines, the memory limit, the reason of a death, the device's token, and
that no worker and nothing it started outlives the harness. It does not own what a worker does (operations) or when it
is asked (crew, trial). Linux only.

What holds when the harness dies:

- by exception, Ctrl-C, SIGTERM or SIGHUP: the workers are killed and the run's folders removed on the way out;
- by SIGKILL: the kernel kills the workers (PR_SET_PDEATHSIG); the next pool on this machine kills what they had started
  and removes the folders.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from benchmarks.engine import parallelism, processes, protocol, scratch
from impls.contract import Device

# How often resident memory is read, and how often the list of a worker's children is renewed. A read takes some 20 us
# and renewing some ms, on CPUs that may be timed just then; memory fills at a few GB/s.
_WATCH_SECONDS = 0.1
_FAMILY_SECONDS = 2.0
# A worker's log, in its folder; cut to nothing when it has grown beyond this.
_LOG = "log"
_LOG_BYTES = 64 * 2**20
_TAIL_BYTES = 4096
# What a worker gets to leave by itself.
_SHUTDOWN_SECONDS = 2.0
# How long a killed process may take to be gone; longer only in a driver that does not let go.
_REAP_SECONDS = 10.0
# How often a worker is looked at whose time stands still.
_PAUSE_SECONDS = 0.25


class WorkerError(Exception):
    """A request that was not met.

    Attributes:
        kind: from the worker: ``unsupported``, ``failed``, ``protocol``; from outside: ``crashed``, ``timeout``,
            ``memory`` (and ``protocol``, where what it said could not be understood). After one from outside the worker
            is dead.
        message: one sentence: the record's reason.
        detail: traceback, or the end of the worker's log.
    """

    def __init__(self, kind: str, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.detail = detail


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is started from.

    Attributes:
        stack: the stack it serves.
        python: the interpreter of the stack's environment.
        environ: variables that the stack wants; those of ``parallelism.environment`` cannot be changed by them.
    """

    stack: str
    python: Path
    environ: Mapping[str, str] = field(default_factory=dict)


class _Stopwatch:
    """Seconds that a worker has had for something: time in which the harness held it stopped does not count."""

    def __init__(self, worker: Worker, what: str, limit_s: float) -> None:
        self.what = what
        self.limit_s = limit_s
        self._worker = worker
        self._start = time.monotonic()
        self._stopped_before = worker.stopped_seconds()

    def left(self) -> float:
        had = time.monotonic() - self._start - (self._worker.stopped_seconds() - self._stopped_before)
        return self.limit_s - had


class Worker:
    """One worker process. ``Pool.start`` makes it; any thread may call it, one request at a time.

    Attributes:
        stack: the stack it serves.
        replica: tells a stack's workers apart.
        versions: distribution -> version, as the worker reported.
        python: its Python's version.
        pid: its process, leader of a session and a process group of its own.
        memory_limit_bytes: resident memory, of it and its children, beyond which it is killed. May be set at any time.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        replica: int,
        device: Device,
        folder: Path,
        mark: str,
        pipes: tuple[int, int],
        process: subprocess.Popen[bytes],
    ) -> None:
        self.stack = spec.stack
        self.replica = replica
        self.versions: dict[str, str] = {}
        self.python = ""
        self.pid = process.pid
        self.memory_limit_bytes: int = (
            device.memory_bytes if device.kind == "cpu" else psutil.virtual_memory().total // 2
        )
        self._device = device
        self._folder = folder
        self._mark = mark
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._requests, self._replies = pipes
        for pipe in pipes:
            os.set_blocking(pipe, False)
        self._turn = threading.RLock()  # whoever holds it talks to the process, or buries it
        self._fault_lock = threading.Lock()
        self._fault: tuple[str, str] | None = None
        self._error: WorkerError | None = None
        self._buried = False
        self._splitter = protocol.Splitter()
        self._inbox: list[protocol.Message] = []
        self._number = 0
        self._when = "at its start"
        self._stopped_since: float | None = None
        self._stopped_total = 0.0
        self._family: list[psutil.Process] = []

    # -- talking ------------------------------------------------------------------------------------------------------

    def call(self, op: str, deadline_s: float, **args: Any) -> dict[str, Any]:
        """Ask for an operation and wait for its result. ``prepare`` is told the pool's device.

        Args:
            op: name of the operation.
            deadline_s: seconds it may take by the harness's clock, without those in which it was held stopped.
            **args: the operation's arguments.

        Raises:
            WorkerError: it was refused, failed, or the worker died or had to be killed.
        """
        with self._turn:
            if self._error is not None or not self.alive:
                raise self._bury()
            if op == "prepare":
                args.setdefault("device", self._device)
            self._number += 1
            self._when = f"during {op}"
            stopwatch = _Stopwatch(self, op.capitalize(), deadline_s)
            try:
                self._send(protocol.encode(protocol.request(self._number, op, args)), stopwatch)
                while True:
                    reply = self._receive(stopwatch)
                    protocol.check_reply(reply)
                    # A smaller number answers a request that was given up (Ctrl-C while waiting).
                    if reply["id"] == self._number:
                        break
            except protocol.ProtocolError as error:
                self._end("protocol", str(error))
                raise self._bury() from None
            finally:
                self._when = "while idle"
        if reply["ok"]:
            result: dict[str, Any] = reply["result"]
            return result
        fault = reply["error"]
        raise WorkerError(fault["kind"], fault["message"], fault["traceback"])

    def greet(self, deadline_s: float) -> None:
        """Wait for the handshake.

        Raises:
            WorkerError: none came, or one of another version; the worker is then dead.
        """
        with self._turn:
            try:
                greeting = self._receive(_Stopwatch(self, "Its worker's start", deadline_s))
                if greeting.get("ok") is False:
                    protocol.check_reply(greeting)
                    fault = greeting["error"]
                    self._end("failed", fault["message"])
                    raise self._bury(fault["traceback"])
                protocol.check_handshake(greeting, self.stack)
            except protocol.ProtocolError as error:
                self._end("protocol", str(error))
                raise self._bury() from None
            self.versions, self.python = greeting["versions"], greeting["python"]
            self._when = "while idle"

    def _send(self, line: bytes, stopwatch: _Stopwatch) -> None:
        rest = memoryview(line)
        try:
            while rest:
                self._wait(self._requests, select.POLLOUT, stopwatch)
                try:
                    rest = rest[os.write(self._requests, rest) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    raise self._died_silently() from None
        except BaseException:
            if 0 < len(rest) < len(line):  # half a request: nothing sensible can follow
                self._end("crashed", "Its worker was stopped in the middle of a request.")
            raise

    def _receive(self, stopwatch: _Stopwatch) -> protocol.Message:
        while not self._inbox:
            self._wait(self._replies, select.POLLIN, stopwatch)
            try:
                piece = os.read(self._replies, 2**20)
            except BlockingIOError:
                continue
            if not piece:
                raise self._died_silently()
            self._inbox += self._splitter.feed(piece)
        return self._inbox.pop(0)

    def _wait(self, fd: int, events: int, stopwatch: _Stopwatch) -> None:
        """Until ``fd`` is ready. A reply that is already there counts, even if the process is gone by now.

        Raises:
            WorkerError: the process died, or time is up.
        """
        poll = select.poll()
        poll.register(fd, events)
        poll.register(self._pidfd, select.POLLIN)
        while True:
            # While it is held stopped its time stands still: look again later.
            patience = max(stopwatch.left(), _PAUSE_SECONDS if self.suspended else 0.0)
            ready = [found for found, _ in poll.poll(patience * 1e3 + 1)]
            if fd in ready:
                return
            if ready:
                raise self._bury()
            if stopwatch.left() <= 0 and not self.suspended:
                self._end("timeout", f"{stopwatch.what} took longer than {stopwatch.limit_s:g} s and was ended.")
                raise self._bury()

    def _died_silently(self) -> WorkerError:
        """The pipe is closed: either the process is dying, or it closed the pipe and lives."""
        if not self._gone_within(1.0):
            self._end("crashed", f"Its worker closed its pipes {self._when}.")
        return self._bury()

    # -- living and dying ---------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether it can be asked something."""
        return self._fault is None and not self._buried and not self._gone_within(0)

    def _gone_within(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def stop(self) -> None:
        """End it: politely where it is idle, else by force. Does nothing where it is dead."""
        if self._turn.acquire(blocking=False):
            try:
                if self.alive:
                    self.resume()
                    with contextlib.suppress(WorkerError):
                        self.call("shutdown", _SHUTDOWN_SECONDS)
                        self._gone_within(_SHUTDOWN_SECONDS)
            finally:
                self._turn.release()
        self._end("crashed", "Its worker was stopped by the harness.")
        with self._turn:
            self._bury()

    def discard(self) -> None:
        """End it by force: nothing can be done with it any more. Does nothing where it is dead."""
        self._end("crashed", "Its worker was of no use any more.")
        with self._turn:
            self._bury()

    def _end(self, kind: str, message: str) -> None:
        """Kill it, for a reason. The first reason stays."""
        with self._fault_lock:
            if self._fault is None:
                self._fault = (kind, message)
        if not self._buried:
            self._kill_group()

    def _kill_group(self) -> None:
        # The process is not reaped before it is buried, so its number cannot have gone to another group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _bury(self, detail: str | None = None) -> WorkerError:
        """Make sure that nothing of it is left, and say why it died. The caller holds ``_turn``."""
        if self._error is not None:
            return self._error
        self._kill_group()
        try:
            code = self._process.wait(_REAP_SECONDS)
            fate = processes.describe_exit(code)
        except subprocess.TimeoutExpired:
            code, fate = None, "does not die of SIGKILL (a driver holds it)"
        self._buried = True
        processes.kill_marked(self._mark)
        for fd in (self._requests, self._replies, self._pidfd):
            os.close(fd)
        with self._fault_lock:
            kind, message = self._fault or ("crashed", f"Its worker {fate} {self._when}.")
        if self._fault is None and code == -signal.SIGKILL:
            message += " The harness did not do it; when memory runs out, the kernel does."
        self._error = WorkerError(kind, message, self.log_tail() if detail is None else detail)
        shutil.rmtree(self._folder, ignore_errors=True)
        return self._error

    def log_tail(self) -> str:
        """The end of what the process wrote to its standard output and error."""
        try:
            with (self._folder / _LOG).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode(errors="replace").strip()
        except OSError:
            return ""

    # -- stopping and watching ----------------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Hold the process group stopped (SIGSTOP) until ``resume``. Does nothing where it is dead.

        What the stack started in a session of its own runs on: compilers' helpers, idle once ``prepare`` has returned.
        """
        if not self.alive or self._stopped_since is not None:
            return
        self._stopped_since = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGSTOP)
        # It is not stopped at once; a few threads may still be on a CPU.
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            flags = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
            try:
                if os.waitid(os.P_PID, self.pid, flags) is not None:
                    return
            except ChildProcessError:
                return
            time.sleep(1e-4)

    def resume(self) -> None:
        """Let it go on. Does nothing where it is not held."""
        if self._stopped_since is None:
            return
        if not self._buried:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGCONT)
        self._stopped_total += time.monotonic() - self._stopped_since
        self._stopped_since = None

    @property
    def suspended(self) -> bool:
        """Whether ``suspend`` holds it."""
        return self._stopped_since is not None

    def stopped_seconds(self) -> float:
        """Seconds for which it has been held stopped so far."""
        since = self._stopped_since
        return self._stopped_total + (time.monotonic() - since if since is not None else 0.0)

    def resident_bytes(self) -> int:
        """Resident memory of it and its children now, in bytes; 0 where it is dead."""
        return processes.resident_bytes(processes.family(self.pid)) if self.alive else 0

    def watch(self, renew: bool) -> None:
        """Kill it where it holds more memory than its limit, and cut its log where that has grown too long.

        Args:
            renew: look for new children.
        """
        if not self.alive:
            return
        if renew or not self._family:
            self._family = processes.family(self.pid)
        held = processes.resident_bytes(self._family)
        limit = self.memory_limit_bytes
        if held > limit:
            self._end(
                "memory",
                f"Its worker held {held / 2**30:.2f} GiB of memory, over its limit of {limit / 2**30:.2f} GiB, "
                f"{self._when} and was ended.",
            )
        with contextlib.suppress(OSError):
            if (self._folder / _LOG).stat().st_size > _LOG_BYTES:
                os.truncate(self._folder / _LOG, 0)


class Pool:
    """All workers of a run, and the device's token.

    Args:
        root: folder of the repository: what a worker imports beside its own environment.
        device: the device that cases run on.
        threads: CPUs that every worker gets, the same for all.

    Raises:
        ValueError: this process may not use that many CPUs.
    """

    def __init__(self, root: Path, device: Device, threads: int) -> None:
        self.device = device
        self.cpus = parallelism.choose_cpus(threads)
        self._root, self._threads = root, threads
        self._workers: dict[tuple[str, int], Worker] = {}
        self._token = threading.RLock()
        self._holder: Worker | None = None
        self._scratch = scratch.folder(scratch.places()[-1])
        for run in scratch.sweep():
            processes.kill_marked(f"{run}/")
        # PR_SET_PDEATHSIG means the death of the thread that forked: this one lives as long as the pool.
        self._spawner = ThreadPoolExecutor(1, "ridgemark-spawner")
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ridgemark-watch", daemon=True)
        self._watcher.start()
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, _leave)
        atexit.register(self.stop)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Those that live."""
        return tuple(w for w in list(self._workers.values()) if w.alive)

    def start(self, spec: WorkerSpec, replica: int = 0, deadline_s: float = 120) -> Worker:
        """Start a worker, and wait until it has greeted. A dead one of the same stack and replica is replaced.

        Waits for the device's token: a starting process would disturb what is measured. On a CPU it starts alone.

        Raises:
            WorkerError: it did not start, or did not greet in time or in this protocol.
            ValueError: this stack and replica has a living worker.
        """
        seat = (spec.stack, replica)
        with self._token:
            former = self._workers.get(seat)
            if former is not None and former.alive:
                raise ValueError(f"{spec.stack} {replica} has a living worker.")
            if former is not None:
                former.stop()
            worker = self._spawner.submit(self._spawn, spec, replica).result()
            if self.device.kind == "cpu":
                worker.greet(deadline_s)
        if self.device.kind != "cpu":  # several may start at once, each asked for by a thread of its own
            worker.greet(deadline_s)
        return worker

    @contextlib.contextmanager
    def exclusive(self, worker: Worker) -> Iterator[None]:
        """Hold the device's token for ``worker``. On a CPU all other workers are stopped meanwhile.

        Raises:
            RuntimeError: this thread holds the token already.
        """
        with self._token:
            if self._holder is not None:
                raise RuntimeError("The device's token is held already.")
            self._holder = worker
            others = [w for w in self.workers if w is not worker] if self.device.kind == "cpu" else []
            try:
                for other in others:
                    other.suspend()
                yield
            finally:
                for other in others:
                    other.resume()
                self._holder = None

    def stop(self) -> None:
        """Stop all workers. The pool cannot be used after it."""
        if self._over.is_set():
            return
        self._over.set()
        with contextlib.suppress(RuntimeError):  # at exit the spawner has ended by itself
            self._spawner.submit(int).result()  # whatever was about to be spawned is in the list now
        workers = list(self._workers.values())
        try:
            with ThreadPoolExecutor(max(1, len(workers))) as threads:  # each may take its time to unload a library
                list(threads.map(Worker.stop, workers))
        except RuntimeError:  # the interpreter is on its way out and starts no more threads
            for worker in workers:
                worker.stop()
        self._workers.clear()
        self._spawner.shutdown(wait=False)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is _leave:
                signal.signal(number, handler)
        self._handlers.clear()
        atexit.unregister(self.stop)

    def _spawn(self, spec: WorkerSpec, replica: int) -> Worker:
        folder = Path(tempfile.mkdtemp(prefix=f"{spec.stack}.{replica}.", dir=self._scratch))
        mark = f"{scratch.RUN}/{folder.name}/"
        request_end, requests = os.pipe()
        replies, reply_end = os.pipe()
        argv = [str(spec.python), "-m", "benchmarks.engine.worker", "--stack", spec.stack]
        argv += ["--device", self.device.kind, "--cpus", ",".join(map(str, self.cpus))]
        argv += ["--requests", str(request_end), "--replies", str(reply_end), "--parent", str(os.getpid())]
        try:
            with (folder / _LOG).open("ab") as log:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                    env=self._environment(spec, mark),
                    pass_fds=(request_end, reply_end),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(requests)
            os.close(replies)
            shutil.rmtree(folder, ignore_errors=True)
            told = f"The interpreter {spec.python} of {spec.stack} does not start ({error.strerror}): "
            raise WorkerError("failed", told + "run `ridgemark doctor`.") from None
        finally:
            os.close(request_end)
            os.close(reply_end)
        worker = Worker(spec, replica, self.device, folder, mark, (requests, replies), process)
        # Here, so that ``stop`` finds it even where the thread that waits for it was interrupted.
        self._workers[spec.stack, replica] = worker
        return worker

    def _environment(self, spec: WorkerSpec, mark: str) -> dict[str, str]:
        return environment(self._root, self.device, self._threads, spec.environ) | {processes.MARK: mark}

    def _watch(self) -> None:
        renewed = 0.0
        while not self._over.wait(_WATCH_SECONDS):
            now = time.monotonic()
            renew = now - renewed > _FAMILY_SECONDS
            renewed = now if renew else renewed
            for worker in self.workers:
                if not worker.suspended:
                    worker.watch(renew)


def environment(root: Path, device: Device, threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process that runs a stack's programs.

    Args:
        root: folder of the repository: what it imports beside its own environment.
        device: the device that cases run on.
        threads: CPUs that it gets.
        extra: variables that the stack wants.
    """
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    if device.kind == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""  # a library that sees a GPU may prefer it
    path = [str(root), *_extra_paths(), extra.get("PYTHONPATH", "")]
    return {
        **environ,
        **extra,
        **parallelism.environment(threads),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONNOUSERSITE": "1",  # the environment is what its lock says
        "PYTHONHASHSEED": "0",  # compilers that iterate over sets choose alike in every process
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # both: the log's end tells of a crash
    }


def _extra_paths() -> list[str]:
    """Folders that RIDGEMARK_EXTRA_STACKS' packages are imported from."""
    folders = []
    for name in filter(None, os.environ.get("RIDGEMARK_EXTRA_STACKS", "").split(",")):
        package = importlib.import_module(name)
        folder = Path(next(iter(package.__path__)))
        folders.append(str(folder.parents[name.count(".")]))
    return list(dict.fromkeys(folders))


def _leave(number: int, frame: FrameType | None) -> None:
    """SIGTERM and SIGHUP end the program the way an exception does, so that everything is put away."""
    signal.signal(number, signal.SIG_DFL)  # the second one is not waited for
    raise SystemExit(128 + number)
