"""Scaled dot-product attention (arXiv:2010.11929, appendix A), by several ways.

One meaning, the plain softmax in float32; `choose` finds the way for a place.
"""

from jaxtyping import Array, Float, Int

from vit_jax.models.attention import cudnn, einsum
from vit_jax.models.attention.choice import NAMES, WAYS, choose
from vit_jax.models.attention.einsum import weights

__all__ = ["NAMES", "WAYS", "attend", "choose", "weights"]


def attend(
    query: Float[Array, "B H N K"],
    key: Float[Array, "B H M K"],
    value: Float[Array, "B H M K"],
    relative: Float[Array, "H R K"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    way: str = "einsum",
) -> Float[Array, "B H N K"]:
    """Mixes the values by the softmax of the scaled query-key products.

    Args:
      query, key, value: of each head. Head-major, because the same einsum over
        token-major ones takes four times as long on CPU.
      relative: a key for each offset of a query's place from a key's, from -(N - 1)
        to N - 1; its products with the query are added to the logits (arXiv:2010.11929,
        appendix D.4). Needs M = N and an einsum.
      lengths: of each image's keys, at least 1: those from there on are not looked at.
      way: one of WAYS.

    Returns:
      Mixed values.
    """
    if way in ("einsum", "einsum16"):
        return einsum.attend(query, key, value, relative, lengths, way == "einsum16")
    if relative is not None:
        raise ValueError(f"attention {way!r} knows no relative positions")
    if way == "cudnn":
        return cudnn.attend(query, key, value, lengths)
    # Not above: Pallas takes 0.2 s to import, and only TPUs run it.
    from vit_jax.models.attention import splash

    return splash.attend(query, key, value, lengths)
