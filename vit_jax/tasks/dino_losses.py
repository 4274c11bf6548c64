"""Head and losses of DINO, DINOv2 and DINOv3.

The losses are functions of the outputs of student and teacher, in float32, as in
facebookresearch/dino (arXiv:2104.14294), dinov2 (arXiv:2304.07193) and dinov3
(arXiv:2508.10104). If a batch is split over devices, they are computed over the whole
batch. Letters: B images, G large crops, V all crops, N patches, M tokens, D width,
K outputs.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from vit_jax.models import initializers
from vit_jax.models.kernels import gelu_erf, product
from vit_jax.models.layers import Dense


class Head(nn.Module):
    """The projection head: an MLP of three layers, L2 norm, and a unit-norm layer.

    Attributes:
      hidden_dim: units of the two hidden layers.
      bottleneck_dim: width of the normalised features.
      num_outputs: number of outputs, K.
      free_gain: whether the norms of the last layer's weights are learnt; otherwise 1.
      weight_norm: whether the last layer's weights are divided by their norms.
      dtype: dtype of the matrix products; features are normalised in float32.
    """

    hidden_dim: int
    bottleneck_dim: int
    num_outputs: int
    free_gain: bool = False
    dtype: str = "float32"
    weight_norm: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B K"]:
        """Returns the outputs, float32."""
        sizes = self.hidden_dim, self.hidden_dim, self.bottleneck_dim
        for i, size in enumerate(sizes):
            x = gelu_erf(x) if i else x
            initial = initializers.TABLE["timm"].mlp.kernel
            dense = Dense(
                size, dtype=self.dtype, kernel_init=initial, name=f"Dense_{i}"
            )
            x = dense(x)
        x = unit(x)
        # DINO and DINOv2 add the weight norm after they have initialised the other
        # layers.
        last = (
            initializers.TORCH if self.weight_norm else initializers.TABLE["timm"].mlp
        )
        direction = self.param(
            "last_layer", last.kernel, (self.bottleneck_dim, self.num_outputs)
        )
        x = product(x.astype(self.dtype), direction.astype(self.dtype), "float32")
        if not self.weight_norm:
            return x
        # Divide after the product: on a CPU, XLA would fuse the division into it and
        # compute the norms again for each row of x.
        shape = (1,) * (x.ndim - 1) + (-1,)
        x = x / jnp.linalg.norm(direction, axis=0).reshape(shape)
        if self.free_gain:
            gain = self.param("gain", nn.initializers.ones, (self.num_outputs,))
            x = x * gain.reshape(shape)
        return x


def cross_entropies(
    logits: Float[Array, "B V K"],
    targets: Float[Array, "B G K"],
    small_weight: Array | float = 1.0,
) -> Float[Array, " B"]:
    """Returns the mean cross-entropy over all pairs of different crops of each image.

    Args:
      logits: student's outputs, divided by its temperature; the first G crops are the
        teacher's.
      targets: teacher's probabilities.
      small_weight: factor of the terms of small crops; the mean still divides by all
        terms.
    """
    V, G = logits.shape[1], targets.shape[1]
    weights = jnp.where(jnp.arange(V) < G, 1.0, small_weight)[None, :, None]
    log_probs = jax.nn.log_softmax(logits) * weights
    # The sum over all pairs is a product of sums; pairs of equal crops are subtracted.
    total = (log_probs.sum(1) * targets.sum(1)).sum(-1)
    equal = (log_probs[:, :G] * targets).sum((-2, -1))
    return (equal - total) / (G * (V - 1))


def centered(
    outputs: Float[Array, "*B K"],
    center: Float[Array, " K"],
    temperature: Array | float,
) -> Float[Array, "*B K"]:
    """Returns a teacher's probabilities from its centred outputs."""
    center = center.reshape((1,) * (outputs.ndim - 1) + (-1,))
    return jax.nn.softmax((outputs - center) / temperature)


@jax.named_scope("sinkhorn")
def sinkhorn_knopp(
    outputs: Float[Array, "M K"],
    temperature: Array | float,
    valid: Bool[Array, " M"] | None = None,
    rounds: int = 3,
) -> Float[Array, "M K"]:
    """Returns a teacher's probabilities, balanced to use all outputs equally.

    Rows and columns of exp(outputs / temperature) are scaled in turn (SwAV,
    arXiv:2006.09882), in logarithms to avoid overflow.

    Args:
      outputs: teacher's outputs for all crops of the batch.
      temperature: teacher's temperature.
      valid: rows that count; None for all. The other rows become 0.
      rounds: number of times that columns and rows are scaled.
    """
    M, K = outputs.shape
    rows = jnp.ones((M, 1), bool) if valid is None else valid[:, None]
    count = jnp.log(rows.sum().astype(jnp.float32))
    logs = outputs.astype(jnp.float32) / temperature
    for _ in range(rounds):
        columns = jax.nn.logsumexp(logs, axis=0, keepdims=True, where=rows)
        logs -= columns + math.log(K)
        logs -= jax.nn.logsumexp(logs, axis=1, keepdims=True) + count
    return jnp.where(rows, jnp.exp(logs + count), 0)


def patch_loss(
    logits: Float[Array, "M K"],
    targets: Float[Array, "M K"],
    weights: Float[Array, " M"],
) -> Float[Array, ""]:
    """Returns the weighted cross-entropy of masked patches (iBOT, arXiv:2111.07832).

    Args:
      logits: student's outputs for the patches, divided by its temperature.
      targets: teacher's probabilities for the same patches, unmasked.
      weights: 1 divided by the number of masked patches of the crop and by the number
        of crops; 0 for rows that are not masked patches.
    """
    losses = -(targets * jax.nn.log_softmax(logits)).sum(-1)
    return (losses * weights).sum()


def entropies(probabilities: Float[Array, "*B K"]) -> Float[Array, "*B"]:
    """Returns the entropies of distributions, in nats."""
    return -(probabilities * jnp.log(jnp.maximum(probabilities, 1e-30))).sum(-1)


@jax.named_scope("koleo")
def koleo(
    features: Float[Array, "B D"], group: int = 0, epsilon: float = 1e-8
) -> Float[Array, ""]:
    """Returns the mean negative logarithm of the distance to the nearest other image.

    This loss spreads the features of a batch (Kozachenko-Leonenko, arXiv:1806.03198).
    It is infinite for a single image.

    Args:
      features: class tokens.
      group: number of successive images among which the nearest one is searched for, at
        least 2, or 0 for all. If it does not divide B, the greatest common divisor of
        both is used.
      epsilon: number that is added to the distances.
    """
    x = unit(features, epsilon)
    x = x.reshape(-1, math.gcd(len(x), group), x.shape[-1])
    similar = (
        jax.lax.stop_gradient(x @ x.swapaxes(1, 2)) - 2 * jnp.eye(x.shape[1])[None]
    )
    nearest = jnp.take_along_axis(x, similar.argmax(2)[..., None], axis=1)
    distance = jnp.linalg.norm(x - nearest + epsilon, axis=-1)
    return -jnp.log(distance + epsilon).mean()


def gram(
    student: Float[Array, "B N D"], anchor: Float[Array, "B N D"]
) -> Float[Array, ""]:
    """Returns the mean squared difference of the similarities of an image's patches.

    Source: Gram anchoring (DINOv3, arXiv:2508.10104, section 4.2), within each image.

    Args:
      student: patches of the student.
      anchor: patches of an earlier teacher.
    """

    return similarity_errors(student, anchor).mean()


def similarity_errors(
    student: Float[Array, "B N D"], teacher: Float[Array, "B N E"]
) -> Float[Array, "B N"]:
    """Returns the mean squared differences of the similarities of tokens.

    Args:
      student, teacher: features of the same tokens, of any width.

    Returns:
      For each token the mean over its cosine similarities to all N tokens.
    """

    def similarities(x):
        x = unit(x)
        return x @ x.swapaxes(1, 2)

    return jnp.square(similarities(student) - similarities(teacher)).mean(-1)


def unit(x: Float[Array, "*B D"], least: float = 1e-12) -> Float[Array, "*B D"]:
    """Divides vectors by their norms, or by `least` if that is larger, in float32."""
    x = x.astype(jnp.float32)
    # The bound is inside the root, whose derivative at 0 is infinite: a masked patch is
    # 0 if stochastic depth drops every branch of a small network without positions.
    square = jnp.square(x).sum(-1, keepdims=True)
    return x / jnp.sqrt(jnp.maximum(square, least**2))
