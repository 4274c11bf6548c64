import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import grouped_depth, kernels, layers
from vit_jax.models.encoder import Block
from vit_jax.models.encoder_config import EncoderConfig
from vit_jax.models.layers import MultiHeadAttention

B, N, H, K = 2, 5, 3, 4  # Distinct, so that no swapped axis can pass.


def test_self_attention_agrees_with_flax_on_the_same_parameters():
    x = jax.random.normal(jax.random.key(0), (B, N, H * K))
    ours, reference = (
        MultiHeadAttention(num_heads=H),
        nn.MultiHeadDotProductAttention(H),
    )
    params = jax.jit(reference.init)(jax.random.key(1), x, x)
    found, expected = (jax.jit(one.apply)(params, x, x) for one in (ours, reference))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_layer_norm_adds_a_millionth_to_the_variance():
    x = jnp.array([[-1e-3, 1e-3]])  # Its variance is a millionth too.
    params = {"scale": jnp.ones(2), "bias": jnp.zeros(2)}
    found = layers.LayerNorm().apply({"params": params}, x)
    np.testing.assert_allclose(found, [[-(0.5**0.5), 0.5**0.5]], rtol=1e-5)


def test_layer_norm_agrees_with_flax_and_with_the_gradient_that_jax_derives():
    keys = jax.random.split(jax.random.key(0), 4)
    x, g = (3 * jax.random.normal(k, (B, N, 6)) + 2 for k in keys[:2])
    ours, reference = layers.LayerNorm(epsilon=1e-3), nn.LayerNorm(epsilon=1e-3)
    params, own = (jax.eval_shape(m.init, keys[2], x) for m in (reference, ours))
    assert own == params
    params = jax.tree.map(lambda p: jax.random.normal(keys[3], p.shape), params)
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


def test_a_branch_is_added_to_a_fixed_number_of_images_of_each_group():
    x = jax.random.normal(jax.random.key(0), (24, 2, 3))
    drawn = grouped_depth.draw(24, 0.3, 8, jax.random.key(1))
    some = drawn.take(x)
    assert some.shape == (3 * 5, 2, 3)
    y = drawn.add(x, jnp.ones_like(some)) - x
    added = np.asarray(y[:, 0, 0] > 0.5).reshape(3, 8)
    assert (added.sum(1) == 5).all() and (added[0] != added[1]).any()
    kept = np.asarray(y).reshape(24, -1)[added.reshape(-1)]
    np.testing.assert_allclose(kept, 8 / 5, rtol=1e-5)
    # Each image gets the branch of its own tokens.
    own = np.asarray(drawn.add(x, some)) - x
    of_kept = added.reshape(-1)
    np.testing.assert_allclose(own[of_kept], 8 / 5 * x[of_kept], rtol=1e-4, atol=1e-6)
    # A group that does not divide the batch: the common divisor.
    few = grouped_depth.draw(6, 0.5, 4, jax.random.key(1))
    assert few.take(x[:6]).shape == (3, 2, 3)


def test_the_gradient_of_a_branch_reaches_the_kept_images_alone():
    x = jax.random.normal(jax.random.key(0), (8, 1, 2))

    def of(x, factor):
        drawn = grouped_depth.draw(8, 0.5, 8, jax.random.key(2))
        return drawn.add(x, factor * drawn.take(x)).sum()

    to_x = jax.device_get(jax.jit(jax.grad(of))(x, 3.0))
    kept = np.isclose(to_x[:, 0, 0], 1 + 2 * 3.0)
    assert kept.sum() == 4 and np.isclose(to_x[~kept], 1).all()


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
        (y, *vjp(g)) for y, vjp in (jax.vjp(f, x) for f in (kernels.gelu_tanh, nn.gelu))
    )
    for a, b in zip(ours, reference, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gelu_beside_a_product_on_gpus_rounds_as_the_other(monkeypatch):
    x = jnp.linspace(-6, 6, 371, dtype=jnp.bfloat16)
    g = jnp.ones_like(x)
    expected, vjp = jax.vjp(kernels.gelu_tanh, x)
    monkeypatch.setattr(kernels, "_platform", lambda: "gpu")
    found, vjp_found = jax.vjp(kernels.gelu_tanh_of_product, x)
    np.testing.assert_allclose(
        found.astype(np.float32), expected.astype(np.float32), atol=0.02, rtol=0.02
    )
    np.testing.assert_array_equal(vjp_found(g)[0], vjp(g)[0])
    # Only this form is passed to cuBLAS; float32 keeps the exact one.
    assert "erf" not in str(jax.make_jaxpr(kernels.gelu_tanh_of_product)(x))
    single = jnp.float32([-1.5, 0.3])
    np.testing.assert_array_equal(
        kernels.gelu_tanh_of_product(single), kernels.gelu_tanh(single)
    )


def test_norms_of_bfloat16_are_those_of_float32_rounded():
    # Means up to 30 times the deviation, as in the residuals of deep networks.
    x = jax.random.normal(jax.random.key(0), (7, 768)) + jnp.arange(7)[:, None] * 5
    x = x.astype(jnp.bfloat16)
    scale, bias = jax.random.normal(jax.random.key(1), (2, 768))
    g = jax.random.normal(jax.random.key(2), x.shape, jnp.bfloat16)
    found, expected = (
        (y, *vjp(g.astype(y.dtype)))
        for y, vjp in (
            jax.vjp(lambda *a: kernels.layer_norm(*a, 1e-6), value, scale, bias)
            for value in (x, x.astype(jnp.float32))
        )
    )
    for a, b in zip(found, expected, strict=True):
        atol = 2e-2 * np.abs(b).max()
        np.testing.assert_allclose(a.astype(np.float32), b, atol=atol)
    same = kernels.layer_norm(jnp.full((1, 768), 300, jnp.bfloat16), scale, bias, 1e-6)
    np.testing.assert_allclose(same[0].astype(np.float32), bias, atol=2e-2)


def test_dropout_keeps_elements_at_random():
    rate, shape = 0.3, (64, 50, 320)
    draw = jax.jit(lambda key: kernels.dropout(jnp.ones(shape), rate, key) > 0)
    masks = np.stack([draw(jax.random.key(seed)) for seed in range(4)])
    deviation = math.sqrt(rate * (1 - rate))

    def check(values, count):  # Means of `count` independent elements.
        z = (values - (1 - rate)) / deviation * math.sqrt(count)
        assert np.abs(z).max() < 5.5
        assert 0.8 < z.std() < 1.2

    check(masks.mean((1, 2)), 64 * 50)  # Columns of each key.
    check(masks.mean(-1).reshape(-1), 320)  # Tokens.
    normal = (masks - (1 - rate)) / deviation
    others = [
        np.roll(normal, 1, axis) for axis in range(4)
    ]  # Keys, images, tokens, ...
    others += [np.roll(normal, k, -1) for k in (2, 3, 16, 64)]
    for other in others:
        assert abs((normal * other).mean()) * math.sqrt(normal.size) < 5
    # Pairs of columns over tokens: as many as chance gives.
    pairs = np.corrcoef(masks.reshape(-1, 320), rowvar=False)[np.triu_indices(320, 1)]
    z = pairs * math.sqrt(masks.size / 320)
    assert np.abs(z).max() < 6
    assert 0.95 < z.std() < 1.05


def test_dropout_scales_what_it_keeps_and_does_not_depend_on_the_mesh(monkeypatch):
    x = jax.random.normal(jax.random.key(0), (8, 5, 6)) + 10
    key = jax.random.key(1)
    found = kernels.dropout(x, 0.25, key)
    kept = found != 0
    np.testing.assert_allclose(found, jnp.where(kept, x / 0.75, 0), rtol=1e-6)
    mesh = jax.make_mesh((8,), ("data",))
    split = jax.NamedSharding(mesh, jax.P("data"))
    draw = jax.jit(lambda x: kernels.dropout(x, 0.25, key), in_shardings=split)
    np.testing.assert_array_equal(draw(x) != 0, kept)
    np.testing.assert_array_equal(kernels.dropout(x[:3], 0.25, key) != 0, kept[:3])
    for platform in ("cpu", "gpu"):  # On GPUs the derivative draws the mask again.
        monkeypatch.setattr(kernels, "_platform", lambda platform=platform: platform)
        gradient = jax.grad(lambda x: kernels.dropout(x, 0.25, key).sum())(x)
        np.testing.assert_allclose(gradient, kept / 0.75, rtol=1e-6)
    assert kernels.dropout(x, 0.25, None) is x
    assert kernels.dropout(x, 0.0, key) is x


@pytest.mark.slow
def test_patch_embedding_is_a_convolution():
    images = jax.random.normal(jax.random.key(0), (2, 9, 13, 3))
    both = layers.PatchEmbedding(5, 4), nn.Conv(5, (4, 4), (4, 4), "VALID")
    params, others = (jax.jit(m.init)(jax.random.key(1), images) for m in both)
    jax.tree.map(np.testing.assert_array_equal, params, others)

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradients(module, params, images):
        y, pull = jax.vjp(module.apply, params, images)
        return y, pull(2 * y)

    found, expected = (value_and_gradients(m, params, images) for m in both)
    assert expected[0].shape == (2, 2, 3, 5)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        *(found[1], expected[1]),
    )
