"""What the command does where stacks lack their environments."""

from pathlib import Path

import pytest

from benchmarks import cli
from benchmarks.engine import environments
from benchmarks.engine.environments import Environment, EnvironmentFailure
from impls import registry
from impls.contract import Device

CPU = Device("cpu", "Made up", "x86_64", 1, 2**30)


@pytest.fixture
def without(monkeypatch):
    def set_up(*lacking):
        def build(stack, kind, say):
            if stack in lacking:
                raise EnvironmentFailure(f"{stack} cannot be built.", "Install it.")
            return Environment(stack, Path("python"), {}, None, "mapped")

        monkeypatch.setattr(environments, "build", build)
        monkeypatch.setattr(environments, "find", lambda stack, kind: None)

    return set_up


def test_of_several_stacks_that_were_named_one_may_lack_its_environment(without):
    without("iree")
    built, missing = cli._environments(registry.select(["blas.default", "iree", "xla"]), CPU, named=True)
    assert set(built) == {"blas", "xla"}
    assert missing == {"iree": "iree cannot be built. Install it."}


@pytest.mark.parametrize(("lacking", "named"), [(("iree", "xla"), True), (("blas",), True), (("blas",), False)])
def test_without_the_baseline_s_or_any_that_was_named_nothing_is_done(without, lacking, named):
    without(*lacking)
    with pytest.raises(EnvironmentFailure, match=f"{lacking[0]} cannot be built"):
        cli._environments(registry.select(["blas.default", "iree", "xla"]), CPU, named=named)
