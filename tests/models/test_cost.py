import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_but
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from vit_jax import models
from vit_jax.models import cost

TABLES = pathlib.Path(__file__).parent.parent / "golden" / "paper_tables.json"
JFT_IMAGES, JFT_CLASSES = 303_000_000, 18_291

VIT = {"width": 36, "depth": 2, "num_heads": 3, "mlp_dim": 52}
SMALL = {  # Every kind of unit, and more than one equal one.
    "vit": ("B/4", VIT),
    "map": (
        "B/4",
        VIT | {"pool": "map", "posemb": "relative", "posemb_placement": "shared"},
    ),
    "gated": (
        "B/4",
        VIT
        | {"activation": "swiglu", "num_register_tokens": 3, "layer_scale_init": 1.0},
    ),
    "hybrid": ("R50+B/16", VIT | {"stage_depths": (2, 1, 1), "stem_width": 32}),
    "resnet": ("R50x1", {"stage_depths": (2, 1), "stem_width": 32}),
}


def small(kind, **options):
    variant, numbers = SMALL[kind]
    return models.create(
        variant, num_classes=7, image_size=(32, 48), **numbers | options
    )


def shapes(model, batch=1):
    params = jax.eval_shape(model.init, jax.random.key(0))
    return params, jax.ShapeDtypeStruct((batch, *model.image_shape), jnp.float32)


def square(x):
    return x @ x


@pytest.mark.parametrize(
    ("equation", "left", "right", "expected"),
    [
        ("nk,km->nm", (3, 5), (5, 7), 3 * 5 * 7),
        ("bhnk,bhmk->bhnm", (2, 3, 5, 7), (2, 3, 11, 7), 2 * 3 * 5 * 7 * 11),
        ("nhk,hkd->nd", (5, 3, 7), (3, 7, 11), 5 * 3 * 7 * 11),
    ],
)
def test_matrix_product_counts_every_letter_once(equation, left, right, expected):
    product = lambda a, b: jnp.einsum(equation, a, b)
    assert cost.macs(product, jnp.ones(left), jnp.ones(right)) == expected


CONVOLUTIONS = {
    "strided": ((3, 5, 6, 4), {"window_strides": (2, 3), "padding": "SAME"}),
    "grouped": ((3, 2, 2, 9), {"padding": "SAME", "feature_group_count": 3}),
    "depthwise": ((5, 3, 1, 12), {"padding": "VALID", "feature_group_count": 6}),
    "dilated": ((3, 3, 6, 4), {"padding": [(4, 3), (-1, 2)], "rhs_dilation": (2, 3)}),
    "transposed": ((3, 4, 6, 5), {"padding": [(2, 1), (1, 3)], "lhs_dilation": (2, 3)}),
    "all": (
        (3, 2, 3, 4),
        {
            "window_strides": (2, 1),
            "padding": [(3, 1), (-1, 2)],
            "lhs_dilation": (3, 2),
            "rhs_dilation": (2, 3),
            "feature_group_count": 2,
        },
    ),
    "batch_groups": ((3, 3, 6, 4), {"padding": "SAME", "batch_group_count": 2}),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolution_counts_the_products_that_are_there(kind):
    kernel, options = CONVOLUTIONS[kind]
    options = {"window_strides": (1, 1)} | options
    conv = lambda x, w: lax.conv_general_dilated(
        x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )
    args = jnp.ones((2, 9, 11, 6)), jnp.ones(kernel)
    # Of ones with ones, an output is the number of its products.
    assert cost.macs(conv, *args) == conv(*args).sum()
    if kind != "batch_groups":  # Of which XLA counts each group with all inputs.
        xla = jax.jit(conv).lower(*args).cost_analysis()
        assert 2 * cost.macs(conv, *args) == xla["flops"]


def test_windows_are_counted_as_in_a_table_of_them_and_long_ones_take_no_memory():
    keys = {"side": 7, "taps": 4, "steps": 9, "before": 3}
    for stride, spread, dilation in itertools.product((1, 2, 3), repeat=3):
        place = np.add.outer(np.arange(9) * stride, np.arange(4) * dilation) - 3
        inside = (place >= 0) & (place <= 6 * spread) & (place % spread == 0)
        words = {"stride": stride, "spread": spread, "dilation": dilation}
        assert cost.window_products(**keys, **words) == inside.sum()
    long = 150_000  # One microbatch per image: a table of 168 GiB.
    assert cost.window_products(long, long, long, 1, long - 1, 1, 1) == (
        long * (long + 1) // 2
    )


def test_scan_counts_as_unrolled():
    def looped(x, unroll=False):
        if unroll:
            for _ in range(15):
                x = square(x)
            return x
        inner = lambda c, _: (lax.fori_loop(0, 5, lambda i, x: square(x), c), None)
        return lax.scan(inner, x, length=3)[0]

    x = jnp.ones((7, 7))
    assert cost.macs(looped, x) == cost.macs(lambda x: looped(x, True), x) == 15 * 7**3


def test_calls_count_once_and_conditions_as_their_largest_branch():
    @jax.custom_vjp
    def custom(x):
        return square(x)

    custom.defvjp(lambda x: (square(x), x), lambda x, g: (g @ x,))

    @jax.custom_jvp
    def other(x):
        return square(x)

    other.defjvp(lambda x, t: (square(x[0]), 2 * x[0] @ t[0]))

    x = jnp.ones((5, 5))
    for call in (jax.jit(square), jax.checkpoint(square), custom, other):
        assert cost.macs(call, x) == 5**3
    branches = [lambda x: x, lambda x: square(square(x)), square]
    assert cost.macs(lambda i, x: lax.switch(i, branches, x), 1, x) == 2 * 5**3


def test_while_loops_with_products_are_refused_and_others_count_nothing():
    def loop(body):
        return lambda x: lax.while_loop(lambda x: x.sum() < 9, body, x)

    x = jnp.ones((3, 3))
    assert cost.macs(loop(lambda x: x + 1), x) == 0
    with pytest.raises(ValueError, match="unbounded: the number of steps"):
        cost.macs(loop(square), x)


def test_what_cannot_be_seen_into_is_refused():
    def solve(x):
        return lax.custom_linear_solve(
            lambda y: x @ y, x[0], lambda matvec, b: matvec(b), symmetric=True
        )

    with pytest.raises(ValueError, match="custom_linear_solve: the number of times"):
        cost.macs(solve, jnp.ones((3, 3)))
    with pytest.raises(ValueError, match="ragged_dot.*cannot be counted"):
        cost.macs(
            lax.ragged_dot, jnp.ones((5, 3)), jnp.ones((2, 3, 7)), jnp.array([2, 3])
        )


def test_shard_map_counts_for_all_devices():
    mesh = jax.make_mesh((2, 3), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    rows = PartitionSpec(("a", "b"), None)
    product = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows
    )
    assert cost.macs(product, jnp.ones((12, 5)), jnp.ones((5, 7))) == 12 * 5 * 7


def test_forward_and_backward_pass_count_three_times_the_forward_pass():
    model = small("hybrid")
    params, images = shapes(model)
    loss = lambda params, x: model.apply(params, x)["logits"].sum()
    forward = cost.macs(loss, params, images)
    # All but the gradient of the images, which nobody asks for.
    both = cost.macs(jax.grad(loss, argnums=(0, 1)), params, images)
    assert both == 3 * forward
    assert 2 * forward < cost.macs(jax.grad(loss), params, images) < both


def test_macs_agree_with_xla_on_unrolled_models():
    model = small("hybrid")
    args = shapes(model, batch=8)
    macs = cost.macs(model.apply, *args)
    assert macs == 8 * cost.macs_per_image(model)
    flops = jax.jit(model.apply).lower(*args).compile().cost_analysis()["flops"]
    # XLA counts element-wise operations too, up to a tenth of such narrow models.
    assert 1 < flops / (2 * macs) < 1.1


def kept(model, *, traced):
    """Returns bytes by which what a pullback holds grows from 2 images to 3."""
    sizes = []
    for batch in (2, 3):
        args = shapes(model, batch)
        pullback = lambda p, x: jax.vjp(lambda p: model.apply(p, x)["logits"], p)[1]
        if traced:
            arrays = [v for v in jax.make_jaxpr(pullback)(*args).jaxpr.outvars]
            arrays = {id(v): v.aval for v in arrays}
        else:
            args = jax.tree.map(lambda s: jnp.ones(s.shape), args)
            arrays = {id(v): v for v in jax.tree.leaves(pullback(*args))}
        sizes.append(sum(v.size * v.dtype.itemsize for v in arrays.values()))
    return sizes[1] - sizes[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["map", "gated", "hybrid"])
def test_sharing_the_trace_of_equal_units_changes_nothing(kind):
    model = small(kind)
    assert cost.macs_per_image(model) == cost.macs(model.apply, *shapes(model))
    assert cost.activation_bytes(model) == kept(model, traced=True)


@pytest.mark.slow  # Compiles each operation by itself.
def test_activations_are_about_what_jax_holds_when_it_computes():
    # Without a trace, JAX keeps the LayerNorms' squares as well.
    model = small("vit", depth=1)
    assert 1 <= kept(model, traced=False) / cost.activation_bytes(model) < 1.1


@pytest.mark.slow
def test_activations_follow_the_dtype_and_the_dropout():
    model = small("vit")
    half = cost.activation_bytes(model, "bfloat16")
    assert half == cost.activation_bytes(small("vit", dtype="bfloat16"))
    # Statistics and the softmax stay float32.
    assert 0.5 < half / cost.activation_bytes(model) < 0.75
    assert cost.activation_bytes(small("vit", dtype="bfloat16"), "float32") == (
        cost.activation_bytes(model)
    )

    tokens, blocks = cost.tokens(model), VIT["depth"]
    masks = tokens * (VIT["width"] + blocks * (2 * VIT["width"] + VIT["mlp_dim"]))
    dropped = cost.activation_bytes(small("vit", dropout=0.1))
    assert dropped >= cost.activation_bytes(model) + masks
    assert cost.activation_bytes(small("vit", drop_path_rate=0.1)) > (
        cost.activation_bytes(model)
    )


def test_kernels_that_a_resnet_standardises_are_no_activations():
    narrow, wide = (
        cost.activation_bytes(small("resnet", stage_depths=(1,), stem_width=width))
        for width in (32, 64)
    )
    # Features double; the kernels between them would be four times as many.
    assert 1.9 < wide / narrow < 2


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("vit", {}, 8 * 12 + 1),
        ("vit", {"distillation": True}, 8 * 12 + 2),
        ("vit", {"pool": "gap"}, 8 * 12),
        ("vit", {"pool": "gap", "class_token": True}, 8 * 12 + 1),
        ("map", {}, 8 * 12),
        ("hybrid", {}, 2 * 3 + 1),
        ("resnet", {}, 0),
    ],
)
def test_tokens(kind, options, expected):
    assert cost.tokens(small(kind, **options)) == expected
    if "posemb" not in SMALL[kind][1] and expected:
        params, _ = shapes(small(kind, **options))
        embedding = params["Transformer"]["posembed_input"]["pos_embedding"]
        assert embedding.shape[1] == expected


def table6():
    table = json.loads(TABLES.read_text())["table6"]
    columns = [table["cols"].index(name) for name in ("name", "epochs", "exaFLOPs")]
    return [tuple(row[i] for i in columns) for row in table["rows"]]


@functools.cache
def exaflops_per_epoch(variant):
    model = models.create(variant, num_classes=JFT_CLASSES)
    return cost.training_exaflops(model, JFT_IMAGES)


@pytest.mark.parametrize(
    ("name", "epochs", "exaflops"),
    slow_but([("ViT-B/16", 7, 224), ("ResNet50x1", 7, 50)], table6()),
)
def test_exaflops_agree_with_table_6(name, epochs, exaflops):
    variant = name.replace("ViT-", "").replace("ResNet", "R")
    ours = exaflops_per_epoch(variant) * epochs
    # The farthest is R50x1+ViT-L/16 at 7 epochs, -3.1 %: the paper's 859 is not half
    # of its 1668 at 14. The others are within 2.5 %.
    bound = 0.05 if exaflops == 859 else 0.025
    assert ours == pytest.approx(exaflops, rel=bound)


def test_table_6_has_its_rows():
    assert len(table6()) == 18
