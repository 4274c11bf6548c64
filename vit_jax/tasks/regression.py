"""Regression: one number or several per image, such as an age or a weight.

Targets are standardised with the mean and standard deviation of the training images,
and the outputs of the network are converted back (models/targets.py). A missing target
adds nothing to the loss, which is the mean over the targets that are present. Letters:
B images, T targets, L outputs, K levels.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from vit_jax.config.fields import key
from vit_jax.data.config import ESTIMATE, DataConfig
from vit_jax.data.fields.target import NAME, Target, check_precision, read_targets
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.models import Model
from vit_jax.models.layers import CLASSIFIERS
from vit_jax.models.targets import LOSSES, Targets, map_heads, num_outputs
from vit_jax.tasks.classification import Classification
from vit_jax.tasks.task import ImageTask, Ratio, TaskConfig, transform

_MOST_LEVELS = 100
_SMALLEST_LOG_VARIANCE = -10.0
_SMALLEST_GAP = 1e-4  # Of neighbouring logits; their probabilities must differ.
_WHOLE = 1 - 1e-5  # Mixed images whose targets are present have at least this share.

_KNOWN = "a number, or one per name in data.target_key"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegressionConfig(TaskConfig):
    """Regression: images and numbers, such as an age."""

    name: str = key("regression", "Task to train.")
    loss: str = key(
        "mse",
        'Loss: "mse", the squared error; "mae", the absolute error; "huber"; "gaussian", '
        "the negative log-likelihood of a normal distribution whose standard deviation "
        'is predicted too; or "ordinal", a cumulative link model of the levels of the '
        "targets, such as grades from 1 to 5.",
        choices=LOSSES,
    )
    delta: float = key(
        1.0,
        "Error, in standard deviations, from which the Huber loss is linear.",
        reason="targets with more or fewer outliers",
        above=0,
        only_if={"loss": ("huber",)},
    )
    unit: str = key(
        "",
        'Unit of the targets, for predictions and pages: one, such as "years", or one '
        'per target, such as "years,kg".',
        reason="predictions with units",
    )
    mean: tuple[float, ...] | str = key(
        ESTIMATE,
        f'Mean that is subtracted from the targets, {_KNOWN}; "estimate" is the mean of '
        "the training images.",
        reason="runs on different images that are compared",
        names=(ESTIMATE,),
        at_least=None,
        like=(0.0,),
    )
    std: tuple[float, ...] | str = key(
        ESTIMATE,
        f'Standard deviation that the targets are divided by, {_KNOWN}; "estimate" is '
        "that of the training images.",
        reason="runs on different images that are compared",
        names=(ESTIMATE,),
        above=0,
        like=(1.0,),
    )
    levels: tuple[float, ...] = key(
        (),
        "Values that ordinal targets may have, ascending; () takes those of the training "
        "images.",
        reason="levels that training images lack",
        only_if={"loss": ("ordinal",)},
        at_least=None,
        like=(0.0,),
    )

    def num_logits(self, data):
        return num_outputs(self.loss, len(data.targets), len(self.levels))

    def of_records(self, data: DataConfig, source: Source) -> "RegressionConfig":
        self.check(data)
        values = read_targets(source, data.targets)
        for name, column in zip(data.targets, values.T, strict=True):
            known = column[~np.isnan(column)]
            if len(np.unique(known)) < 2:
                raise UserError(
                    f"data.target_key: {name!r} has fewer than two different numbers in "
                    f"the training images of {data.split!r}: choose another column"
                )
            check_precision(known, repr(name))
        known = {"mean": np.nanmean(values, 0), "std": np.nanstd(values, 0)}
        known = {k: tuple(v.tolist()) for k, v in known.items()}
        known = {k: v for k, v in known.items() if getattr(self, k) == ESTIMATE}
        if self.loss == "ordinal":
            known["levels"] = self._levels_of(data, source, values)
        return dataclasses.replace(self, **known)

    def _levels_of(self, data, source, values) -> tuple[float, ...]:
        seen = np.unique(values[~np.isnan(values)])
        levels = self.levels or tuple(seen.tolist())
        if len(levels) > _MOST_LEVELS:
            raise UserError(
                f"task.loss='ordinal' with {len(levels):,} different numbers in "
                f"data.target_key={data.target_key!r}, but at most {_MOST_LEVELS} levels: "
                "round them, or choose task.loss='mse'"
            )
        if other := sorted({*seen.tolist()} - {*levels}):
            raise UserError(
                f"task.levels lacks {other[0]:g}, which an image of {data.split!r} has: add "
                "it"
            )
        return levels

    def check_without_records(self) -> None:
        if self.loss == "ordinal" and not self.levels:
            raise UserError(
                "task.levels=(): the levels are those of the training images, which are "
                "not known here: give them, such as (1,2,3,4,5)"
            )

    def build(self, model, data, run, saved=None) -> "Regression":
        # The statistics of a run that resumes are those of its start.
        targets = Targets.of_json(saved[NAME]) if saved else self.targets(data)
        return Regression(self, model, data, targets)

    def targets(self, data: DataConfig) -> Targets:
        """Returns the meaning of the network's outputs.

        Statistics that are not estimated yet are 0 and 1.
        """
        self.check(data)
        count = len(data.targets)

        def of_each(value: tuple | str, default: float) -> tuple[float, ...]:
            value = (default,) if value == ESTIMATE else value
            return value * count if len(value) == 1 else value

        units = tuple(map(str.strip, self.unit.split(",")))
        return Targets(
            names=data.targets,
            units=units * count if len(units) == 1 else units,
            loss=self.loss,
            mean=of_each(self.mean, 0.0),
            std=of_each(self.std, 1.0),
            levels=self.levels,
        )

    def check(self, data: DataConfig) -> None:
        """Raises UserError if keys do not suit the targets of the data."""
        if not data.target_key:
            raise UserError(Target.missing(data))
        count = len(data.targets)
        units = tuple(self.unit.split(","))
        for name, value in (("mean", self.mean), ("std", self.std), ("unit", units)):
            if value != ESTIMATE and len(value) not in (1, count):
                raise UserError(
                    f"task.{name} has {len(value)} values: give one, or one for each of "
                    f"data.target_key={data.target_key!r}"
                )
        if list(self.levels) != sorted({*self.levels}):
            raise UserError(f"task.levels={self.levels} is not ascending: sort it")


class Regression(Classification):
    """The regression task, with numbers as outputs of the network's classifier.

    `extra` holds the network's running means, if it has any.

    Args:
      config: `config.task`.
      model: network whose classifier has the outputs of `targets`.
      data: `config.data`.
      targets: meaning of the outputs.

    Raises:
      UserError: the data have no targets, or the network has two classifiers.
    """

    def __init__(
        self, config: RegressionConfig, model: Model, data: DataConfig, targets: Targets
    ):
        ImageTask.__init__(self, model, data)
        self.config, self.targets = config, targets
        if data.target_key and model.options["num_classes"] != targets.num_outputs:
            raise UserError(
                f"task.levels: the network has {model.options['num_classes']} outputs, but "
                f"the run began with {targets.num_outputs}: the numbers of the training "
                "images have changed; begin a new run"
            )
        if model.options.get("distillation"):
            raise UserError(
                "model.distillation=True with task.name='regression', which trains one "
                "classifier, not two: set it to False"
            )

    def metadata(self):
        return {NAME: dataclasses.asdict(self.targets)}

    def batch_spec(self, batch_size):
        """Returns image (B, Y, X, C), targets (B, T) and index (B,)."""
        shape = batch_size, len(self.targets.names)
        targets = {NAME: jax.ShapeDtypeStruct(shape, np.float32)}
        return ImageTask.batch_spec(self, batch_size) | targets

    def init(self, rng):
        params, extra = super().init(rng)
        return self._begun(params), extra

    def with_backbone(self, params, extra, network):
        state = super().with_backbone(params, extra, network)
        return self._begun(state[0]), state[1]

    def _begun(self, params: dict) -> dict:
        """Returns parameters in which all levels of a new classifier are equally likely."""
        if self.config.loss != "ordinal":
            return params
        K = len(self.targets.levels)
        chances = np.arange(K - 1, 0, -1) / np.arange(1, K)
        begin = np.tile(np.log(chances), len(self.targets.names))

        def begun(bias):  # A trained one has different offsets.
            return jnp.where((bias == bias[0]).all(), begin.astype(bias.dtype), bias)

        heads = {
            name: head | {"bias": begun(head["bias"])}
            for name, head in params.items()
            if name in CLASSIFIERS
        }
        return self._shared(params | heads)

    def with_task_params(self, params, extra, task_params):
        """Returns a state whose classifier has the statistics of this run."""
        (scale, offset), (to, zero) = task_params[NAME], self.targets.affine()
        return map_heads(params, scale / to, (offset - zero) / to), extra

    def left_out(self, params, extra, task_params):
        return {}

    def prepare(self, batch, rng):
        """Returns image (B, Y, X, C), normalised, targets (B, N) and weight (B,).

        The targets are those of `encode`. The weights are equal, with the number of
        present targets of the batch in the denominator, so that the mean over several
        microbatches is that over the batch.
        """
        encoded, present = self.encode(batch[NAME])
        T = present.shape[1]
        both = jnp.concatenate([encoded, present.astype(jnp.float32)], axis=1)
        images, both = transform(self._ops, self.data, batch, rng, both)
        # An image that is mixed with one whose target is missing has none either.
        present = both[:, -T:] > _WHOLE
        B = len(present)
        weight = jnp.full(B, B / jnp.maximum(present.sum(), 1))
        return {
            "image": images,
            NAME: both[:, :-T],
            "present": present,
            "weight": weight,
        }

    def encode(
        self, values: Float[Array, "B T"]
    ) -> tuple[Float[Array, "B N"], Bool[Array, "B T"]]:
        """Returns targets as the loss reads them, and which are present.

        They are standardised, (B, T), or with ordinal targets 1 for the level and 0 for
        all others, (B, T K). Missing ones are 0.
        """
        present = ~jnp.isnan(values)
        if self.config.loss == "ordinal":
            levels = jnp.asarray(self.targets.levels, values.dtype)
            of_level = values[..., None] == levels[None, None]
            return of_level.reshape(len(values), -1).astype(jnp.float32), present
        mean, std = (
            jnp.asarray(v, values.dtype)[None]
            for v in (self.targets.mean, self.targets.std)
        )
        return jnp.where(present, (values - mean) / std, 0), present

    def loss(self, params, extra, batch, rng):
        if self.config.loss == "ordinal":
            params = self._shared(params)
        outputs, stats = self.outputs(params, extra, batch, rng)
        logits, encoded, present = outputs["logits"], batch[NAME], batch["present"]
        terms = jnp.where(present, self.terms(logits, encoded), 0)
        loss = (terms.sum(1) * batch["weight"]).mean()
        return loss, ({"loss": loss, **self._errors(logits, encoded, present)}, stats)

    def held_out_metrics(self, params, extra, batch, rng):
        """Returns the loss of each image: the mean over its present targets, or 0."""
        network = self.backbone(params, extra)
        images = batch["image"].astype(self.model.options["dtype"])
        encoded, present = self.encode(batch[NAME])
        terms = self.terms(self.model.apply(network, images)["logits"], encoded)
        sums = jnp.where(present, terms, 0).sum(1)
        return {"loss": sums / jnp.maximum(present.sum(1), 1)}

    def terms(
        self, logits: Float[Array, "B L"], encoded: Float[Array, "B N"]
    ) -> Float[Array, "B T"]:
        """Returns the loss of each target; `encoded` are those of `encode`."""
        T = len(self.targets.names)
        match self.config.loss:
            case "ordinal":
                return cumulative_link(
                    logits.reshape(len(logits), T, -1),
                    encoded.reshape(len(logits), T, -1),
                )
            case "gaussian":
                log_variance = jnp.maximum(logits[:, T:], _SMALLEST_LOG_VARIANCE)
                error = jnp.square(logits[:, :T] - encoded)
                terms = log_variance + error * jnp.exp(-log_variance)
                return (terms + math.log(2 * math.pi)) / 2
            case "huber":
                return optax.losses.huber_loss(logits, encoded, delta=self.config.delta)
            case "mae":
                return jnp.abs(logits - encoded)
            case _:
                return jnp.square(logits - encoded)

    def _errors(self, logits, encoded, present) -> dict[str, Ratio]:
        """Returns the mean absolute error of each target, in its unit."""
        targets = self.targets
        values = targets.decode(logits, jnp).values
        if self.config.loss == "ordinal":
            levels = jnp.asarray(targets.levels)
            shares = encoded.reshape(*present.shape, -1)
            true = (shares * levels[None, None]).sum(-1)
        else:
            true = dataclasses.replace(targets, loss="mse").decode(encoded, jnp).values
        sums = jnp.where(present, jnp.abs(values - true), 0).sum(0)
        counts = present.sum(0, dtype=jnp.float32)
        several = len(targets.names) > 1
        return {
            f"mae/{name}" if several else "mae": Ratio(sums[i], counts[i])
            for i, name in enumerate(targets.names)
        }

    def _shared(self, params: dict) -> dict:
        """Returns parameters in which all levels of a target have the same kernel.

        A cumulative link model has one slope per target and an offset for each level.
        Kernels that are equal stay equal, since their gradients are.
        """
        T = len(self.targets.names)

        def share(kernel):
            parts = kernel.reshape(len(kernel), T, -1)
            mean = jnp.broadcast_to(parts.mean(-1, keepdims=True), parts.shape)
            return mean.reshape(kernel.shape)

        heads = {
            name: head | {"kernel": share(head["kernel"])}
            for name, head in params.items()
            if name in CLASSIFIERS
        }
        return params | heads


def cumulative_link(
    logits: Float[Array, "B T K1"], levels: Float[Array, "B T K"]
) -> Float[Array, "B T"]:
    """Returns the negative log-likelihood of a cumulative link model, in nats.

    The probability that a target is larger than level k is the sigmoid of logit k, and
    that of level k the difference of two neighbours (McCullagh, 1980, "Regression
    Models for Ordinal Data", section 2).

    Args:
      logits: logits for all levels but the last, K - 1 of them, in descending order.
      levels: share of each level; 1 for one level unless images are mixed.
    """
    end = jnp.full_like(logits[..., :1], jnp.inf)
    lower = jnp.concatenate([end, logits], -1)  # Logit of being above the level before.
    upper = jnp.concatenate([logits, -end], -1)
    gap = jnp.maximum(lower - upper, _SMALLEST_GAP)
    # sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)).
    log_chance = (
        jax.nn.log_sigmoid(lower)
        + jax.nn.log_sigmoid(-upper)
        + jnp.log(-jnp.expm1(-gap))
    )
    return -(levels * log_chance).sum(-1)
