"""Teachers: frozen networks that a student learns from.

A teacher's weights are read when a run begins. The checkpoints of the run contain a
copy of them, and a description from which a resumed run builds the network without the
file. Letters: B images, Y by X pixels, H by W pixels of the teacher's images, C
channels.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax import models
from vit_jax.command_line.printing import masked
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.models import Model, resizing
from vit_jax.tasks.task import Tree

if TYPE_CHECKING:
    from vit_jax.weights.pretrained import Pretrained

# Entry of a description whose network keeps its random initial values.
UNTRAINED = "untrained"


class Teacher:
    """A frozen network, which gets the student's images in the teacher's normalisation.

    Args:
      key: config key that names the weights, for messages, such as "task.teacher".
      weights: weights in any form that `init.checkpoint` accepts.
      student: network of the student, whose platform is used.
      data: `config.data`.
      saved: `about` from the checkpoint of a run that resumes; None reads the weights.
      image_size: height and width of the teacher's images; None for those of its
        weights.
      **options: keys of the network that replace those of the weights, such as `dtype`.

    Attributes:
      where: key and weights, for messages.
      about: description of the network and its preprocessing, stored as JSON.
      network: the network at `image_size`.
      notes: lines for the log.

    Raises:
      UserError: the weights cannot be read, are for images of another number of
        channels, or do not fit the image size.
    """

    def __init__(
        self,
        key: str,
        weights: str,
        student: Model,
        data: DataConfig,
        saved: dict | None = None,
        *,
        image_size: tuple[int, int] | None = None,
        **options: object,
    ):
        self._key, self._weights = key, weights
        self.where = f"{key}={masked(weights)!r}"
        self.about, self._data = saved or _describe(self.pretrained), data
        channels = self.about["options"]["channels"]
        if channels != data.channels:
            raise UserError(
                f"{self.where} has channels={channels}, but data.channels="
                f"{data.channels}: choose another teacher"
            )
        # The student's platform, which vit_jax.compile sets to that of another machine.
        platform = {"platform": student.options.get("platform")}
        self._stored = models.create(**self.about["options"] | platform | options)
        self.network = self._stored
        if image_size and image_size != self._stored.image_shape[:2]:
            self.network = self._at_size(image_size)

    def _at_size(self, image_size: tuple[int, int]) -> Model:
        config = self._stored.config
        multiple = config.side_multiple or config.patch_size
        if any(side % multiple for side in image_size):
            raise UserError(
                f"{self.where} for images of {image_size}: the sides must be multiples of "
                f"its patch size {multiple}: change the size"
            )
        network = self._stored.at_size(image_size)
        self._stored.check_sizes(network)
        return network

    @functools.cached_property
    def pretrained(self) -> "Pretrained":
        """The weights, read from their file on first use."""
        # Imported here because it is large, and a resumed run does not need it.
        from vit_jax.weights import open_pretrained

        try:
            return open_pretrained(self._weights)
        except UserError as error:
            raise UserError(f"{self._key}: {error}") from error

    @property
    def notes(self) -> tuple[str, ...]:
        if self.about["normalization"] or self.about.get(UNTRAINED):
            return ()
        mean, std = self._data.mean, self._data.std
        line = (
            f"{self.where} does not record its normalisation: data.mean={mean} and "
            f"data.std={std} are used"
        )
        return (line,)

    def init(self, rng: jax.Array) -> Tree:
        """Returns placeholders for the parameters, or the values of an untrained one."""
        if self.about.get(UNTRAINED):
            return self.network.init(rng)
        zeros = lambda shape: jnp.zeros(shape.shape, shape.dtype)
        return jax.tree.map(zeros, self.network.shapes)

    def load(self) -> Tree:
        """Returns the parameters from the file, resized to the teacher's images."""
        if self.network is self._stored:
            return self.pretrained.params
        return self.network.resize(self.pretrained.params, self._stored)

    def images(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B H W C"]:
        """Converts normalised images of the student to those of the teacher.

        The normalisation is exchanged. Images of another size are resized to the
        teacher's, whatever their aspect ratio, by the filter of the teacher's
        preprocessing if that is bicubic, otherwise bilinear; both are antialiased.
        """
        size = self.network.image_shape[:2]
        if images.shape[1:3] != size:
            method = "bilinear"
            if self.about.get("interpolation") == "bicubic":
                method = "bicubic"
            images = resize_grids(images, size, method)
        wanted, data = self.about["normalization"], self._data
        if wanted is None:
            return images
        # Mean and deviation are a number, or a number per channel.
        mean, std = np.asarray(data.mean), np.asarray(data.std)
        scale = (std / wanted["std"]).astype(np.float32).reshape(1, 1, 1, -1)
        shift = (mean - wanted["mean"]) / wanted["std"]
        shift = shift.astype(np.float32).reshape(1, 1, 1, -1)
        return images * scale + shift


def resize_grids(
    grids: Float[Array, "B Y X D"], size: tuple[int, int], method: str
) -> Float[Array, "B H W D"]:
    """Resizes images or patches by a method of `resizing.RESIZE_METHODS`."""
    if grids.shape[1:3] == size:
        return grids
    resize = lambda grid: resizing.resize_grid(grid, size, method)
    return jax.vmap(resize)(grids)


def untrained(student: Model) -> dict:
    """Describes a teacher with the student's network and random initial parameters."""
    options = {k: v for k, v in student.options.items() if k != "platform"}
    return {"options": options, "normalization": None, UNTRAINED: True}


def _describe(pretrained: "Pretrained") -> Mapping:
    """Describes a teacher, so that a resumed run can build its network."""
    how = pretrained.preprocess
    return {
        "options": pretrained.options,
        "normalization": how and {"mean": how.mean, "std": how.std},
        "interpolation": how and how.interpolation,
        "loss": pretrained.loss,
    }
