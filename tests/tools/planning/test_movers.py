"""The instructions that move the most bytes, from the text of a compiled program."""

import dataclasses

import jax
import jax.numpy as jnp

from tests.tools.planning.test_analysis import FOUND
from vit_jax.tools.planning import costs, hlo, movers, report

NAME = (
    'metadata={op_name="jit(step)/jvp(Net)/Net.run/encoderblock_%d/Mlp_0/Dense_0/dot"}'
)
BACK = 'metadata={op_name="jit(step)/transpose(jvp(Net))/encoderblock_0/Norm_0/reduce_sum"}'
PROGRAM = f"""HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (x: bf16[50,30], w: bf16[30,70]) -> f32[] {{
  %x = bf16[50,30]{{1,0}} parameter(0)
  %w = bf16[30,70]{{1,0}} parameter(1)
  %zero = f32[] constant(0)
  %m1 = (bf16[50,70]{{1,0}}, s8[4096]{{0}}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", {NAME % 3}
  %m2 = (bf16[50,70]{{1,0}}, s8[4096]{{0}}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", {NAME % 11}
  %y = bf16[50,70]{{1,0}} get-tuple-element(%m1), index=0
  ROOT %r = f32[] reduce(%y, %zero), dimensions={{0,1}}, to_apply=%add, {BACK}
}}
"""


def test_blocks_are_one_row_and_workspaces_do_not_count():
    product, summed = movers.find(hlo.parse(PROGRAM))
    each = 2 * (50 * 30 + 30 * 70 + 50 * 70)
    assert product == movers.Mover(
        kind="cuBLAS",
        backward=False,
        place="Mlp_0/Dense_0/dot",
        count=2,
        bytes=2 * each,
        reads=("bf16[50,30]", "bf16[30,70]"),
        writes=("bf16[50,70]",),
    )
    assert summed.backward
    assert (summed.kind, summed.place) == ("reduce", "encoderblock/Norm_0/reduce_sum")
    assert summed.bytes == 2 * 50 * 70 + 4 + 4
    assert movers.find(hlo.parse(PROGRAM), most=1) == (product,)


def test_all_movers_of_a_program_of_this_machine_are_its_bytes():
    def step(x):
        return jnp.sort(jnp.tanh(x @ x.T), axis=0).sum(1)

    text = jax.jit(step).lower(jnp.ones((70, 30))).compile().as_text()
    module = hlo.parse(text)
    total = sum(one.bytes for one in movers.find(module, most=1_000))
    assert total == costs.count_bytes_moved(module) > 0


def test_the_table_has_a_line_for_each():
    found = dataclasses.replace(FOUND, movers=movers.find(hlo.parse(PROGRAM)))
    _, _, first, second = report.movers(found)
    assert first.split() == [
        *("0.00", "2", "forward", "cuBLAS", "Mlp_0/Dense_0/dot"),
        *("bf16[50,30]", "bf16[30,70]", "->", "bf16[50,70]"),
    ]
    assert "backward" in second
