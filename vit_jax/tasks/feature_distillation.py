"""Distillation of features: a student predicts the features of frozen teachers.

No labels are read. The student learns from the feature vector of each image and from
its patches, as in AM-RADIO (arXiv:2312.06709): a projector for each teacher, which is
not exported, maps the student's features to the teacher's width. Teachers may have
another patch size, width, image size and normalisation. Letters: B images, Y by X
pixels, C channels, y by x patches of the student, N patches, D width of the student, E
of a teacher.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.models import Model, cost, initializers, vector_and_patches
from vit_jax.models.kernels import gelu_erf
from vit_jax.models.layers import Dense, LayerNorm
from vit_jax.tasks.dino_losses import similarity_errors, unit
from vit_jax.tasks.masking import check_unlabelled
from vit_jax.tasks.task import ImageTask, TaskConfig, Tree, check_features
from vit_jax.tasks.teacher import UNTRAINED, Teacher, resize_grids, untrained

VECTOR, PATCHES = "vector", "patches"
_PATCH = "patch_"  # Prefix of the losses of patches.
_RELATIONAL = "relational"  # The loss over several images, unless of patches.


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureDistillationConfig(TaskConfig):
    """Distillation of features: images without labels, and frozen teachers."""

    name: str = key("feature_distillation", "Task to train.")
    teachers: tuple[str, ...] = key(
        (),
        "Weights of the teachers, each in any form that `init.checkpoint` accepts. They "
        "are read when a run begins; the checkpoints of the run contain copies. "
        '"untrained" is the student\'s network with random parameters, for trying a '
        "config.",
        like=("",),
    )
    teacher_weights: tuple[float, ...] = key(
        (),
        "Factors of the losses of each teacher; () is 1 for all.",
        reason="several teachers that are not equally important (arXiv:2312.06709)",
        like=(1.0,),
    )
    image_sizes: tuple[int, ...] = key(
        (),
        "Side in pixels of the square images that each teacher gets; 0 is the size of its "
        "weights, () is 0 for all. The student's images are resized to it.",
        like=(0,),
    )
    cosine_weight: float = key(
        1.0,
        "Weight of the cosine loss of the feature vectors, 1 minus the cosine of the "
        "angle between student and teacher.",
    )
    smooth_l1_weight: float = key(
        0.0,
        "Weight of the smooth L1 loss of the feature vectors, which also learns their "
        "lengths.",
        reason="students whose features replace those of the teacher",
    )
    relational_weight: float = key(
        0.0,
        "Weight of the relational loss of the feature vectors: the mean squared "
        "difference of their cosine similarities within the batch. It acts on the "
        "student's features without a projector.",
        reason="learning which images are similar (arXiv:1907.09682)",
    )
    patch_cosine_weight: float = key(
        0.9, "Weight of the cosine loss of the patches; 0 is off."
    )
    patch_smooth_l1_weight: float = key(
        0.1, "Weight of the smooth L1 loss of the patches; 0 is off."
    )
    patch_relational_weight: float = key(
        0.0,
        "Weight of the relational loss of the patches: the mean squared difference of "
        "their cosine similarities within each image, without a projector.",
        reason="dense features, as DINOv3's Gram anchoring (arXiv:2508.10104)",
    )
    standardize: bool = key(
        False,
        "Subtract the mean over the features of a teacher's vector or patch, and divide "
        "by their standard deviation.",
        reason="smooth L1 losses of teachers whose features have different lengths",
    )
    projector: str = key(
        "mlp",
        'Projector from the student to a teacher: "linear", one layer; or "mlp", two '
        "layers with a LayerNorm and a GELU between them.",
        choices=("linear", "mlp"),
    )
    projector_dim: int = key(
        0,
        "Hidden units of the projectors; 0 is the width of the student.",
        reason="teachers that are much wider than the student",
        only_if={"projector": ("mlp",)},
    )

    def __post_init__(self):
        if not self.teachers:
            return
        for name in ("teacher_weights", "image_sizes"):
            given = getattr(self, name)
            if given and len(given) != len(self.teachers):
                raise UserError(
                    f"task.{name}={given} has {len(given)} numbers: give one for each of "
                    f"the {len(self.teachers)} teachers of task.teachers"
                )
        if not any(self.weights.values()):
            raise UserError(
                "all weights of losses of task.name='feature_distillation' are 0: set "
                "task.cosine_weight, or another one"
            )

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the losses that are not 0, by the names of their metrics."""
        weights = {
            "cosine": self.cosine_weight,
            "smooth_l1": self.smooth_l1_weight,
            "relational": self.relational_weight,
            "patch_cosine": self.patch_cosine_weight,
            "patch_smooth_l1": self.patch_smooth_l1_weight,
            "patch_relational": self.patch_relational_weight,
        }
        return {name: weight for name, weight in weights.items() if weight}

    @property
    def needs_all_patches(self) -> bool:
        """Whether a loss needs every patch, so that the network must not drop any."""
        return any(name.startswith(_PATCH) for name in self.weights)

    def build(self, model, data, run, saved=None) -> "FeatureDistillation":
        return FeatureDistillation(self, model, data, saved)


class Projector(nn.Module):
    """Maps features of the student to the width of a teacher.

    Attributes:
      outputs: width of the teacher, E.
      hidden_dim: hidden units; 0 for a single linear layer.
      dtype: dtype of the matrix products.
    """

    outputs: int
    hidden_dim: int
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B E"]:
        """Returns projected features, float32."""
        kernel = initializers.TABLE["timm"].mlp.kernel
        dense = functools.partial(Dense, dtype=self.dtype, kernel_init=kernel)
        if self.hidden_dim:
            x = dense(self.hidden_dim, name="Dense_0")(x)
            x = gelu_erf(LayerNorm(dtype=self.dtype, name="LayerNorm_0")(x))
        return dense(self.outputs, name="out")(x).astype(jnp.float32)


class FeatureDistillation(ImageTask):
    """The task; the parameters are "network" and, unless unused, "projectors".

    `extra` holds the parameters of the teachers, "teacher_0" and so on. The projectors
    are "projectors/0/vector", "projectors/0/patches" and so on. If `saved` is given,
    see `TaskConfig.build`, the teachers' files are not read.

    A teacher's patches are resized to the student's grid, because targets have no
    backward pass, and every patch of the student then has one target.

    Raises:
      UserError: the data has classes, no teacher is set, or a teacher or the student
        does not return what a loss needs.
    """

    def __init__(
        self,
        config: FeatureDistillationConfig,
        model: Model,
        data: DataConfig,
        saved: dict | None = None,
    ):
        check_unlabelled(config.name, data)
        super().__init__(model, data)
        if not config.teachers:
            raise UserError(
                "task.teachers=(): give the weights of at least one teacher, in any form "
                "for init.checkpoint"
            )
        self.config = config
        self._needs_patches = config.needs_all_patches
        # Computed here, because within a step images are split over the devices.
        self._shapes = self._check("the student", model)
        descriptions = saved["teachers"] if saved else [None] * len(config.teachers)
        sizes = config.image_sizes or (0,) * len(config.teachers)
        # In the student's dtype, because a large teacher costs more than the student.
        dtypes = {name: model.options[name] for name in ("dtype", "matmul_dtype")}
        self.teachers, self._projectors = [], []
        for name, about, side in zip(config.teachers, descriptions, sizes, strict=True):
            if name == UNTRAINED:
                about = untrained(model)
            size = (side, side) if side else None
            teacher = Teacher(
                "task.teachers", name, model, data, about, image_size=size, **dtypes
            )
            shapes = self._check(teacher.where, teacher.network)
            self.teachers.append(teacher)
            self._projectors.append(self._projectors_to(shapes))
        self._weights = config.teacher_weights or (1.0,) * len(config.teachers)
        self.notes = sum((teacher.notes for teacher in self.teachers), ())

    def _check(self, who: str, model: Model) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a network's features of one image.

        Raises:
          UserError: the network does not return the features of the losses.
        """
        check_features(model, self.config.name)
        if self._needs_patches and not model.has_patch_features:
            raise UserError(
                f"{who} returns no patches: set task.patch_cosine_weight, "
                "task.patch_smooth_l1_weight and task.patch_relational_weight to 0"
            )
        images = jax.ShapeDtypeStruct((1, *model.image_shape), jnp.float32)
        compute = lambda params, images: self._features(model, params, images)
        features = jax.eval_shape(compute, model.shapes, images)
        shapes = {name: value.shape for name, value in features.items()}
        if len(shapes[VECTOR]) != 2:
            raise UserError(
                f"{who} returns {shapes[VECTOR][1]} feature vectors for each image: choose "
                "a network with one, such as one with model.pool='token'"
            )
        return shapes

    def _projectors_to(self, teacher: dict) -> dict[str, Projector]:
        """Returns the projectors to a teacher with these shapes of features."""
        both = map(_kind_and_place, self.config.weights)
        places = {place for kind, place in both if kind != _RELATIONAL}
        config, projectors = self.config, {}
        for place in sorted(places):
            hidden = config.projector_dim or self._shapes[place][-1]
            projectors[place] = Projector(
                teacher[place][-1],
                hidden if config.projector == "mlp" else 0,
                self.model.options["dtype"],
            )
        return projectors

    @property
    def coupled(self):
        of_batch = _RELATIONAL in self.config.weights
        return super().coupled + (("the relational loss",) if of_batch else ())

    def metadata(self) -> dict:
        return {"teachers": [teacher.about for teacher in self.teachers]}

    def init(self, rng):
        network_key, projector_key, teacher_key = jax.random.split(rng, 3)
        params = {"network": self.model.init(network_key)}
        projectors = {}
        for i, by_place in enumerate(self._projectors):
            for place, projector in by_place.items():
                number = 2 * i + (place == PATCHES)
                drawn = projector.init(
                    jax.random.fold_in(projector_key, number),
                    jnp.zeros((1, self._shapes[place][-1])),
                )
                projectors.setdefault(str(i), {})[place] = drawn["params"]
        if projectors:
            params["projectors"] = projectors
        keys = jax.random.split(teacher_key, len(self.teachers))
        extra = {_entry(i): t.init(keys[i]) for i, t in enumerate(self.teachers)}
        return params, extra

    def load(self) -> Tree:
        return {
            _entry(i): teacher.load()
            for i, teacher in enumerate(self.teachers)
            if not teacher.about.get(UNTRAINED)
        }

    def backbone(self, params, extra):
        return params["network"]

    def loss(self, params, extra, batch, rng):
        losses, of_teachers = self.losses(params, extra, batch["image"], rng)
        metrics = {f"{name}_loss": value.mean() for name, value in losses.items()}
        weights = self.config.weights
        loss = sum(w * metrics[f"{name}_loss"] for name, w in weights.items())
        if len(self.teachers) > 1:
            for i, value in enumerate(of_teachers):
                metrics[f"teacher_{i}_loss"] = value.mean()
        return loss, ({"loss": loss, **metrics}, None)

    def held_out_metrics(self, params, extra, batch, rng):
        """Returns the losses of each image.

        The relational loss of the vectors, which is one of several images, is left out,
        also in "loss".
        """
        losses, _ = self.losses(params, extra, batch["image"], None)
        losses.pop(_RELATIONAL, None)
        metrics = {f"{name}_loss": value for name, value in losses.items()}
        if losses:
            weights = self.config.weights
            metrics["loss"] = sum(weights[k] * value for k, value in losses.items())
        return metrics

    def losses(
        self,
        params: dict,
        extra: dict,
        images: Float[Array, "B Y X C"],
        rng: jax.Array | None,
    ) -> tuple[dict[str, Float[Array, " B"]], list[Float[Array, " B"]]]:
        """Computes the losses of each image.

        Args:
          params, extra: training state.
          images: normalised images.
          rng: random key of the student's dropout; None turns it off.

        Returns:
          Losses by their names in `config.weights`, summed over the teachers with their
          weights; and the weighted sum of the losses of each teacher.
        """
        inputs = images.astype(self.model.options["dtype"])
        student = self._features(self.model, params["network"], inputs, rng)
        losses, of_teachers = {}, []
        for i, (teacher, weight) in enumerate(
            zip(self.teachers, self._weights, strict=True)
        ):
            targets = self._targets(teacher, extra[_entry(i)], images)
            with self.model.config.matmul_precision():
                projected = {
                    place: projector.apply(
                        {"params": params["projectors"][str(i)][place]}, student[place]
                    )
                    for place, projector in self._projectors[i].items()
                }
            total = 0.0
            for name, weight_of_loss in self.config.weights.items():
                kind, place = _kind_and_place(name)
                given = student if kind == _RELATIONAL else projected
                value = _losses_of_images(name, given[place], targets[place])
                losses[name] = losses.get(name, 0.0) + weight * value
                total = total + weight_of_loss * value
            of_teachers.append(total)
        return losses, of_teachers

    def _targets(
        self, teacher: Teacher, params: dict, images: Float[Array, "B Y X C"]
    ) -> dict[str, Array]:
        """Returns the features of a teacher, its patches on the student's grid."""
        dtype = teacher.network.options["dtype"]
        images = teacher.images(images.astype(jnp.float32)).astype(dtype)
        features = self._features(teacher.network, params, images)
        if PATCHES in features:
            grid = self._shapes[PATCHES][1:3]
            features[PATCHES] = resize_grids(features[PATCHES], grid, "bilinear")
        if self.config.standardize:
            features = {
                name: jax.nn.standardize(value) for name, value in features.items()
            }
        return jax.lax.stop_gradient(features)

    def _features(
        self,
        model: Model,
        params: dict,
        images: Float[Array, "B Y X C"],
        key: jax.Array | None = None,
    ) -> dict[str, Array]:
        """Returns vectors (B, D) and, if a loss needs them, patches (B, y, x, D)."""
        if self._needs_patches:
            return vector_and_patches.compute(model, params, images, key=key)._asdict()
        train = key is not None
        outputs = model.apply(params, images, train=train, key=key)
        return {VECTOR: outputs["pre_logits"]}

    def training_flops(self):
        """Returns the operations per image; the teachers have no backward pass."""
        student = super().training_flops()
        teachers = [cost.forward_flops(teacher.network) for teacher in self.teachers]
        if None in (student, *teachers):
            return None
        params, _ = jax.eval_shape(self.init, jax.random.key(0))
        products = 0
        for by_place in params.get("projectors", {}).values():
            for place, projector in by_place.items():
                tokens = math.prod(self._shapes[place][1:-1])
                kernels = [x for x in jax.tree.leaves(projector) if x.ndim == 2]
                products += tokens * sum(kernel.size for kernel in kernels)
        return student + sum(teachers) + 3 * 2 * products


def _entry(number: int) -> str:
    """Returns the name of a teacher's parameters in `extra`."""
    return f"teacher_{number}"


def _kind_and_place(name: str) -> tuple[str, str]:
    """Returns the key in `LOSSES` of a loss, and whether it is of vectors or patches."""
    kind = name.removeprefix(_PATCH)
    return kind, VECTOR if kind == name else PATCHES


def _losses_of_images(
    name: str, student: Float[Array, "B ... E"], teacher: Float[Array, "B ... F"]
) -> Float[Array, " B"]:
    """Returns a loss of each image.

    Args:
      name: name of the loss in `FeatureDistillationConfig.weights`.
      student, teacher: vectors (B, E), or patches (B, y, x, E); of one width unless the
        loss is relational.
    """
    kind, _ = _kind_and_place(name)
    compute = LOSSES[kind]
    if name == _RELATIONAL:  # The tokens are the images of the batch.
        return compute(student[None], teacher[None])[0]
    tokens = lambda x: x.reshape(len(x), -1, x.shape[-1])
    return compute(tokens(student), tokens(teacher)).mean(1)


def cosine(
    student: Float[Array, "B N E"], teacher: Float[Array, "B N E"]
) -> Float[Array, "B N"]:
    """Returns 1 minus the cosines of the angles between features."""
    return 1 - (unit(student) * unit(teacher)).sum(-1)


def smooth_l1(
    student: Float[Array, "B N E"], teacher: Float[Array, "B N E"]
) -> Float[Array, "B N"]:
    """Returns the means over the features of |d| - 0.5, or of d^2 / 2 if |d| < 1."""
    return optax.losses.huber_loss(student, teacher).mean(-1)


LOSSES: dict[str, Callable] = {
    "cosine": cosine,
    "smooth_l1": smooth_l1,
    _RELATIONAL: similarity_errors,
}
