"""What the record says of XLA's optimisation, read from HLO texts whose contents are known."""

from __future__ import annotations

from impls.xla import stablehlo

BEFORE = """HloModule jit_call, entry_computation_layout={(f32[4,8]{1,0}, f32[8,2]{1,0})->(f32[4,2]{1,0})}

%relu (p: f32[4,2]) -> f32[4,2] {
  %p = f32[4,2]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %zeros = f32[4,2]{1,0} broadcast(%zero), dimensions={}
  ROOT %max = f32[4,2]{1,0} maximum(%p, %zeros)
}

ENTRY %main (a: f32[4,8], b: f32[8,2]) -> (f32[4,2]) {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,2]{1,0} parameter(1)
  %dot = f32[4,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %called = f32[4,2]{1,0} call(%dot), to_apply=%relu
  ROOT %out = (f32[4,2]{1,0}) tuple(%called)
}
"""
AFTER = """HloModule jit_call, entry_computation_layout={(f32[4,8]{1,0}, f32[8,2]{1,0})->(f32[4,2]{1,0})}

%fused (p: f32[4,2]) -> f32[4,2] {
  %p = f32[4,2]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %zeros = f32[4,2]{1,0} broadcast(%zero), dimensions={}
  ROOT %max = f32[4,2]{1,0} maximum(%p, %zeros)
}

ENTRY %main (a: f32[4,8], b: f32[8,2]) -> (f32[4,2]) {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,2]{1,0} parameter(1)
  %copy = f32[8,2]{0,1} copy(%b)
  %dot = f32[4,2]{1,0} dot(%a, %copy), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %fusion = f32[4,2]{1,0} fusion(%dot), kind=kLoop, calls=%fused
  ROOT %out = (f32[4,2]{1,0}) tuple(%fusion)
}
"""


def test_fusions_operations_and_layouts_before_and_after() -> None:
    view = stablehlo._view(BEFORE, AFTER)
    assert view["fusions"] == {"Loop": 1}
    # What is called runs one operation after the other; what is fused does not.
    assert view["operations"] == {
        "before": {"broadcast": 1, "dot": 1, "maximum": 1},
        "after": {"copy": 1, "dot": 1, "fusion": 1},
    }
    layout = "(f32[4,8]{1,0}, f32[8,2]{1,0})->(f32[4,2]{1,0})"
    assert view["entry_layout"] == {"before": layout, "after": layout}
    assert view["dots"] == {
        "before": ["f32[4,2]{1,0} = f32[4,8]{1,0} x f32[8,2]{1,0}"],
        "after": ["f32[4,2]{1,0} = f32[4,8]{1,0} x f32[8,2]{0,1}"],
    }


def test_paths_of_the_exporting_machine_are_left_out() -> None:
    text = BEFORE.replace("rhs_contracting_dims={0}", 'rhs_contracting_dims={0}, metadata={source_file="/home/x/y.py"}')
    assert stablehlo._without_sources(text) == BEFORE
