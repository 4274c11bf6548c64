"""Every way of attention is the plain softmax in float32."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from vit_jax.errors import UserError
from vit_jax.models import attention, repetition
from vit_jax.models.layers import MultiHeadAttention

B, H = 2, 3
# 8 bits a number; sums of many of them.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
LENGTHS = jnp.array([3, 150], jnp.int32)


def plain(q, k, v, lengths=None, segments=None):
    logits = jnp.einsum("bhnk,bhmk->bhnm", q, k) * q.shape[-1] ** -0.5
    if segments is not None:
        hidden = segments[:, :, None] != segments[:, None]
        logits = jnp.where(hidden[:, None], -jnp.inf, logits)
    if lengths is not None:
        hidden = jnp.arange(k.shape[2])[None] >= lengths[:, None]
        logits = jnp.where(hidden[:, None, None], -jnp.inf, logits)
    return jnp.einsum("bhnm,bhmk->bhnk", jax.nn.softmax(logits), v)


def operands(n, m, width, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(B, H, tokens, width) for tokens in (n, m, m, n)]
    full = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    # The reference gets the same rounded numbers.
    return [x.astype(dtype) for x in full]


def value_and_gradients(function, q, k, v, grad):
    value, pull = jax.vjp(function, q, k, v)
    return [x.astype(jnp.float32) for x in (value, *pull(grad.astype(value.dtype)))]


def assert_plain(
    function, n, m, width, dtype, lengths=None, compiler_options=None, segments=None
):
    """Compares values and gradients, each against its largest number or 1."""
    masks = {"lengths": lengths, "segments": segments}
    given = operands(n, m, width, dtype)
    exact = [x.astype(jnp.float32) for x in given]
    found, expected = (
        jax.jit(functools.partial(value_and_gradients, f), compiler_options=o)(*args)
        for f, args, o in (
            (functools.partial(function, **masks), given, compiler_options),
            (functools.partial(plain, **masks), exact, None),
        )
    )
    for a, b in zip(found, expected, strict=True):
        bound = TOLERANCE[dtype] * max(1, float(jnp.abs(b).max()))
        np.testing.assert_allclose(a, b, atol=bound, rtol=0)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "padded"])
@pytest.mark.parametrize(
    ("way", "dtype"),
    [("einsum", "float32"), ("einsum", "bfloat16"), ("einsum16", "bfloat16")],
)
@pytest.mark.parametrize(
    ("n", "m", "width"),
    [
        (5, 7, 4),
        pytest.param(197, 197, 64, marks=pytest.mark.slow),
        pytest.param(1, 197, 64, marks=pytest.mark.slow),
    ],
)
def test_einsums_are_plain_attention(way, dtype, n, m, width, lengths):
    attend = functools.partial(attention.attend, implementation=way)
    assert_plain(attend, n, m, width, dtype, lengths)


@pytest.mark.slow  # The kernel is interpreted.
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "padded"])
@pytest.mark.parametrize(
    ("n", "width", "dtype"),
    [
        (197, 64, "float32"),
        (197, 64, "bfloat16"),
        (257, 80, "float32"),
        (256, 64, "float32"),
        (1025, 64, "float32"),
    ],
)
def test_splash_is_plain_attention_for_any_number_of_tokens(n, width, dtype, lengths):
    attend = functools.partial(attention.attend_splash, interpret=True)
    assert_plain(attend, n, n, width, dtype, lengths)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"]
)
def test_what_cudnn_is_asked_for_is_plain_attention(dtype, lengths):
    attend = functools.partial(attention.attend_cudnn, implementation="xla")
    # XLA for CPUs in jaxlib 0.12.0.1 keeps products of bfloat16 for its YNN library,
    # then does not hand this one over: it is summed in bfloat16, with an error of 1.6 %
    # (root mean square) where 0.24 % is that of rounding. cuDNN sums in float32.
    without = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
    assert_plain(attend, 197, 197, 64, dtype, lengths, compiler_options=without)


def parts_of(tokens):
    """Returns segments of several lengths, other ones in each row."""
    cuts = [(tokens // 5, tokens // 2), (tokens // 3, tokens - 1)]
    return jnp.array(
        [[sum(n >= c for c in cut) for n in range(tokens)] for cut in cuts]
    )


@pytest.mark.parametrize(
    ("way", "n", "dtype"),
    [
        ("einsum", 9, "float32"),
        ("einsum", 9, "bfloat16"),
        ("einsum16", 9, "bfloat16"),
        ("cudnn", 37, "float32"),
        ("cudnn", 40, "float32"),
        pytest.param("splash", 197, "float32", marks=pytest.mark.slow),
        pytest.param("splash", 256, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_tokens_of_a_segment_attend_to_each_other_alone(way, n, dtype):
    attend = {
        "cudnn": functools.partial(attention.attend_cudnn, implementation="xla"),
        "splash": functools.partial(attention.attend_splash, interpret=True),
    }.get(way) or functools.partial(attention.attend, implementation=way)
    assert_plain(attend, n, n, 64, dtype, segments=parts_of(n))


@pytest.mark.slow
def test_splash_splits_over_images_and_heads_of_a_mesh():
    """Without `jax.shard_map` the kernel would see whole arrays on every device."""
    mesh = jax.make_mesh((2, 3), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rules = [("batch", "data"), ("heads", "model"), ("tokens", None)]
    q, k, v, _ = operands(197, 197, 64, "float32")
    place = NamedSharding(mesh, PartitionSpec("data", "model"))

    @jax.jit
    def attend(q, k, v, lengths):
        with (
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            nn.logical_axis_rules(rules),
        ):
            return attention.attend_splash(q, k, v, lengths, interpret=True)

    found = attend(*jax.device_put((q, k, v), place), LENGTHS)
    assert found.sharding.is_equivalent_to(place, 4)
    np.testing.assert_allclose(found, plain(q, k, v, LENGTHS), atol=1e-5)


def test_weights_sum_to_one_and_mix_to_what_attention_gives():
    q, k, v, _ = operands(5, 7, 4, "float32")
    weights = attention.weights(q, k, lengths=jnp.array([7, 2]))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert weights[0].min() > 0 and not weights[1, ..., 2:].any()
    mixed = attention.attend(q, k, v, lengths=jnp.array([7, 2]))
    np.testing.assert_allclose(
        jnp.einsum("bhnm,bhmk->bhnk", weights, v), mixed, atol=1e-6
    )


def test_rounded_logits_are_nowhere_float32():
    device = jax.sharding.AbstractDevice("gpu", None, "gpu")  # CPUs sum in float32.
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
    q, k, v, grad = operands(5, 7, 4, "bfloat16")

    def products(way):
        attend = functools.partial(attention.attend, implementation=way)
        pull = lambda *args: jax.vjp(attend, *args)[1](grad)
        with jax.sharding.use_abstract_mesh(mesh):
            text = str(jax.make_jaxpr(pull)(q, k, v)).replace(" ", "")
        return text.count(f"f32[{B},{H},5,7]=dot_general")

    assert (products("einsum"), products("einsum16")) == (2, 0)


RELATIVE = "model.posemb='relative'"
PLACE = {
    "platform": "cpu",
    "dtype": "bfloat16",
    "tokens": 197,
    "head_width": 64,
    "relative": "",
}


@pytest.mark.parametrize(
    ("place", "way"),
    [
        ({}, "einsum"),
        ({"platform": "tpu"}, "einsum16"),
        ({"platform": "tpu", "dtype": "float32"}, "einsum"),
        ({"platform": "tpu", "tokens": attention.SPLASH_TOKENS - 1}, "einsum16"),
        ({"platform": "tpu", "tokens": attention.SPLASH_TOKENS}, "splash"),
        ({"platform": "tpu", "tokens": 4097, "dtype": "float32"}, "einsum"),
        ({"platform": "tpu", "tokens": 4097, "relative": RELATIVE}, "einsum16"),
        ({"platform": "gpu"}, "cudnn"),
        ({"platform": "gpu", "dtype": "float32"}, "einsum"),
        ({"platform": "gpu", "head_width": 132}, "einsum16"),
        ({"platform": "gpu", "relative": RELATIVE}, "einsum16"),
    ],
)
def test_auto_is_the_fastest_that_the_place_allows(place, way):
    assert attention.choose("auto", **PLACE | place) == way
    if way in attention.NAMES:
        assert attention.choose(way, **PLACE | place) == way


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        ("cudnn", {}, "'cudnn' needs an NVIDIA GPU, but the platform is 'cpu'"),
        ("cudnn", {"platform": "gpu", "dtype": "float32"}, "needs .*'bfloat16', not"),
        (
            "cudnn",
            {"platform": "gpu", "head_width": 36},
            "features are a multiple of 8",
        ),
        (
            "cudnn",
            {"platform": "gpu", "relative": RELATIVE},
            "does not support .*'relative'",
        ),
        ("splash", {"platform": "gpu"}, "needs a TPU, but the platform is 'gpu'"),
        (
            "splash",
            {"platform": "tpu", "relative": RELATIVE},
            "does not support .*'relative'",
        ),
        ("flash", {}, "'flash' is unknown: choose one of auto, einsum, cudnn, splash"),
    ],
)
def test_impossible_choices_are_refused_with_a_remedy(name, place, message):
    with pytest.raises(UserError, match=message) as error:
        attention.choose(name, **PLACE | place)
    assert "\n" not in str(error.value)


def test_cudnn_is_what_a_gpu_is_given_for_odd_token_counts_too(monkeypatch):
    """Lowered for CUDA; which cuDNN there is cannot be asked here."""
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91_100
    )
    q, k, v, grad = operands(197, 197, 64, "bfloat16")

    def gradients(q, k, v):
        attend = functools.partial(attention.attend, implementation="cudnn")
        # What is kept, a kernel need not compute again.
        attend = jax.checkpoint(attend, policy=repetition.REMAT_POLICIES["attention"])
        value, pull = jax.vjp(attend, q, k, v)
        return value, pull(grad)

    traced = jax.jit(gradients).trace(q, k, v)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == 1
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert f"tensor<{B}x200x{H}x64xbf16>" in text


@pytest.mark.parametrize("name", ["full", "attention"])
def test_a_kernel_runs_again_only_if_its_result_was_not_kept(name):
    q, k, v, grad = operands(197, 197, 64, "bfloat16")

    def gradients(q, k, v):
        attend = functools.partial(attention.attend, implementation="splash")
        attend = jax.checkpoint(attend, policy=repetition.REMAT_POLICIES[name])
        value, pull = jax.vjp(attend, q, k, v)
        return value, pull(grad)

    lowered = jax.jit(gradients).trace(q, k, v).lower(lowering_platforms=("tpu",))
    forward = lowered.as_text().count('"splash_mha_fwd')
    assert forward == (2 if name == "full" else 1)


def test_tokens_are_padded_once_for_cudnn(monkeypatch):
    """The kernel is replaced by XLA's attention, which runs anywhere."""
    instead = functools.partial(attention.attend_cudnn, implementation="xla")
    monkeypatch.setattr(attention, "attend_cudnn", instead)
    x = jax.random.normal(jax.random.key(0), (B, 5, H * 8))
    angles = jax.random.normal(jax.random.key(1), (1, 5, 4))
    positions = attention.Positions(angles=angles)

    params = jax.jit(MultiHeadAttention(H).init)(jax.random.key(2), x, x)

    def attend(implementation, x):
        layer = MultiHeadAttention(H, "bfloat16", implementation)
        return layer.apply(params, x, x, positions).astype(jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradient(implementation, x):
        y, pull = jax.vjp(functools.partial(attend, implementation), x)
        return y, *pull(jnp.cos(y))

    results = [value_and_gradient(name, x) for name in ("cudnn", "einsum")]
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max())
    # Queries' and keys' tokens, which are the same here, and the angles.
    text = str(jax.make_jaxpr(functools.partial(attend, "cudnn"))(x))
    assert text.count("= pad[") == 3, text
