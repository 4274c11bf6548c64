"""DINO (arXiv:2104.14294): a student predicts the outputs of its moving average.

The moving average, the teacher, gets two large crops of each image; the student gets
these and small crops, and predicts the teacher's outputs for every other crop, as in
facebookresearch/dino. Letters: B images, G large and S small crops per image, V = G +
S, Y by X pixels, C channels, D width, K outputs.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.models import Model, cost, stacking
from vit_jax.tasks.crops import NUM_LARGE, Crops, CropSizes, corner_crops
from vit_jax.tasks.dino_losses import Head, centered, cross_entropies, entropies
from vit_jax.tasks.masking import check_unlabelled
from vit_jax.tasks.task import Batch, Task, TaskConfig, feature_width

_LOGS = 5  # Consecutive logs after which a collapse is reported.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DinoConfig(TaskConfig):
    """DINO: predicts the outputs of a moving average of the network."""

    averages_network: ClassVar[bool] = False

    name: str = key("dino", "Task to train.")
    num_outputs: int = key(
        65_536, "Number of outputs of the head (prototypes).", at_least=2
    )
    hidden_dim: int = key(2_048, "Hidden units of the MLP of the head.", at_least=1)
    bottleneck_dim: int = key(
        256, "Number of features before the last layer of the head.", at_least=1
    )
    free_gain: bool = key(
        False,
        "Learn the norms of the weights in the head's last layer; otherwise all are 1.",
    )
    student_temperature: float = key(
        0.1, "Temperature of the student's softmax.", above=0
    )
    teacher_temperature: float = key(
        0.04, "Temperature of the teacher's softmax after the warmup.", above=0
    )
    teacher_temperature_start: float = key(
        0.04,
        "Temperature of the teacher's softmax at the start of the linear warmup.",
        above=0,
    )
    teacher_temperature_epochs: int = key(
        0,
        "Length of the warmup of the teacher's temperature in epochs; the temperature "
        "changes once per epoch.",
    )
    teacher_momentum: float = key(
        0.996,
        "Momentum of the teacher in the first step; it rises to 1 along half a cosine.",
        at_most=1,
    )
    center_momentum: float = key(
        0.9,
        "Momentum of the running mean that centres the teacher's outputs.",
        at_most=1,
    )
    large_transforms: tuple[str, ...] = key(
        ("", ""),
        "Transforms on the device for the first and the second large crop, written as "
        "in `data.train_transform`.",
    )
    small_transform: str = key(
        "",
        "Transforms on the device for small crops, written as in "
        "`data.train_transform`.",
    )
    start_from_teacher: bool = key(
        False,
        "If the run starts from another run (`init`), begin with that run's teacher as "
        "the student. This always happens if the student there has parameters of other "
        "shapes.",
    )

    def __post_init__(self):
        if len(self.large_transforms) != NUM_LARGE:
            raise UserError(
                f"task.large_transforms={self.large_transforms} must be {NUM_LARGE} "
                "lines, one for each large crop"
            )

    def build(self, model, data, run, saved=None) -> "Dino":
        return Dino(self, model, data, run)


class Dino(Task):
    """The DINO task; the parameters are the student's "network" and "head".

    `extra` holds the teacher, the centre of its outputs and the number of steps. The
    network that is evaluated and exported is the teacher's.

    Raises:
      UserError: the data has classes, no crops, or crops that patches do not divide; or
        the network returns no features.
    """

    # Another run that starts from this one reads them.
    statistics = ("teacher", "center")
    trained = "network"

    def __init__(
        self, config: DinoConfig, model: Model, data: DataConfig, run: RunLength
    ):
        check_unlabelled(config.name, data)
        self._width = feature_width(model, config.name)
        self.model, self.config, self._run = model, config, run
        self.crops = self._crops(data)
        self._models = {model.image_shape[:2]: model}
        sides = {
            side for s in self.crops.sizes for side in (s.loaded, s.large, s.small)
        }
        for size in sides - {None, *self._models}:
            if any(side % model.config.patch_size for side in size):
                raise UserError(
                    f"data.train_transform={data.train_transform!r}: crops of {size} are "
                    f"not multiples of the patch size {model.config.patch_size}: "
                    "change their size"
                )
            self._models[size] = model.at_size(size)
            model.check_sizes(self._models[size])
        self.head = Head(
            config.hidden_dim,
            config.bottleneck_dim,
            config.num_outputs,
            config.free_gain,
            model.options["dtype"],
        )
        self._collapsed: dict[str, int] = {}

    def _crops(self, data: DataConfig) -> Crops:
        config = self.config
        return Crops(config.name, config.large_transforms, config.small_transform, data)

    def batch_spec(self, batch_size):
        return self.crops.batch_spec(batch_size)

    def prepare(self, batch, rng):
        return self.crops.prepare(batch, rng)

    def init(self, rng):
        network_key, head_key = jax.random.split(rng)
        network = dict(self.model.init(network_key))
        head = self.head.init(head_key, jnp.zeros((1, self._width)))["params"]
        params = {"network": network, "head": head}
        extra = {
            "teacher": jax.tree.map(jnp.copy, params),
            "center": jnp.zeros(self.config.num_outputs),
            "step": jnp.zeros([], jnp.int32),
        }
        return params, extra

    def loss(self, params, extra, batch, rng):
        student = self.answers(params, batch, train=True, key=rng)
        large = {"image": batch["image"]}
        teacher = jax.lax.stop_gradient(self.answers(extra["teacher"], large))
        temperature = self.teacher_temperature(extra["step"])
        targets = centered(teacher, extra["center"], temperature)
        loss = cross_entropies(student / self.config.student_temperature, targets)
        metrics = {
            "loss": loss.mean(),
            "teacher_entropy": entropies(targets).mean(),
            "teacher_momentum": self.teacher_momentum(extra["step"]),
            "teacher_temperature": temperature,
        }
        return loss.mean(), (metrics, {"center": teacher.mean((0, 1))})

    def held_out_metrics(self, params, extra, batch, rng):
        """Returns how well the student predicts the teacher on two crops per image.

        The crops are fixed: the upper left and the lower right three quarters of each
        side, resized to the image's size. "loss" is the mean cross-entropy of both
        pairs of a student's and a teacher's crop, "teacher_entropy" the teacher's mean
        entropy; both are in nats, and only of class tokens with DINOv2. The teacher's
        temperature is the one after its warmup in every step, so that steps can be
        compared. The centre is the running one; Sinkhorn-Knopp, which balances a whole
        batch, is replaced by a softmax without a centre, which is defined per image.
        """
        crops, config = corner_crops(batch["image"]), self.config
        student = self.class_outputs(params, crops)
        teacher = self.class_outputs(extra["teacher"], crops)
        center = extra.get("center", jnp.zeros(self.head.num_outputs))
        targets = centered(teacher, center, config.teacher_temperature)
        return {
            "loss": cross_entropies(student / config.student_temperature, targets),
            "teacher_entropy": entropies(targets).mean(1),
        }

    def class_outputs(
        self, params: dict, crops: Float[Array, "B V Y X C"]
    ) -> Float[Array, "B V K"]:
        """Returns the head's outputs for whole crops, as in an evaluation.

        Args:
          params: parameters of student or teacher.
          crops: crops of each image, normalised.
        """
        return self.answers(params, {"image": crops})

    def answers(
        self,
        params: dict,
        batch: Batch,
        *,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> Float[Array, "B V K"]:
        """Returns the head's outputs for the crops of a batch, float32.

        Args:
          params: parameters of student or teacher.
          batch: image (B, G, Y, X, C) and optionally small_crops (B, S, y, x, C).
          train, key: arguments of `Model.apply`.
        """
        keys = (None, None) if key is None else jax.random.split(key)
        features = [self._features(params, batch["image"], train, keys[0])]
        if "small_crops" in batch:
            crops = batch["small_crops"]
            features.append(self._features(params, crops, train, keys[1]))
        features = jnp.concatenate(features, axis=1)
        with self.model.config.matmul_precision():
            return self.head.apply({"params": params["head"]}, features)

    def model_of(self, crops: Float[Array, "... Y X C"]) -> Model:
        """Returns the network for the size of the crops."""
        return self._models[crops.shape[-3:-1]]

    def _features(self, params, crops, train, key) -> Float[Array, "B V D"]:
        (B, V), model = crops.shape[:2], self.model_of(crops)
        images = crops.reshape(B * V, *crops.shape[2:]).astype(model.options["dtype"])
        network = model.resize(params["network"], self.model)
        features = model.apply(network, images, train=train, key=key)["pre_logits"]
        return features.reshape(B, V, -1)

    def teacher_temperature(self, step: jax.Array) -> Float[Array, ""]:
        """Returns the temperature of the teacher after `step` steps."""
        config = self.config
        last = max(1, config.teacher_temperature_epochs - 1)
        epoch = jnp.floor(step / self._run.steps_per_epoch)
        part = jnp.minimum(epoch / last, 1) if config.teacher_temperature_epochs else 1
        start, end = config.teacher_temperature_start, config.teacher_temperature
        return jnp.asarray(start + (end - start) * part, jnp.float32)

    def teacher_momentum(self, step: jax.Array) -> Float[Array, ""]:
        """Returns the momentum of the teacher after `step` steps."""
        part = 0.5 * (1 + jnp.cos(math.pi * step / self._run.total_steps))
        return jnp.asarray(1 + (self.config.teacher_momentum - 1) * part, jnp.float32)

    def update(self, extra, params, stats, step):
        momentum, decay = self.teacher_momentum(step - 1), self.config.center_momentum
        # Not t + (1 - m)(p - t): with m = 1, rounding would still move the teacher.
        mix = lambda old, new: momentum * old + (1 - momentum) * new
        centers = {
            name: decay * extra[name] + (1 - decay) * mean
            for name, mean in stats.items()
        }
        teacher = jax.tree.map(mix, extra["teacher"], params)
        return {**extra, **centers, "teacher": teacher, "step": step}

    @property
    def entropies(self) -> dict[str, tuple[str, int]]:
        """Entropy metrics to the subject of a warning and the number of outputs."""
        return {"teacher_entropy": ("the teacher has", self.head.num_outputs)}

    def warning(self, metrics):
        """Reports a collapse of the teacher once it has lasted for `_LOGS` logs."""
        now = {}
        for name, (whose, num_outputs) in self.entropies.items():
            part = metrics[name] / math.log(num_outputs)
            now[f"{whose} collapsed to one output (entropy 0)"] = part < 0.005
            now[f"{whose} collapsed to equal outputs (entropy ln K)"] = part > 0.995
        self._collapsed = {
            how: self._collapsed.get(how, 0) + 1 for how, is_so in now.items() if is_so
        }
        for how, logs in self._collapsed.items():
            if logs >= _LOGS:
                remedy = (
                    "raise task.teacher_temperature_start or lower task.center_momentum"
                    if "one" in how
                    else "lower task.teacher_temperature, or raise task.teacher_momentum"
                )
                return (
                    f"{how} for {logs} logs and training has no effect: {remedy}, or lower "
                    "the learning rate"
                )
        return ""

    def backbone(self, params, extra):
        return extra["teacher"]["network"]

    def with_backbone(self, params, extra, network):
        copy = jax.tree.map(jnp.copy, network)
        teacher = extra["teacher"] | {"network": copy}
        return params | {"network": network}, extra | {"teacher": teacher}

    def with_task_params(self, params, extra, task_params):
        """Returns the state in which student and teacher begin as those of another run.

        With `start_from_teacher`, or if the student's parameters have other shapes
        there, both begin as that run's teacher.

        Raises:
          UserError: a head has other sizes.
        """
        given = _of_student(params, task_params)
        teacher = {**task_params["teacher"], "network": extra["teacher"]["network"]}
        for name, value in extra["teacher"].items():
            if difference := stacking.difference(teacher.get(name, {}), value):
                raise UserError(
                    f"config.init has another {name} than this run, which starts with it "
                    f"({difference}): set the keys of task as in that run, or give "
                    "only the network, as vit_jax.convert --to=safetensors writes it"
                )
        begins = not self._obstacle(given, params)
        student = stacking.join(stacking.separate(given), params) if begins else teacher
        centers = {k: v for k, v in task_params.items() if k in extra}
        copies = jax.tree.map(jnp.array, {"student": student, "teacher": teacher})
        extra = {**extra, **centers, "teacher": copies["teacher"]}
        return copies["student"], extra

    def left_out(self, params, extra, task_params):
        given, teacher = _of_student(params, task_params), task_params["teacher"]
        none = [name for name in task_params if name not in {**params, **extra}]
        none += [f"teacher/{name}" for name in teacher if name not in extra["teacher"]]
        left = dict.fromkeys(none, "this run has none")
        if obstacle := self._obstacle(given, params):
            begins = f"the student begins as the teacher ({obstacle})"
            left |= dict.fromkeys(given, begins)
        return left

    def _obstacle(self, given: dict, params: dict) -> str:
        """Returns why the student does not begin as another run's; "" if it does."""
        if self.config.start_from_teacher:
            return "task.start_from_teacher=True"
        return stacking.difference(given, params)

    def training_flops(self):
        """Returns the operations per image; the teacher has no backward pass."""
        if cost.forward_flops(self.model) is None:
            return None
        shapes, _ = jax.eval_shape(self.init, jax.random.key(0))
        each = [s.share * self._flops(s, shapes) for s in self.crops.sizes]
        return round(sum(each))

    def _flops(self, sizes: CropSizes, shapes: dict) -> int:
        """Returns the operations of a training step per image for crops of given sizes.

        Args:
          sizes: sizes of the crops.
          shapes: shapes of the parameters.
        """
        head = 2 * sum(leaf.size for leaf in jax.tree.leaves(shapes["head"]))
        views = NUM_LARGE * (cost.forward_flops(self._models[sizes.large]) + head)
        rest = 0
        if sizes.small:
            small = cost.forward_flops(self._models[sizes.small])
            rest = self.crops.num_small * (small + head)
        return 3 * (views + rest) + views


def _of_student(params: dict, task_params: dict) -> dict:
    """Returns the pretrained parameters of the student."""
    return {name: task_params[name] for name in params if name in task_params}
