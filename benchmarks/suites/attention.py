"""Attention suites: every attention belongs to one of them."""

from __future__ import annotations

import re

from impls.workloads.attention import Attention
from impls.workloads.base import Case

from . import _suite


def _heads(case: Attention) -> str:
    """The id without the workload and the keys' length: all that a line over lengths has in common.

    ``b1h8d64:f32:causal``; a chunk of queries that is shorter than its keys keeps its own length, unless it is one.
    """
    queries = "" if case.sq in (1, case.sk) else f"q{case.sq}"
    return re.sub(r"s\d+|q\d+k\d+", queries, case.id.partition(":")[2], count=1)


class Prefill(_suite.Suite):
    """Attention of whole prompts, or chunks of them, against the number of keys."""

    title = "attention prefill against sequence length"
    workload = "attention"
    axes = ("attention", "s")

    @classmethod
    def place(cls, case: Case) -> _suite.Place | None:
        """(heads, dtype and mask; keys)."""
        if not isinstance(case, Attention) or case.direction != "fwd" or case.sq == 1:
            return None
        return (_heads(case), case.sk)


class Decode(_suite.Suite):
    """Attention of one query per sequence against the keys in its cache."""

    title = "attention decode against context"
    workload = "attention"
    axes = ("attention", "context")

    @classmethod
    def place(cls, case: Case) -> _suite.Place | None:
        """(sequences, heads and dtype; keys)."""
        if not isinstance(case, Attention) or case.direction != "fwd" or case.sq != 1:
            return None
        return (_heads(case), case.sk)


class Backward(_suite.Suite):
    """The backward pass, alone or with the forward pass, against the number of keys."""

    title = "attention backward against sequence length"
    workload = "attention"
    axes = ("attention", "s")

    @classmethod
    def place(cls, case: Case) -> _suite.Place | None:
        """(heads, dtype, mask and direction; keys)."""
        if not isinstance(case, Attention) or case.direction == "fwd":
            return None
        return (_heads(case), case.sk)
