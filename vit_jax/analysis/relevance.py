"""Which tokens led to a class, by gradient times attention (arXiv:2103.15679).

Letters: B images, N tokens, Y by X pixels, C channels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vit_jax.models import Model, Params


def relevance(
    model: Model,
    params: Params,
    images: Float[Array, "B Y X C"],
    classes: Int[Array, " B"],
) -> Float[Array, "B N"]:
    """Returns how much each token spoke for a class.

    Every layer adds to a token's relevance what it drew from tokens of the layer below:
    attention times its gradient with respect to the class's logit, where that is
    positive, the mean of the heads (Chefer et al., arXiv:2103.15679, equations 5 and 6).
    One row of that product is wanted, what the classifier looks at, so it is followed
    from the last layer down, with one layer's attention in memory.

    Args:
      model: with attention and a classifier.
      params: its parameters, in either layout.
      images: normalised.
      classes: one an image, from 0.

    Returns:
      Relevance, 0 or more: of tokens in front of the patches too. What the classifier
      looks at directly (the class token; with a mean of the patches all of them alike)
      has its own share in it.

    Raises:
      UserError: no attention, no classifier of whole images, or no such class.
    """
    row, pulls = model.gradients(params, images, classes)
    for pull in pulls:
        row = _down(row, pull.attention, pull.gradient)
        del pull  # Before the next layer's arrays are there.
    return row


@jax.jit
def _down(row, attention, gradient):
    drawn = jax.nn.relu(attention * gradient).mean(1)
    return row + jnp.einsum("bn,bnm->bm", row, drawn, precision="highest")
