"""Matrix products with bfloat16 operands and float32 sums, as CPUs compute them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TINY, draw_params

from vit_jax import models
from vit_jax.distributed import compilation
from vit_jax.models import kernels

ROUNDED = functools.partial(jax.default_matmul_precision, kernels.BFLOAT16_OPERANDS)
# Each sums another axis of the operands; the last two are narrower on one side.
EQUATIONS = ["bnk,bmk->bnm", "bnm,bmk->bnk", "bnm,bnk->bmk", "tm,mf->tf", "mt,tf->mf"]
SIZES = {"b": 2, "n": 24, "m": 40, "k": 16, "t": 48, "f": 8}


def drawn(equation, dtype="float32"):
    """Returns the operands of an equation and a gradient of its result."""
    rng = np.random.default_rng(0)
    axes = equation.replace("->", ",").split(",")
    shapes = [tuple(SIZES[axis] for axis in one) for one in axes]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def rounded(x):
    return np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32), np.float64)


def expected(equation, left, right, grad):
    """Returns the product of rounded operands, and its gradients, in float64."""
    a, b, result = equation.replace("->", ",").split(",")
    left, right, grad = map(rounded, (left, right, grad))
    return (
        np.einsum(equation, left, right),
        np.einsum(f"{result},{b}->{a}", grad, right),
        np.einsum(f"{a},{result}->{b}", left, grad),
    )


def found(equation, left, right, grad):
    """Returns what `einsum` gives, and its gradients."""
    product = functools.partial(kernels.einsum, equation)

    @jax.jit
    def both(left, right, grad):
        result, pull = jax.vjp(product, left, right)
        return result, *pull(grad)

    return both(left, right, grad)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_float32_operands_are_rounded_where_that_is_asked_for(equation):
    given = drawn(equation)
    with ROUNDED():
        results = found(equation, *given)
    for one, right in zip(results, expected(equation, *given), strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_float32_stays_float32(equation):
    left, right, grad = drawn(equation)
    for precision in (None, "highest"):
        with jax.default_matmul_precision(precision):
            result, *_ = found(equation, left, right, grad)
        exact = np.einsum(equation, np.float64(left), np.float64(right))
        np.testing.assert_allclose(result, exact, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_bfloat16_is_summed_in_float32(equation):
    given = drawn(equation, "bfloat16")
    results = found(equation, *given)
    for one, right in zip(results, expected(equation, *given), strict=True):
        assert one.dtype == jnp.bfloat16
        # Half of the last of 8 bits is the error of rounding the result.
        np.testing.assert_allclose(rounded(one), right, rtol=2**-8, atol=1e-4)
    wide = kernels.einsum(equation, *given[:2], dtype="float32")
    np.testing.assert_allclose(
        wide, expected(equation, *given)[0], rtol=1e-5, atol=1e-4
    )


def test_a_product_of_tokens_is_that_of_all_their_rows():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 5, 16)), rng.normal(size=(16, 24))
    x, kernel = jnp.asarray(x, jnp.bfloat16), jnp.asarray(kernel, jnp.bfloat16)
    result = kernels.product(x, kernel, "float32")
    np.testing.assert_allclose(result, rounded(x) @ rounded(kernel), rtol=1e-5)


@pytest.mark.parametrize(("platform", "devices"), [("gpu", 1), ("tpu", 1), ("cpu", 8)])
def test_other_programs_have_plain_products(platform, devices):
    device = jax.sharding.AbstractDevice(platform, None, platform)
    mesh = jax.sharding.AbstractMesh((devices,), ("data",), abstract_device=device)
    given = drawn("tm,mf->tf", "bfloat16")[:2]
    with ROUNDED(), jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(kernels.product)(*given))
    assert "custom_vjp" not in text
    assert "precision=BF16_BF16_F32" in text


@pytest.mark.parametrize("variant", ["Ti/4", "Mixer-S/4", "Swin-T"])
def test_a_network_with_rounded_operands_is_near_that_of_float32(variant):
    sizes = TINY if variant == "Ti/4" else {}
    if variant == "Mixer-S/4":
        sizes = {"depth": 1, "width": 16, "tokens_mlp_dim": 8, "channels_mlp_dim": 24}
    if variant == "Swin-T":
        sizes = {"stage_depths": (1,), "num_heads": (2,), "width": 16}
    model = models.create(variant, num_classes=5, image_size=(16, 16), **sizes)
    params = draw_params(model)
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 16, 3)), "f4")

    def outputs(**keys):
        apply = jax.jit(model.replace(**keys).apply)
        return np.asarray(apply(params, images)["logits"], np.float64)

    plain, mixed = outputs(), outputs(matmul_dtype="bfloat16")
    assert 0 < np.abs(mixed - plain).max() < 0.1 * np.abs(plain).max()
    np.testing.assert_array_equal(outputs(matmul_dtype=""), plain)


def test_the_gradient_of_rounded_operands_is_near_that_of_float32():
    model = models.create("Ti/4", num_classes=5, image_size=(16, 16), **TINY)
    params = draw_params(model)
    images = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16, 16, 3)), "f4")

    def of(model):
        # Jitted within: JAX traces the derivative after the network.
        apply = jax.jit(model.apply)
        return lambda params: apply(params, images)["logits"][:, 0].mean()

    def gradient(model):
        return jax.tree.leaves(jax.jit(jax.grad(of(model)))(params))

    mixed = model.replace(matmul_dtype="bfloat16")
    assert "f32" not in _operands_of(jax.grad(of(mixed)), params)
    plain, rounded = gradient(model), gradient(mixed)
    for one, other in zip(plain, rounded, strict=True):
        assert other.dtype == jnp.float32
        # The gradient of the keys' bias is 0.
        error = np.linalg.norm(one - other)
        assert error < 0.02 * np.linalg.norm(one) + 1e-3
    assert any((one != other).any() for one, other in zip(plain, rounded, strict=True))


def _operands_of(function, *args):
    """Returns the dtypes of the operands of all products, such as {"bf16"}."""
    text = jax.jit(function).lower(*args).as_text()
    products = re.findall(r"stablehlo.dot_general.* : \((.*)\) ->", text)
    assert products
    return {x for one in products for x in re.findall(r"x(\w+)>", one)}


@pytest.mark.skipif(not kernels.has_amx(), reason="this processor has no AMX")
@pytest.mark.parametrize("equation", EQUATIONS)
def test_xla_passes_products_of_bfloat16_to_its_fast_library(equation):
    # In another release of jaxlib a failure here means that training takes twice as long.
    given = drawn(equation.replace("b", ""))
    equation = equation.replace("b", "")
    product = functools.partial(kernels.einsum, equation)

    def gradients(left, right, grad):
        result, pull = jax.vjp(product, left, right)
        return result, *pull(grad)

    options = compilation.options("cpu", bfloat16=True)
    with ROUNDED():
        text = jax.jit(gradients).lower(*given).compile(options).as_text()
    entry = text[text.index("\nENTRY") :]
    assert len(re.findall(r"%ynn_fusion[.\d]* = ", entry)) == 3
    assert " dot(" not in entry
