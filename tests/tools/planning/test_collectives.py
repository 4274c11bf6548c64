"""Reading what devices exchange: programs of this machine, and texts of XLA's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax.errors import UserError
from vit_jax.tools.planning import costs, hlo

Collective = costs.Collective
ONE_HOST = [0] * 16


def compiled(function, *args, **kwargs):
    return hlo.parse(jax.jit(function, **kwargs).lower(*args).compile().as_text())


def test_collectives_of_a_program_of_this_machine_are_found_with_their_sizes():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec("a"))
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((12, 5), jnp.float32)

    summed = compiled(lambda x: x.sum(0), x, in_shardings=rows, out_shardings=whole)
    (one,) = costs.find_collectives(summed, ONE_HOST[:8])
    assert (one.kind, one.devices, one.bytes) == ("all-reduce", 4, 5 * 4)
    assert one.sent == pytest.approx(2 * 20 * 3 / 4)

    gathered = compiled(lambda x: x + 1, x, in_shardings=rows, out_shardings=whole)
    (one,) = costs.find_collectives(gathered, ONE_HOST[:8])
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
  ROOT %g1 = f32[8,5]{1,0} all-gather(%p), channel_id=7, replica_groups=[4,4]<=[4,4]T(1,0), dimensions={0}, frontend_attributes={chain_id="2"}
}

%go_on (p2: f32[2,5]) -> f32[8,5] {
  %p2 = f32[2,5]{1,0} parameter(0)
  ROOT %g2 = f32[8,5]{1,0} all-gather(%p2), channel_id=7, replica_groups=[4,4]<=[4,4]T(1,0), dimensions={0}, frontend_attributes={chain_id="2"}
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
    found = costs.find_collectives(hlo.parse(TPU), ONE_HOST)
    assert found == [
        Collective("all-gather", "f32", True, 4, 8 * 5 * 4, 1),
        Collective("collective-permute", "f32", False, 16, 2 * 5 * 4, 1),
        Collective("all-gather", "f32", True, 16, 32 * 5 * 4, 1),
        Collective("reduce-scatter", "bf16", False, 4, 8 * 6 * 2, 1),
    ]
    assert [one.sent for one in found] == [120, 40, 600, 72]


def test_collectives_add_up_by_kind_and_type():
    found = costs.find_collectives(hlo.parse(TPU), ONE_HOST)
    rows = {row["kind"]: row for row in costs.summarize_collectives(found)}
    assert list(rows) == ["reduce-scatter", "all-gather", "collective-permute"]
    assert rows["all-gather"] == {
        "kind": "all-gather",
        "dtype": "f32",
        "overlapped": True,
        "slices": False,
        "hosts": 1,
        "purpose": "scalars",
        "place": "",
        "count": 2,
        "bytes": 160 + 640,
        "sent": 720,
        "network": 0,
    }


# The transposed one is of h100:2x8, the others as XLA's own tests write them.
@pytest.mark.parametrize(
    ("words", "first", "last"),
    [
        ("{{0,2,4},{1,3,5}}", [0, 2, 4], [1, 3, 5]),
        ("[2,3]<=[6]", [0, 1, 2], [3, 4, 5]),
        ("[2,3]<=[3,2]T(1,0)", [0, 2, 4], [1, 3, 5]),
        ("mesh['a'=2,'b'=3] {'a'}", [0, 3], [2, 5]),
        ("mesh['a'=3,'b'=2,'c'=4] {'a','b'}", range(0, 24, 4), range(3, 24, 4)),
        ("mesh['a'=4,'b'=6] {'b':(1)3}", [0, 2, 4], [19, 21, 23]),
        ("mesh['a'=4,'b'=6] {'b':(3)2}", [0, 1], [22, 23]),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [0, 1, 4, 5], [2, 3, 6, 7]),
        (
            "mesh['a'=8,'b'=2], device_ids=([2,8]T(1,0)) {'a'}",
            range(8),
            range(8, 16),
        ),
        ("mesh['a'=2,'b'=2], device_ids=(3,0,1,2) {'b'}", [3, 0], [1, 2]),
        ("mesh[a=2,b=3] {b}", [0, 1, 2], [3, 4, 5]),
        ("{}", range(48), range(48)),
    ],
)
def test_every_way_to_write_groups_is_read(words, first, last):
    devices = max(*first, *last) + 1
    found = costs.find_groups(
        f", channel_id=1, replica_groups={words}, x={{0}}", devices
    )
    assert (found[0], found[-1]) == (list(first), list(last))


def test_groups_of_several_slices_are_those_of_one():
    # Of v5e:2x2 and --slices=2.
    assert costs.find_groups(", replica_groups={{0,1,2,3}}", 8) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        ("<4x2>", 8),  # Not a notation.
        ("mesh['a'=2,'b'=4], order=(1,0) {'b'}", 8),
        ("mesh['a'=2,'b'=4] {'c'}", 8),  # Not an axis.
        ("mesh['a'=2,'b'=4] {'b':(1)3}", 8),  # Not a part of it.
        ("mesh['a'=2,'b'=4], device_ids=([4,4]T(1,0)) {'b'}", 8),
        ("[2,3]<=[3,2]T(1,2)", 6),
        ("{{0,1},{1,2}}", 3),  # Not a partition.
        ("[2,4]<=[8]", 12),  # Not of this program.
    ],
)
def test_groups_that_cannot_be_read_are_an_error(words, devices):
    with pytest.raises(UserError, match=re.escape(f"replica_groups={words}")):
        costs.find_groups(f", channel_id=1, replica_groups={words}", devices)


def test_groups_of_an_axis_are_those_of_the_mesh():
    # Processes are along "fsdp", so the devices of "data" are neighbours.
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    places = np.array(jax.devices())[order].reshape(2, 4)
    mesh = Mesh(places, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((12, 8), jnp.float32)
    for axis, within in (("fsdp", 1), ("data", 0)):
        rows = NamedSharding(mesh, PartitionSpec(axis))
        whole = NamedSharding(mesh, PartitionSpec())
        program = compiled(lambda x: x + 1, x, in_shardings=rows, out_shardings=whole)
        (gather,) = (
            run.instruction
            for run in program.runs()
            if run.instruction.base == "all-gather"
        )
        found = costs.find_groups(gather.attributes, 8)
        # Devices are numbered by their place in the mesh.
        wanted = np.moveaxis(np.arange(8).reshape(2, 4), within, -1)
        assert found == wanted.reshape(-1, wanted.shape[-1]).tolist()


# As the GPU compiler writes them: all as asynchronous, and marked if they are not.
GPU = """
HloModule m

ENTRY %main (x: bf16[800]) -> bf16[800] {
  %x = bf16[800]{0} parameter(0)
  %s1 = bf16[800]{0} all-reduce-start(%x), channel_id=1, replica_groups=mesh['a'=4,'b'=2] {'a','b'}, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":false}}
  %d1 = bf16[800]{0} all-reduce-done(%s1)
  %s2 = bf16[800]{0} all-reduce-start(%d1), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":true}}
  %d2 = bf16[800]{0} all-reduce-done(%s2)
  ROOT %p = bf16[800]{0} collective-permute(%d2), channel_id=3, source_target_pairs={{0,4},{4,0}}
}
"""


def test_bytes_of_gpus_go_over_links_within_a_host_and_over_the_network_between():
    found = costs.find_collectives(hlo.parse(GPU), [0, 0, 0, 0, 1, 1, 1, 1])
    rows = [(one.kind, one.overlapped, one.devices, one.hosts) for one in found]
    assert rows == [
        ("all-reduce", True, 8, 2),
        ("all-reduce", False, 2, 1),
        ("collective-permute", False, 8, 2),
    ]
    # Reduced within hosts first: each of 4 GPUs then sends a quarter over the network.
    assert [one.sent for one in found] == [2 * 1600 * 3 / 4, 1600, 1600]
    assert [one.network for one in found] == [2 * 400 / 2, 0, 1600]


# As XLA prints what stands for a computation of one collective (seen of TPU's compiler
# with xla_tpu_enable_async_all_to_all), and of more than that.
ASYNCHRONOUS = """
HloModule m

%odd (p: f32[8,6]) -> f32[2,6] {
  %p = f32[8,6]{1,0} parameter(0)
  %n = f32[8,6]{1,0} negate(%p)
  ROOT %r = f32[2,6]{1,0} reduce-scatter(%n), channel_id=5, replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[8,6], y: bf16[4,6]) -> f32[8,6] {
  %x = f32[8,6]{1,0} parameter(0)
  %y = bf16[4,6]{1,0} parameter(1)
  %rs = ((f32[8,6]{1,0}, bf16[4,6]{1,0}), (f32[2,6]{1,0}, bf16[1,6]{1,0}), s32[]) reduce-scatter-start(%x, %y), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
  %ru = ((f32[8,6]{1,0}, bf16[4,6]{1,0}), (f32[2,6]{1,0}, bf16[1,6]{1,0}), s32[]) reduce-scatter-update(%rs)
  %rd = (f32[2,6]{1,0}, bf16[1,6]{1,0}) reduce-scatter-done(%ru)
  %ts = ((f32[8,6]{1,0:T(8,128)}), f32[8,6]{1,0:T(8,128)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) all-to-all-start(%x), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  %td = f32[8,6]{1,0} all-to-all-done(%ts)
  %os = ((f32[8,6]{1,0}), f32[2,6]{1,0}, s32[]) async-start(%x), calls=%odd
  %od = f32[2,6]{1,0} async-done(%os)
  %gs = ((f32[8,6]{1,0}, bf16[4,6]{1,0}), (f32[32,6]{1,0}, bf16[16,6]{1,0})) all-gather-start(%x, %y), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}
  %gd = (f32[32,6]{1,0}, bf16[16,6]{1,0}) all-gather-done(%gs)
  %as = f32[8,6]{1,0} all-reduce-start(%x), channel_id=4, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %ad = f32[8,6]{1,0} all-reduce-done(%as)
}
"""


def test_asynchronous_collectives_are_what_they_wrap():
    assert costs.find_collectives(hlo.parse(ASYNCHRONOUS), ONE_HOST[:4]) == [
        # What it takes, 4 times what it gives.
        Collective("reduce-scatter", "f32", True, 4, 192 + 48, 1),
        Collective("all-to-all", "f32", True, 4, 192, 1),
        Collective("reduce-scatter", "f32", True, 4, 192, 1),
        Collective("all-gather", "f32", True, 4, 768 + 192, 1),
        Collective("all-reduce", "f32", True, 4, 192, 1),
    ]


# As TPU's compiler writes what goes from slice to slice (4 of v5e:2x2).
SLICES = """
HloModule m

ENTRY %main (x: bf16[512,8]) -> bf16[512,8] {
  %x = bf16[512,8]{1,0} parameter(0)
  %t = token[] after-all()
  %s1 = (bf16[512,8]{1,0}, u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2,3,4}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %r1 = (bf16[512,8]{1,0}, u32[], token[]) recv(%t), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2,3,4}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %d1 = token[] send-done(%s1), channel_id=1, is_host_transfer=true
  %e1 = (bf16[512,8]{1,0}, token[]) recv-done(%r1), channel_id=2, is_host_transfer=true
  %s2 = (bf16[512,8]{1,0}, u32[], token[]) send(%x, %t), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1:4}x{0:3}",_xla_megascale_transfer_type="ALL_GATHER"}
  %s3 = (bf16[512,8]{1,0}, u32[], token[]) send(%x, %t), channel_id=5, is_host_transfer=true, frontend_attributes={_xla_megascale_target={{100000,200000},{100001,200001}},_xla_megascale_transfer_type="ALL_TO_ALL"}
  %s4 = (bf16[512,8]{1,0}, u32[], token[]) send(%x, %t), channel_id=7, is_host_transfer=true, frontend_attributes={_xla_megascale_target={{100000->200000},{200000->100000}},_xla_megascale_transfer_type="ONE_TO_ONE"}
  ROOT %out = bf16[512,8]{1,0} get-tuple-element(%e1), index=0
}
"""


def test_what_goes_between_slices_counts_once_and_apart():
    found = costs.find_collectives(hlo.parse(SLICES), ONE_HOST)
    size = 512 * 8 * 2
    assert [(one.kind, one.devices, one.bytes) for one in found] == [
        ("all-reduce", 4, size),
        ("all-gather", 4, 4 * size),
        ("all-to-all", 2, size),
        ("collective-permute", 1, size),
    ]
    assert all(one.slices and one.overlapped for one in found)
    assert [one.sent for one in found] == [1.5 * size, 3 * size, size / 2, size]
    (first, *_) = costs.summarize_collectives(found)
    assert (first["kind"], first["slices"], first["count"]) == ("all-reduce", True, 1)


# As the GPU compiler joins sums, of a vector and of what it reshaped.
JOINED = """
HloModule m

%joins (p0: f32[6], p1: f32[20000]) -> f32[20006] {
  %p0 = f32[6]{0} parameter(0)
  %p1 = f32[20000]{0} parameter(1)
  ROOT %c = f32[20006]{0} concatenate(%p0, %p1), dimensions={0}
}

ENTRY %main (x: f32[6], y: f32[100,200], z: f32[5,4000]) -> f32[20006] {
  %x = f32[6]{0} parameter(0), metadata={op_name="jit(step)/transpose(jvp(Model))/Dense_0/reduce_sum"}
  %y = f32[100,200]{1,0} parameter(1), metadata={op_name="jit(step)/jvp(Model)/Dense_0/dot_general"}
  %z = f32[5,4000]{1,0} parameter(2)
  %flat = f32[20000]{0} bitcast(%y)
  %both = f32[20006]{0} fusion(%x, %flat), kind=kLoop, calls=%joins
  %g1 = f32[20,4000]{1,0} all-gather(%z), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="jit(step)/jvp(Model)/embedding/layout_constraint"}
  %g2 = f32[20,4000]{1,0} all-gather(%z), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="jit(step)/jvp(koleo)/dot_general"}
  ROOT %sum = f32[20006]{0} all-reduce(%both), channel_id=4, replica_groups={}, to_apply=%add
}
"""


def test_a_collective_says_what_it_is_for():
    def rows(*state):
        found = costs.find_collectives(hlo.parse(JOINED), ONE_HOST[:4], state)
        return [(one.purpose, one.place, one.bytes) for one in found]

    joined = rows(6, 20_000)
    assert joined[0] == (costs.BATCH, "embedding/layout_constraint", 320_000)
    assert joined[1] == ("koleo", "", 320_000)
    assert joined[2:] == [(costs.GRADIENTS, "", 80_024)]
    assert rows(6)[2:] == [
        (costs.GRADIENTS, "", 24),
        (costs.BATCH, "Dense_0/dot_general", 80_000),
    ]
    assert rows(80_000)[0] == (costs.PARAMETERS, "", 320_000)
