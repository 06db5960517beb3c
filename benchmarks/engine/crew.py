"""The workers of a run by seat (stack, number among its workers): started when needed, started again after a death.

Owns which environment a stack's workers run in. How a worker is started and talked to is the pool's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from benchmarks.engine.environments import Environment
from benchmarks.engine.pool import Pool, Worker, WorkerSpec

Seat = tuple[str, int]


class Crew:
    """Args:
    pool: starts the workers and keeps the device's token.
    environments: stack name -> its environment.
    introduce: called once per stack, with the first worker of it that answers.
    """

    def __init__(
        self, pool: Pool, environments: Mapping[str, Environment], introduce: Callable[[Worker], None]
    ) -> None:
        self._pool, self._environments, self._introduce = pool, environments, introduce
        self._workers: dict[Seat, Worker] = {}
        self._introduced: set[str] = set()
        self._introducing = threading.Lock()

    def start(self, seat: Seat) -> Worker:
        """The worker in this seat; a new one where there is none or it has died.

        Raises:
            WorkerError: it did not start.
        """
        worker = self._workers.get(seat)
        if worker is None or not worker.alive:
            stack, number = seat
            environment = self._environments[stack]
            spec = WorkerSpec(stack, environment.python, environment.environ)
            worker = self._workers[seat] = self._pool.start(spec, number)
            with self._introducing:
                if stack not in self._introduced:
                    self._introduced.add(stack)
                    self._introduce(worker)
        return worker

    def alive(self, seat: Seat) -> bool:
        """Whether the seat's worker lives."""
        return seat in self._workers and self._workers[seat].alive

    def holds(self, seat: Seat, worker: Worker) -> bool:
        """Whether it is this worker, not one that replaced it, that lives in the seat."""
        return self._workers.get(seat) is worker and worker.alive

    @contextmanager
    def exclusive(self, seat: Seat) -> Iterator[None]:
        """The device is this seat's alone: on a CPU all other workers are stopped meanwhile."""
        with self._pool.exclusive(self.start(seat)):
            yield

    def stop(self) -> None:
        """End all workers."""
        self._pool.stop()
