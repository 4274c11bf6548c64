"""Reading compiled programs: XLA's own of this machine's CPU, and texts by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from vit_jax.planning import collectives, hlo, traffic


def compiled(function, *args, **kwargs):
    return hlo.parse(jax.jit(function, **kwargs).lower(*args).compile().as_text())


def test_a_loop_counts_for_each_of_its_rounds():
    def scanned(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ c), None), x, length=7)[0]

    module = compiled(scanned, jnp.ones((5, 5)))
    loops = [(i, times) for i, times in module.runs() if i.opcode == "while"]
    assert [(module.rounds(i), times) for i, times in loops] == [(7, 1)]
    inside = [times for i, times in module.runs() if times != 1]
    assert set(inside) == {7}


def test_loops_in_loops_multiply():
    def scanned(x):
        def outer(c, _):
            c = jax.lax.scan(lambda d, _: (jnp.sin(d @ d), None), c, length=3)[0]
            return c + 1, None

        return jax.lax.scan(outer, x, length=5)[0]

    module = compiled(scanned, jnp.ones((4, 4)))
    assert max(times for _, times in module.runs()) == 15


def test_an_array_knows_its_bytes_whatever_its_type():
    text = "(bf16[3,5]{1,0:T(8,128)(2,1)S(1)}, pred[7], f32[], s4[3], token[], u8[2,2])"
    found = hlo.arrays(text)
    assert [array.bytes for array in found] == [30, 7, 4, 2, 0, 4]
    assert [array.fast for array in found] == [True] + [False] * 5


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no HLO program"):
        hlo.parse("def f(x):\n  return x\n")


# A loop as TPU's compiler writes it: without the number of rounds, but with a counter.
LOOP = """
HloModule m

%cond (p: (s32[], f32[6])) -> pred[] {
  %limit = s32[]{:T(128)} constant(LIMIT)
  %p = (s32[]{:T(128)}, f32[6]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=DIRECTION
}

%body (q: (s32[], f32[6])) -> (s32[], f32[6]) {
  %q = (s32[]{:T(128)}, f32[6]{0}) parameter(0)
  %x = f32[6]{0} get-tuple-element(%q), index=1
  %sum = f32[6]{0} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %r = (s32[]{:T(128)}, f32[6]{0}) tuple(%x, %sum)
}

ENTRY %main (a: f32[6]) -> f32[6] {
  %a = f32[6]{0} parameter(0)
  %zero = s32[]{:T(128)} constant(FIRST)
  %t = (s32[]{:T(128)}, /*index=1*/f32[6]{0}) tuple(%zero, %a)
  %w = (s32[]{:T(128)}, f32[6]{0}) while(%t), condition=%cond, body=%body
  ROOT %out = f32[6]{0} get-tuple-element(%w), index=1
}
"""


def loop(first, limit, direction="LT"):
    words = {"FIRST": first, "LIMIT": limit, "DIRECTION": direction}
    text = LOOP
    for name, value in words.items():
        text = text.replace(name, str(value))
    return hlo.parse(text)


@pytest.mark.parametrize(("first", "limit", "rounds"), [(0, 12, 12), (2, 12, 10)])
def test_rounds_are_read_from_the_counter_of_a_loop(first, limit, rounds):
    module = loop(first, limit)
    assert module.rounds(module.by_name["w"]) == rounds
    (one,) = collectives.find(module, 8)
    assert one == collectives.Collective("all-reduce", "f32", False, 4, 24, rounds)


def test_rounds_that_cannot_be_read_are_not_guessed():
    module = loop(0, 12, "NE")
    assert module.rounds(module.by_name["w"]) is None
    assert module.unread() == 1
    assert [one.times for one in collectives.find(module, 8)] == [1]


def test_collectives_of_a_program_of_this_machine_are_found_with_their_sizes():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec("a"))
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((12, 5), jnp.float32)

    summed = compiled(lambda x: x.sum(0), x, in_shardings=rows, out_shardings=whole)
    (one,) = collectives.find(summed, 8)
    assert (one.kind, one.devices, one.bytes) == ("all-reduce", 4, 5 * 4)
    assert one.sent == pytest.approx(2 * 20 * 3 / 4)

    gathered = compiled(lambda x: x + 1, x, in_shardings=rows, out_shardings=whole)
    (one,) = collectives.find(gathered, 8)
    assert (one.kind, one.devices, one.bytes) == ("all-gather", 4, 12 * 5 * 4)
    assert one.sent == pytest.approx(240 * 3 / 4)


# As TPU's compiler writes them: a fusion that reduces and scatters, and an asynchronous
# all-gather as a chain of fusions that all show it.
TPU = """
HloModule m

%all-reduce-scatter.1 (input: bf16[8,6]) -> bf16[2,6] {
  %input = bf16[8,6]{1,0} parameter(0)
  %all = bf16[8,6]{1,0} all-reduce(%input), channel_id=3, replica_groups=mesh['x'=4,'y'=4] {'y'}, to_apply=%add
  ROOT %part = bf16[2,6]{1,0} dynamic-slice(%all, %i), dynamic_slice_sizes={2,6}
}

%begin (p: f32[2,5]) -> f32[8,5] {
  %p = f32[2,5]{1,0} parameter(0)
  ROOT %g1 = f32[8,5]{1,0} all-gather(%p), channel_id=7, replica_groups=[4,4]<=[16]T(1,0), dimensions={0}, frontend_attributes={chain_id="2"}
}

%go_on (p2: f32[2,5]) -> f32[8,5] {
  %p2 = f32[2,5]{1,0} parameter(0)
  ROOT %g2 = f32[8,5]{1,0} all-gather(%p2), channel_id=7, replica_groups=[4,4]<=[16]T(1,0), dimensions={0}, frontend_attributes={chain_id="2"}
}

ENTRY %main (a: bf16[8,6], b: f32[2,5]) -> bf16[2,6] {
  %a = bf16[8,6]{1,0} parameter(0)
  %b = f32[2,5]{1,0} parameter(1)
  %first = f32[8,5]{1,0} fusion(%b), kind=kCustom, calls=%begin
  %then = f32[8,5]{1,0} fusion(%b), kind=kCustom, calls=%go_on
  %perm = f32[2,5]{1,0} collective-permute(%b), channel_id=9, source_target_pairs={{0,1},{1,0}}
  %ga = (f32[2,5]{1,0}, f32[32,5]{1,0}) all-gather-start(%b), channel_id=8, replica_groups={{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}, dimensions={0}
  %gd = f32[32,5]{1,0} all-gather-done(%ga)
  ROOT %rs = bf16[2,6]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_what_tpus_compiler_makes_of_collectives_is_understood():
    found = collectives.find(hlo.parse(TPU), 16)
    Collective = collectives.Collective
    assert found == [
        Collective("all-gather", "f32", True, 4, 8 * 5 * 4, 1),
        Collective("collective-permute", "f32", False, 16, 2 * 5 * 4, 1),
        Collective("all-gather", "f32", True, 16, 32 * 5 * 4, 1),
        Collective("reduce-scatter", "bf16", False, 4, 8 * 6 * 2, 1),
    ]
    assert [one.sent for one in found] == [120, 40, 600, 72]


def test_collectives_add_up_by_kind_and_type():
    found = collectives.find(hlo.parse(TPU), 16)
    rows = {row["kind"]: row for row in collectives.summarize(found)}
    assert list(rows) == ["reduce-scatter", "all-gather", "collective-permute"]
    assert rows["all-gather"] == {
        "kind": "all-gather",
        "dtype": "f32",
        "overlapped": True,
        "count": 2,
        "bytes": 160 + 640,
        "sent": 720,
    }


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=[16,3]<=[48]", 3),
        ("replica_groups=[2,8]<=[4,4]T(1,0)", 8),
        ("replica_groups=mesh['a'=2,'b'=6] {'a','b'}", 12),
        ("replica_groups=mesh['a'=2,'b'=6] {'b':(1)3}", 3),
        ("replica_groups={}", 48),
    ],
)
def test_every_way_to_write_groups_is_read(words, devices):
    assert collectives._group(f", channel_id=1, {words}, x={{0}}", 48) == devices


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
    assert traffic.count(module) == 24


def test_products_of_this_machine_move_their_operands_and_results():
    x, y = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((30, 50), (50, 70)))
    module = compiled(lambda x, y: x @ y, x, y)
    assert traffic.count(module) == 4 * (30 * 50 + 50 * 70 + 30 * 70)
