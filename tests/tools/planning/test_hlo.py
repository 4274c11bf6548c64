"""Reading compiled programs: XLA's own of this machine's CPU, and texts by hand."""

import jax
import jax.numpy as jnp
import pytest

from vit_jax.tools.planning import costs, hlo


def compiled(function, *args, **kwargs):
    return hlo.parse(jax.jit(function, **kwargs).lower(*args).compile().as_text())


def test_a_loop_counts_for_each_of_its_rounds():
    def scanned(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ c), None), x, length=7)[0]

    module = compiled(scanned, jnp.ones((5, 5)))
    loops = [run for run in module.runs() if run.instruction.opcode == "while"]
    assert [(module.rounds(run.instruction), run.times) for run in loops] == [(7, 1)]
    inside = [run.times for run in module.runs() if run.times != 1]
    assert set(inside) == {7}


def test_loops_in_loops_multiply():
    def scanned(x):
        def outer(c, _):
            c = jax.lax.scan(lambda d, _: (jnp.sin(d @ d), None), c, length=3)[0]
            return c + 1, None

        return jax.lax.scan(outer, x, length=5)[0]

    module = compiled(scanned, jnp.ones((4, 4)))
    assert max(run.times for run in module.runs()) == 15


def test_an_array_knows_its_bytes_whatever_its_type():
    text = "(bf16[3,5]{1,0:T(8,128)(2,1)S(1)}, pred[7], f32[], s4[3], token[], u8[2,2])"
    found = hlo.arrays(text)
    assert [array.bytes for array in found] == [30, 7, 4, 2, 0, 4]
    assert [array.fast for array in found] == [True] + [False] * 5


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="not an HLO program"):
        hlo.parse("def f(x):\n  return x\n")


# As XLA prints asynchronous instructions: those that stand for a computation name their
# operands and results apart, a copy its result first, an all-reduce its result alone.
STARTS = """
HloModule m

%slow (p: f32[6]) -> f32[6] {
  %p = f32[6]{0} parameter(0)
  ROOT %n = f32[6]{0} negate(%p)
}

ENTRY %main (a: f32[6], i: s32[]) -> f32[6] {
  %a = f32[6]{0} parameter(0)
  %i = s32[]{:S(2)} parameter(1)
  %copied = (f32[6]{0:S(1)}, f32[6]{0}, u32[]{:S(2)}) copy-start(%a)
  %there = f32[6]{0:S(1)} copy-done(%copied)
  %begun = ((f32[6]{0}, s32[]{:S(2)}), f32[2]{0}, u32[]{:S(2)}) dynamic-slice-start(%a, %i), dynamic_slice_sizes={2}
  %part = f32[2]{0} dynamic-slice-done(%begun)
  %sent = ((f32[6]{0}), f32[6]{0}, u32[]{:S(2)}) all-to-all-start(%a), replica_groups={{0,1}}, dimensions={0}
  %on = ((f32[6]{0}), f32[6]{0}, u32[]{:S(2)}) all-to-all-update(%sent)
  %got = f32[6]{0} all-to-all-done(%on)
  %away = ((f32[6]{0}), f32[6]{0}, u32[]{:S(2)}) call-start(%got), to_apply=%slow
  ROOT %back = f32[6]{0} call-done(%away)
}
"""


def test_an_asynchronous_start_moves_its_operands_and_results_once():
    module = hlo.parse(STARTS)
    sizes = {
        i.name: [array.dims for array in i.results] for i in module.by_name.values()
    }
    assert sizes["copied"] == sizes["sent"] == sizes["away"] == [(6,)]
    assert sizes["begun"] == [(2,)]
    copied, cut, exchanged, negated = 24, 8 + 8, 24 + 24, 24 + 24
    assert costs.count_bytes_moved(module) == copied + cut + exchanged + negated


def test_what_an_asynchronous_start_calls_is_run_beside_other_work():
    beside = {run.instruction.name: run.beside for run in hlo.parse(STARTS).runs()}
    assert beside["n"]
    assert not beside["away"]


MOVES = """
HloModule m

%inner (s: bf16[9,4], i: s32[]) -> bf16[1,4] {
  %s = bf16[9,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %one = bf16[1,4]{1,0} dynamic-slice(%s, %i), dynamic_slice_sizes={1,4}
}

%outer (s2: bf16[9,4], i2: s32[], y: bf16[1,4]) -> bf16[1,4] {
  %s2 = bf16[9,4]{1,0} parameter(0)
  %i2 = s32[] parameter(1)
  %y = bf16[1,4]{1,0} parameter(2)
  %f = bf16[1,4]{1,0} fusion(%s2, %i2), kind=kLoop, calls=%inner
  ROOT %sum = bf16[1,4]{1,0} add(%f, %y)
}

%replace (t: bf16[9,4], u: bf16[1,4], i3: s32[]) -> bf16[9,4] {
  %t = bf16[9,4]{1,0} parameter(0)
  %u = bf16[1,4]{1,0} parameter(1)
  %i3 = s32[] parameter(2)
  ROOT %d = bf16[9,4]{1,0} dynamic-update-slice(%t, %u, %i3)
}

ENTRY %main (a: bf16[9,4], n: s32[], b: bf16[1,4]) -> bf16[9,4] {
  %a = bf16[9,4]{1,0} parameter(0)
  %n = s32[]{:S(2)} parameter(1)
  %b = bf16[1,4]{1,0} parameter(2)
  %x = bf16[1,4]{1,0:S(1)} fusion(%a, %n, %b), kind=kLoop, calls=%outer
  ROOT %z = bf16[9,4]{1,0} fusion(%a, %x, %n), kind=kLoop, calls=%replace
}
"""


def test_of_slices_only_the_slice_moves_and_what_lies_in_the_core_does_not():
    module = hlo.parse(MOVES)
    # 8 bytes of the slice of %a and 8 of %b are read, %x stays in the core; then 8
    # bytes of the slice in the result are written.
    assert costs.count_bytes_moved(module) == 24


BUFFERS = """
HloModule m

ENTRY %main (a: f32[6]) -> f32[6] {
  %a = f32[6]{0} parameter(0)
  %new = f32[900]{0} custom-call(), custom_call_target="AllocateBuffer"
  %kept = (f32[6]{0}, f32[900]{0}) opt-barrier(%a, %new)
  %first = f32[6]{0} get-tuple-element(%kept), index=0
  ROOT %own = f32[6]{0} custom-call(%first), custom_call_target="tpu_custom_call"
}
"""


# The TPU compiler slices a padded array where it splits a product into a ring's steps.
PADDED = """
HloModule m

%inner (s: bf16[8,1,6], i: s32[]) -> bf16[8,2,3] {
  %s = bf16[8,1,6]{2,1,0} parameter(0)
  %c = bf16[] constant(-inf)
  %wide = bf16[8,2,6]{2,1,0} pad(%s, %c), padding=0_0x0_1x0_0
  %z = s32[] constant(0)
  %i = s32[] parameter(1)
  ROOT %part = bf16[8,2,3]{2,1,0} dynamic-slice(%wide, %z, %z, %i), dynamic_slice_sizes={8,2,3}
}

ENTRY %main (a: bf16[8,1,6], n: s32[]) -> bf16[8,2,3] {
  %a = bf16[8,1,6]{2,1,0} parameter(0)
  %n = s32[]{:S(2)} parameter(1)
  ROOT %x = bf16[8,2,3]{2,1,0:S(1)} fusion(%a, %n), kind=kLoop, calls=%inner
}
"""


def test_of_a_slice_of_a_padded_array_the_padding_is_not_read():
    assert costs.count_bytes_moved(hlo.parse(PADDED)) == 2 * 8 * 3


def test_what_only_names_memory_moves_nothing():
    assert costs.count_bytes_moved(hlo.parse(BUFFERS)) == 24 + 24


def test_products_of_this_machine_move_their_operands_and_results():
    x, y = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((30, 50), (50, 70)))
    module = compiled(lambda x, y: x @ y, x, y)
    assert costs.count_bytes_moved(module) == 4 * (30 * 50 + 50 * 70 + 30 * 70)
