"""A Vision Transformer written out plainly, as a reference: one image, one head a loop."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import models

TWO_HEADS = tuple(enumerate(("head", "head_dist")))  # Of DeiT, each on its own token.


def drawn(variant="B/4", *, scale, num_classes=5, **options):
    """Returns a model, parameters that all show, and two images of 8 x 12."""
    model = models.create(
        variant, num_classes=num_classes, image_size=(8, 12), **options
    )
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(3)
    leaves = [
        jnp.array(scale * rng.standard_normal(leaf.shape, np.float32))
        for leaf in leaves
    ]
    images = jnp.array(rng.standard_normal((2, 8, 12, 3), np.float32))
    return model, jax.tree.unflatten(tree, leaves), images


def forward(params, image, *, patch, num_heads, pool="token", added=None, epsilon=1e-6):
    """Runs a network with learned positions on one image.

    Args:
      params: as of `Model.init`, blocks one by one.
      image: (height, width, channels).
      patch, num_heads: of the network.
      pool: "token", "gap" or "map".
      added: (N, N) a head a block, added to the attention.

    Returns:
      Logits, [block][head] attention (N, N), and [block] tokens (N, D).
    """
    encoder = params["Transformer"]
    Y, X = image.shape[0] // patch, image.shape[1] // patch
    kernel = params["embedding"]["kernel"]
    x = [params[name][0, 0] for name in ("cls", "dist") if name in params]
    for i in range(Y * X):
        row, column = divmod(i, X)
        piece = image[
            row * patch : (row + 1) * patch, column * patch : (column + 1) * patch
        ]
        x.append(jnp.tensordot(piece, kernel, 3) + params["embedding"]["bias"])
    x = jnp.stack(x) + encoder["posembed_input"]["pos_embedding"][0]
    depth = sum(name.startswith("encoderblock_") for name in encoder)
    weights, tokens = [], []
    for i in range(depth):
        block = encoder[f"encoderblock_{i}"]
        y = norm(x, block["LayerNorm_0"], epsilon)
        extra = added[i] if added is not None else [0.0] * num_heads
        y, found = attend(y, y, block["MultiHeadDotProductAttention_1"], extra)
        x = x + y
        x = x + mlp(norm(x, block["LayerNorm_2"], epsilon), block["MlpBlock_3"])
        weights.append(found)
        tokens.append(x)
    x = norm(x, encoder["encoder_norm"], epsilon)
    if pool == "map":
        layer = params["MAPHead_0"]
        attention = layer["MultiHeadDotProductAttention_0"]
        x, _ = attend(layer["probe"][0], x, attention, [0.0] * num_heads)
        x = x + mlp(norm(x, layer["LayerNorm_0"], epsilon), layer["MlpBlock_0"])
    if "dist" in params:
        answers = [x[i] @ params[n]["kernel"] + params[n]["bias"] for i, n in TWO_HEADS]
        return sum(answers) / 2, weights, tokens
    x = x.mean(0) if pool == "gap" else x[0]  # Of attention pooling the only one.
    return x @ params["head"]["kernel"] + params["head"]["bias"], weights, tokens


def attend(x, context, params, added):
    """Returns what attention gives, and the weights of each head."""
    out, found = params["out"]["bias"][None], []
    for h, more in enumerate(added):
        q, k, v = (
            tokens @ params[name]["kernel"][:, h] + params[name]["bias"][h][None]
            for name, tokens in (("query", x), ("key", context), ("value", context))
        )
        weights = jax.nn.softmax(q @ k.T / q.shape[-1] ** 0.5) + more
        found.append(weights)
        out = out + weights @ v @ params["out"]["kernel"][h]
    return out, found


def norm(x, params, epsilon):
    """Normalises each token."""
    mean = x.mean(-1, keepdims=True)
    spread = jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + epsilon)
    return (x - mean) / spread * params["scale"][None] + params["bias"][None]


def mlp(x, params):
    """Transforms each token."""
    one, two = params["Dense_0"], params["Dense_1"]
    x = jax.nn.gelu(x @ one["kernel"] + one["bias"][None])
    return x @ two["kernel"] + two["bias"][None]
