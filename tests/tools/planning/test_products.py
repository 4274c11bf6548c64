"""Counting products in compiled programs: this machine's, and TPU's texts."""

import jax
import jax.numpy as jnp
import pytest

from vit_jax.models import cost
from vit_jax.tools.planning import costs, hlo


def both(function, *shapes):
    """Counts in the compiled program and in the trace."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(function).lower(*args).compile().as_text()
    return costs.count_macs(hlo.parse(text)), cost.macs(function, *args)


@pytest.mark.parametrize(
    ("image", "kernel", "words"),
    [
        ((2, 9, 7, 4), (3, 2, 4, 6), {"strides": (1, 1), "padding": "VALID"}),
        ((2, 9, 7, 4), (3, 3, 4, 6), {"strides": (2, 1), "padding": "SAME"}),
        (
            (3, 8, 11, 4),
            (3, 5, 2, 6),
            {
                "strides": (1, 2),
                "padding": ((2, 1), (0, 3)),
                "feature_group_count": 2,
                "rhs_dilation": (2, 1),
            },
        ),
        (
            (2, 5, 6, 3),
            (4, 3, 3, 5),
            {"strides": (1, 1), "padding": ((3, 2), (1, 1)), "lhs_dilation": (3, 2)},
        ),
    ],
)
def test_a_convolution_counts_as_in_the_trace(image, kernel, words):
    def convolve(x, w):
        layout = ("NHWC", "HWIO", "NHWC")
        strides, padding = words["strides"], words["padding"]
        rest = {k: v for k, v in words.items() if k not in ("strides", "padding")}
        return jax.lax.conv_general_dilated(
            x, w, strides, padding, dimension_numbers=layout, **rest
        )

    compiled, traced = both(convolve, image, kernel)
    assert compiled == traced > 0


def test_products_of_batches_and_in_loops_count_as_in_the_trace():
    def function(x, y):
        z = jnp.einsum("bij,bkj->bik", x, y)
        return jax.lax.scan(lambda c, _: (jnp.sin(z @ c), None), x, length=7)[0]

    compiled, traced = both(function, (3, 5, 5), (3, 5, 5))
    assert compiled == traced == 8 * 3 * 5 * 5 * 5


# As TPU's compiler writes products: a batched one, whose batch is spread with zeros, and
# one of 2 x 4 heads; both within fusions.
TPU = """
HloModule m

%batched (l: bf16[32,8,197,64], r: bf16[32,8,197,64]) -> bf16[32,8,197,197] {
  %l = bf16[32,8,197,64]{3,2,1,0} parameter(0)
  %r = bf16[32,8,197,64]{3,2,1,0} parameter(1)
  ROOT %c1 = bf16[32,8,197,197]{3,2,1,0} convolution(%l, %r), window={size=32x8 stride=31x7 lhs_dilate=32x8}, dim_labels=01bf_01oi->01bf
}

%heads (g: bf16[32,197,512], k: bf16[512,8,64]) -> bf16[32,197,8,64] {
  %g = bf16[32,197,512]{2,1,0} parameter(0)
  %k = bf16[512,8,64]{2,1,0} parameter(1)
  %g2 = bf16[32,197,512,1]{2,1,0,3} bitcast(%g)
  %k2 = bf16[8,64,512,1]{2,1,0,3} bitcast(%k)
  ROOT %c2 = bf16[32,197,8,64]{1,3,2,0} convolution(%g2, %k2), window={size=1x8 pad=0_0x7_7 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f
}

ENTRY %main (a: bf16[32,8,197,64], b: bf16[32,197,512], c: bf16[512,8,64], d: bf16[32,512], e: bf16[512,10]) -> bf16[32,10] {
  %a = bf16[32,8,197,64]{3,2,1,0} parameter(0)
  %b = bf16[32,197,512]{2,1,0} parameter(1)
  %c = bf16[512,8,64]{2,1,0} parameter(2)
  %d = bf16[32,512]{1,0} parameter(3)
  %e = bf16[512,10]{1,0} parameter(4)
  %f1 = bf16[32,8,197,197]{3,2,1,0} fusion(%a, %a), kind=kOutput, calls=%batched
  %f2 = bf16[32,197,8,64]{1,3,2,0} fusion(%b, %c), kind=kOutput, calls=%heads
  ROOT %c3 = bf16[32,10]{1,0} convolution(%d, %e), dim_labels=bf_io->bf
}
"""


def test_products_as_tpus_compiler_writes_them_count_once():
    logits = 32 * 8 * 197 * 197 * 64
    heads = 32 * 197 * 512 * 512
    classes = 32 * 512 * 10
    assert costs.count_macs(hlo.parse(TPU)) == logits + heads + classes


# As the GPU compiler writes kernels of cuDNN and cuBLAS, shortened. Attention without a
# derivative has no statistics. jax 0.10.2 writes the configurations with spaces.
GPU = """
HloModule m

ENTRY %main (q: bf16[2,200,3,64], s: s32[4], x: bf16[2,32,32,3], w: bf16[8,16,16,3]) -> bf16[2,2,2,8] {
  %q = bf16[2,200,3,64]{3,2,1,0} parameter(0)
  %k = bf16[2,104,3,64]{3,2,1,0} parameter(1)
  %fwd = (bf16[2,3,200,64]{3,1,2,0}, f32[2,3,200]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["2","3","200","104"]}}}
  %teacher = (bf16[2,3,200,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["2","3","200","104"]}}}
  %stats = f32[2,3,200]{2,1,0} get-tuple-element(%fwd), index=1
  %bwd = (bf16[2,3,200,64]{3,1,2,0}, bf16[2,3,104,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k, %stats, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "3", "200", "104"]}}}
  %x = bf16[2,32,32,3]{3,2,1,0} parameter(2)
  %w = bf16[8,16,16,3]{3,2,1,0} parameter(3)
  %c = (bf16[2,2,2,8]{3,2,1,0}, u8[0]{0}) custom-call(%x, %w), window={size=16x16 stride=16x16}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %out = bf16[2,2,2,8]{3,2,1,0} get-tuple-element(%c), index=0
  %i = (bf16[2,32,32,3]{3,2,1,0}, u8[0]{0}) custom-call(%out, %w), window={size=16x16 stride=16x16}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %f = (bf16[8,16,16,3]{3,2,1,0}, u8[0]{0}) custom-call(%x, %out), window={size=16x16 stride=16x16}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %a = bf16[70,5]{1,0} parameter(4)
  %b = bf16[70,6]{1,0} parameter(5)
  %g = (bf16[5,6]{1,0}, s8[4]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %r = bf16[2,2,2,8]{3,2,1,0} get-tuple-element(%c), index=0
}
"""


def test_kernels_of_cudnn_and_cublas_count():
    module = hlo.parse(GPU)
    product = 2 * 3 * 200 * 104 * 64
    patches = 2 * 2 * 2 * 16 * 16 * 3 * 8
    assert costs.count_macs(module) == (2 + 2 + 5) * product + 3 * patches + 70 * 5 * 6
    assert costs.count_kernels(module) == {
        "__cublas$gemm": 1,
        "__cudnn$convBackwardFilter": 1,
        "__cudnn$convBackwardInput": 1,
        "__cudnn$convForward": 1,
        "__cudnn$fmhaSoftmax": 2,
        "__cudnn$fmhaSoftmaxBackward": 1,
    }
