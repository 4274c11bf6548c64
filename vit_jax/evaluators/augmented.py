"""Test-time augmentation: a network whose answers are averaged over views of an image.

Letters: B images, L classes.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.models import Model, Params

# A view is the position of its crop, as fractions of the free space, and a mirroring.
_CENTRE = (0.5, 0.5)
_FIVE = (_CENTRE, (0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0))
VIEWS = {
    "flip": tuple((_CENTRE, mirrored) for mirrored in (False, True)),
    "five_crops": tuple((place, False) for place in _FIVE),
    "ten_crops": tuple(
        (place, mirrored) for mirrored in (False, True) for place in _FIVE
    ),
}
_PART = 0.875  # Largest side of a crop, as a fraction of the image's side.


@dataclasses.dataclass(frozen=True)
class AugmentedModel(Model):
    """A network that averages its answers over several views; it cannot be trained.

    `crop` is the height and width of a view in pixels. With `sigmoid` each class has an
    independent probability, otherwise they share a softmax; None is for numbers, whose
    mean is computed.
    """

    views: str = "flip"
    crop: tuple[int, int] = (0, 0)
    sigmoid: bool | None = False

    def apply(
        self,
        params: Params,
        images: jax.Array,
        *,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Returns the logits of the mean probabilities over the views, and the mean "pre_logits".

        The arguments are those of `Model.apply`.
        """
        answers = [
            super(AugmentedModel, self).apply(params, view)
            for view in self._cut(images)
        ]
        outputs = {name: [each[name] for each in answers] for name in answers[0]}
        means = {name: jnp.mean(jnp.stack(each), 0) for name, each in outputs.items()}
        if "logits" in outputs and self.sigmoid is not None:
            means["logits"] = self._combine(jnp.stack(outputs["logits"]))
        return means

    def layer_features(
        self,
        params: Params,
        images: jax.Array,
        layers: Sequence[int] = (-1,),
        **options: object,
    ) -> tuple[jax.Array, ...]:
        """Returns the mean features over the views, see `Model.layer_features`."""
        answers = [
            super(AugmentedModel, self).layer_features(params, view, layers, **options)
            for view in self._cut(images)
        ]
        return tuple(jnp.mean(jnp.stack(each), 0) for each in zip(*answers))

    def _cut(self, images: jax.Array) -> list[jax.Array]:
        height, width = self.crop
        free = images.shape[1] - height, images.shape[2] - width
        views = []
        for place, mirrored in VIEWS[self.views]:
            top, left = (
                int(part * rest) for part, rest in zip(place, free, strict=True)
            )
            view = images[:, top : top + height, left : left + width]
            views.append(view[:, :, ::-1] if mirrored else view)
        return views

    def _combine(self, logits: jax.Array) -> jax.Array:
        """Returns the logits of the mean probabilities of (views, B, L)."""
        count = math.log(logits.shape[0])
        if self.sigmoid:
            there, not_there = (
                jax.nn.logsumexp(jax.nn.log_sigmoid(sign * logits), axis=0)
                for sign in (1, -1)
            )
            return there - not_there
        return jax.nn.logsumexp(jax.nn.log_softmax(logits), axis=0) - count


def augment(
    model: Model, preprocess: Preprocess, views: str, *, sigmoid: bool | None
) -> tuple[Model, Preprocess]:
    """Returns a network that answers for several views, and its preprocessing.

    Crops are cut from a larger image. Their side is 7/8 of the image's, or the
    `crop_fraction` of the weights if that is smaller. Returns `model` and `preprocess`
    unchanged if `views` is "".
    """
    if not views:
        return model, preprocess
    if preprocess.max_tokens:
        raise UserError(
            f"max_tokens={preprocess.max_tokens} with views {views!r}, which have one "
            "size: leave one of them out"
        )
    crop = tuple(preprocess.image_size)
    if views != "flip":
        part = min(preprocess.crop_fraction, _PART)
        larger = tuple(round(side / part) for side in crop)
        preprocess = preprocess.without_transform().replace(
            image_size=larger, crop_fraction=1.0, cut=(0, 0)
        )
    values = {
        field.name: getattr(model, field.name) for field in dataclasses.fields(Model)
    }
    values["image_shape"] = (*preprocess.image_size, model.image_shape[-1])
    augmented = AugmentedModel(**values, views=views, crop=crop, sigmoid=sigmoid)
    return augmented, preprocess
