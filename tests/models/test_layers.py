import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models import layers
from vit_jax.models.encoder import Block, EncoderConfig
from vit_jax.models.layers import MultiHeadAttention

B, N, H, K = 2, 5, 3, 4  # Distinct, so that no swapped axis can pass.


def test_self_attention_agrees_with_flax_on_the_same_parameters():
    x = jax.random.normal(jax.random.key(0), (B, N, H * K))
    ours, reference = (
        MultiHeadAttention(num_heads=H),
        nn.MultiHeadDotProductAttention(H),
    )
    params = reference.init(jax.random.key(1), x, x)
    np.testing.assert_allclose(
        ours.apply(params, x, x), reference.apply(params, x, x), rtol=1e-5, atol=1e-6
    )


def test_layer_norm_agrees_with_flax_and_with_the_gradient_that_jax_derives():
    keys = jax.random.split(jax.random.key(0), 4)
    x, g = (3 * jax.random.normal(k, (B, N, 6)) + 2 for k in keys[:2])
    ours, reference = layers.LayerNorm(epsilon=1e-3), nn.LayerNorm(epsilon=1e-3)
    params = reference.init(keys[2], x)
    assert jax.tree.map(jnp.shape, ours.init(keys[2], x)) == jax.tree.map(
        jnp.shape, params
    )
    params = jax.tree.map(lambda p: p + jax.random.normal(keys[3], p.shape), params)
    values = [jax.jit(one.apply)(params, x) for one in (ours, reference)]
    np.testing.assert_allclose(*values, atol=1e-5)
    grads = [
        jax.jit(lambda p, x, one=one: jax.vjp(one.apply, p, x)[1](g))(params, x)
        for one in (ours, reference)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *grads)


def test_layer_norm_of_bfloat16_takes_its_moments_in_float32():
    # Around 256 the neighbours of bfloat16 are 2 apart: a mean in it would be off by 1.
    x = jnp.array([[256.0, 258.0, 258.0, 258.0]], jnp.bfloat16)
    y = layers.LayerNorm(dtype="bfloat16")
    out = y.apply(y.init(jax.random.key(0), x), x)
    assert out.dtype == jnp.bfloat16
    expected = np.array([-(3**0.5), *[3**-0.5] * 3])
    np.testing.assert_allclose(out[0].astype(jnp.float32), expected, rtol=1e-2)


def test_dense_layers_of_the_heads_start_and_act_as_those_of_flax():
    x = jax.random.normal(jax.random.key(0), (N, H * K))
    init = nn.initializers.xavier_uniform()
    for ours, reference, of in (
        (
            layers.MergedDense((H * K,), (H, K)),
            nn.DenseGeneral((H, K), kernel_init=init),
            x,
        ),
        (
            layers.MergedDense((H, K), (7,)),
            nn.DenseGeneral(7, axis=(-2, -1), kernel_init=init),
            x.reshape(N, H, K),
        ),
    ):
        params = reference.init(jax.random.key(1), of)
        jax.tree.map(
            np.testing.assert_array_equal, ours.init(jax.random.key(1), x), params
        )
        params = jax.tree.map(lambda p: p + 0.1, params)
        expected = reference.apply(params, of).reshape(N, -1)
        np.testing.assert_allclose(ours.apply(params, x), expected, atol=1e-5)


def test_drop_path_drops_whole_images_and_rescales_what_stays():
    block = Block(EncoderConfig(num_heads=H, mlp_dim=9, attention_impl="einsum"))
    image = jax.random.normal(jax.random.key(0), (1, N, H * K))
    x = jnp.broadcast_to(image, (64, N, H * K))
    params, apply = jax.jit(block.init)(jax.random.key(1), image), jax.jit(block.apply)
    # Without its second dense layer the MLP is silent: only attention is left.
    params["params"]["MlpBlock_3"]["Dense_1"] = jax.tree.map(
        jnp.zeros_like, params["params"]["MlpBlock_3"]["Dense_1"]
    )

    branch = apply(params, image)[0] - image[0]
    y = apply(params, x, rate=0.5, key=jax.random.key(2)) - x
    dropped = np.abs(y).max(axis=(1, 2)) == 0
    assert 16 <= dropped.sum() <= 48
    np.testing.assert_allclose(
        y[~dropped], np.broadcast_to(2 * branch, y[~dropped].shape), atol=1e-5
    )


def test_exact_gelu_and_its_derivative_agree_with_those_of_the_error_function():
    x = np.linspace(-9, 9, 371, dtype=np.float32)
    cdf = np.array([(1 + math.erf(v / math.sqrt(2))) / 2 for v in x])
    density = np.exp(-(x.astype(np.float64) ** 2) / 2) / math.sqrt(2 * math.pi)
    y, vjp = jax.vjp(layers.ACTIVATIONS["gelu"], jnp.array(x))
    np.testing.assert_allclose(y, x * cdf, atol=1e-6)
    np.testing.assert_allclose(
        vjp(jnp.full_like(y, 3))[0], 3 * (cdf + x * density), atol=1e-5
    )


def test_approximate_gelu_and_its_derivative_agree_with_those_of_flax():
    x = jnp.array([-40, -3, -0.5, 0, 0.5, 3, 40.0])
    g = jnp.arange(1.0, 8)
    ours, reference = (
        (y, *vjp(g)) for y, vjp in (jax.vjp(f, x) for f in (layers.gelu_tanh, nn.gelu))
    )
    for a, b in zip(ours, reference, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
