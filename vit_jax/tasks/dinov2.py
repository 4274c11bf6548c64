"""DINOv2 (arXiv:2304.07193): DINO on class tokens and iBOT on masked patches.

The student gets large crops with masked patches, and small crops; it predicts the
teacher's outputs for every other crop, and for the masked patches of the same crop
(iBOT, arXiv:2111.07832). KoLeo spreads the class tokens. Gram anchoring of DINOv3
(arXiv:2508.10104) keeps the similarities of patches near those of an earlier teacher.
The code follows facebookresearch/dinov2 and dinov3, but random choices that are made
per device there are made per group of images here, on any number of devices. Letters: B
images, G large and S small crops per image, V = G + S, N patches, M masked patches at
most, C = B G crops, D width, K outputs for class tokens, L for
patches.
"""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vit_jax.config.fields import epochs, key
from vit_jax.config.lengths import RunLength, length_in_steps
from vit_jax.data.config import DataConfig
from vit_jax.data.transforms import device as device_transforms
from vit_jax.errors import UserError
from vit_jax.models import Model, cost, resizing
from vit_jax.tasks import block_masks, dino_losses
from vit_jax.tasks.crops import NUM_LARGE, AnchoredCrops, CropSizes, Sides
from vit_jax.tasks.dino import Dino, DinoConfig
from vit_jax.tasks.dino_losses import Head
from vit_jax.tasks.task import Batch, Ratio

_SMALL_NORM = "small_norm_"  # Prefix of the parameters of `small_norm`.
_MASKS = 0x69424F54  # Separates the random bits of masks from those of the transforms.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dinov2Config(DinoConfig):
    """DINOv2 and DINOv3: predict outputs of a moving average, also for masked patches."""

    needs_all_patches: ClassVar[bool] = True

    name: str = key("dinov2", "Task to train.")
    weight_norm: bool = key(
        True,
        "Divide the weights of the heads' last layers by their norms, which DINOv3 "
        "does not do.",
    )
    separate_heads: bool = key(
        True,
        "Use a second head for patches; if False, class tokens and patches share one "
        "head.",
    )
    patch_num_outputs: int = key(
        0,
        "Number of outputs of the head for patches (prototypes); 0 is "
        "`task.num_outputs`.",
        reason="DINOv3's 7B network (arXiv:2508.10104)",
    )
    patch_hidden_dim: int = key(
        0,
        "Hidden units of the head for patches; 0 is `task.hidden_dim`.",
        reason="DINOv3's 7B network (arXiv:2508.10104)",
    )
    patch_bottleneck_dim: int = key(
        0,
        "Number of features before the last layer of the head for patches; 0 is "
        "`task.bottleneck_dim`.",
    )
    centering: str = key(
        "sinkhorn",
        'Method that balances the outputs of the teacher: "sinkhorn" (Sinkhorn-Knopp '
        'over the whole batch), or "center" (running means).',
        choices=("sinkhorn", "center"),
    )
    teacher_temperature_steps: int = key(
        0,
        "Length of the warmup of the teacher's temperature in steps; set this or "
        "`task.teacher_temperature_epochs`. The temperature changes in every step.",
    )
    teacher_temperature_epochs: float = epochs(
        "Length of the warmup of the teacher's temperature in epochs; the temperature "
        "changes in every step."
    )
    teacher_momentum_end: float = key(
        1.0,
        "Momentum of the teacher at the end of its schedule, half a cosine.",
        at_most=1,
    )
    teacher_momentum_steps: int = key(
        0,
        "Number of steps in which the teacher's momentum rises to "
        "`task.teacher_momentum_end`; 0 is the whole run.",
        reason="stopping a run before the end of its schedules",
    )
    dino_weight: float = key(1.0, "Weight of the loss of the class tokens.")
    small_weight: float = key(
        1.0,
        "Factor of the terms of small crops in the loss of the class tokens, in the "
        "first step (DINOv3).",
    )
    small_weight_end: float = key(
        1.0,
        "Factor of the terms of small crops in the loss of the class tokens, at the "
        "end of its schedule, half a cosine.",
    )
    small_weight_steps: int = key(
        0,
        "Number of steps in which `task.small_weight` changes to "
        "`task.small_weight_end`; 0 is the whole run.",
    )
    small_norm: bool = key(
        False,
        "Use a separate final norm for class tokens of the student's small crops; "
        "evaluations do not use it.",
        reason=(
            "DINOv3's 7B network (arXiv:2508.10104), untie_global_and_local_cls_norm of "
            "its code"
        ),
    )
    patch_weight: float = key(1.0, "Weight of the loss of the masked patches.")
    koleo_weight: float = key(
        0.1,
        "Weight of the KoLeo loss, summed over the two large crops; 0 is off.",
    )
    koleo_group: int = key(
        0,
        "Number of successive images among which KoLeo searches for the nearest "
        "neighbour; 0 is the whole batch. The original code uses the images of one "
        "device.",
    )
    mask_share: float = key(
        0.5, "Fraction of the large crops that have masked patches.", above=0, at_most=1
    )
    mask_ratio: tuple[float, ...] = key(
        (0.1, 0.5),
        "Smallest and largest fraction of masked patches; the masked crops of a group "
        "divide this range into equal steps.",
        at_most=1,
    )
    mask_group: int = key(
        8,
        "Number of successive images whose masked crops divide the range "
        "`task.mask_ratio`; 0 is the whole batch. A divisor of the number of images "
        "per device avoids communication.",
    )
    mask_exact: bool = key(
        False,
        "If True, a crop masks exactly the largest fraction of its step of "
        "`task.mask_ratio`: blocks, then single patches (DINOv3). If False, it masks a "
        "random fraction within its step, in blocks only (DINOv2).",
    )
    gram_weight: float = key(
        0.0, "Weight of Gram anchoring (DINOv3); 0 is off, and no anchor is kept."
    )
    gram_start_steps: int = key(
        0,
        "Step at which Gram anchoring begins; the anchor is the teacher of that step. "
        "If 0, it begins with the run, and the anchor is the network that the run "
        "starts from.",
        reason="Gram anchoring (DINOv3, arXiv:2508.10104) in one run with the pretraining",
    )
    gram_warmup_steps: int = key(
        0,
        "Number of steps after `task.gram_start_steps` in which the weight of Gram "
        "anchoring rises from 0 along half a cosine.",
    )
    gram_every_steps: int = key(
        0,
        "Number of steps between updates of Gram anchoring's anchor to the current "
        "teacher; 0 is never.",
    )
    gram_updates: int = key(
        0, "Largest number of updates of Gram anchoring's anchor; 0 is unlimited."
    )
    gram_scale: float = key(
        1.0,
        "Side of the crops for Gram anchoring's anchor, divided by the side of the "
        "student's crops. The sizes of `multi_crop` are those of the anchor's crops.",
        at_least=1,
    )

    def __post_init__(self):
        super().__post_init__()
        if len(self.mask_ratio) != 2 or self.mask_ratio[0] > self.mask_ratio[1]:
            raise UserError(
                f"task.mask_ratio={self.mask_ratio} must be the smallest and the largest "
                "fraction of masked patches"
            )
        if self.koleo_group == 1 and self.koleo_weight:
            raise UserError(
                "task.koleo_group=1: a single image has no neighbour: set at least 2"
            )

    def build(self, model, data, run, saved=None) -> "Dinov2":
        return Dinov2(self, model, data, run)


class Masked(NamedTuple):
    """Masked patches of a batch of large crops.

    Attributes:
      mask: masked patches of each crop.
      index: positions of masked patches among all patches of their group of crops,
        padded with positions of other patches.
      weights: weights for `dino_losses.patch_loss`; 0 for padding.
    """

    mask: Bool[Array, "C N"]
    index: Int[Array, "groups most"]
    weights: Float[Array, " M"]


class Answers(NamedTuple):
    """The outputs of a student or a teacher for a batch.

    Attributes:
      features: class tokens of the large crops, float32.
      patches: normalised patches of the large crops.
      outputs: outputs of the head for the class tokens of all crops, float32.
      patch_outputs: outputs of the second head for the masked patches, float32.
    """

    features: Float[Array, "B G D"]
    patches: Float[Array, "C N D"]
    outputs: Float[Array, "B V K"]
    patch_outputs: Float[Array, "M L"]


class Dinov2(Dino):
    """The DINOv2 task; to parameters of `Dino` it adds "mask_token" and "patch_head".

    "patch_head" exists with `separate_heads`. With `small_norm` there are also
    "small_norm_scale" and "small_norm_bias", arrays beside the network's, with which
    `optim.grad_clip_norm_per_part` clips them, as DINOv3 does.

    `extra` holds centres of the outputs if `centering="center"`, and with Gram
    anchoring the "anchor", parameters of a network.

    Raises:
      UserError: `Dino` raised it; the network has no class token beside its patches; or
        crops do not suit Gram anchoring, are too small to mask a patch, or include no
        small ones though `small_norm` is set.
    """

    config: Dinov2Config

    def __init__(
        self, config: Dinov2Config, model: Model, data: DataConfig, run: RunLength
    ):
        is_vit = (
            model.config.has_encoder and "class token" in model.config.prefix_tokens
        )
        if not is_vit or not model.config.encoder_norm:
            raise UserError(
                f"model.variant={model.options['variant']!r} with task.name="
                f"{config.name!r}, which learns from a class token and patches: choose a "
                "Vision Transformer, such as B/14, with model.pool='token'"
            )
        super().__init__(config, model, data, run)
        if config.small_norm and not self.crops.num_small:
            raise UserError(
                f"task.small_norm=True with data.train_transform={data.train_transform!r}, "
                "which cuts no small crops: set task.small_norm=False, or num_small"
            )
        group = config.mask_group or math.ceil(1 / config.mask_share)
        for sizes in self.crops.sizes:
            self._most_masked(group * NUM_LARGE, self._models[sizes.large].grid)
        self._width = model.options["width"]
        self.head = self.head.clone(weight_norm=config.weight_norm)
        self.patch_head = self.head
        if config.separate_heads:
            self.patch_head = Head(
                config.patch_hidden_dim or config.hidden_dim,
                config.patch_bottleneck_dim or config.bottleneck_dim,
                config.patch_num_outputs or config.num_outputs,
                config.free_gain,
                model.options["dtype"],
                config.weight_norm,
            )
        centers = ("center", "patch_center") if config.centering == "center" else ()
        self.statistics = ("teacher", *centers)
        self._teacher_warmup = length_in_steps(config, "teacher_temperature", run)
        self._norm = model.config.norm()
        if config.small_norm:  # It replaces the norm at the end of the encoder.
            self._without_norm = {
                size: self._models[size].replace(final_norm=False, cls_norm=False)
                for size in {sizes.small for sizes in self.crops.sizes} - {None}
            }

    @property
    def coupled(self):
        config = self.config
        names = {
            "Sinkhorn-Knopp": config.centering == "sinkhorn",
            "KoLeo": config.koleo_weight,
            "the groups of masks": True,
        }
        return tuple(name for name, is_used in names.items() if is_used)

    def check_microbatch(self, size):
        config, lines = self.config, []
        groups = {"mask_group": config.mask_group}
        if config.koleo_weight:
            groups["koleo_group"] = config.koleo_group
            if size == 1 or math.gcd(size, config.koleo_group) == 1:
                group = config.koleo_group or 2
                raise UserError(
                    f"task.koleo_group={config.koleo_group} with {size} images at once: "
                    "KoLeo would get single images, which have no neighbours: "
                    f"set batch_size to a multiple of {group} times the number of "
                    "microbatches, or task.koleo_weight=0.0"
                )
        for name, asked in groups.items():
            group = math.gcd(size, asked)
            if asked and group != asked:
                lines.append(
                    f"task.{name}={asked} does not divide {size} images: groups have "
                    f"{group} images, the greatest common divisor"
                )
        return lines

    def _crops(self, data):
        config = self.config
        given = config.name, config.large_transforms, config.small_transform, data
        if not config.gram_weight:
            return super()._crops(data)
        return AnchoredCrops(*given, scale=config.gram_scale)

    def prepare(self, batch, rng):
        prepared = super().prepare(batch, rng)
        num_patches = math.prod(self.model_of(prepared["image"]).grid)
        draws = block_masks.num_draws(num_patches, self.config.mask_exact)
        noise = device_transforms.example_uniform(
            batch["index"], jax.random.fold_in(rng, _MASKS), NUM_LARGE * draws
        )
        return prepared | {"mask_noise": noise.reshape(-1, NUM_LARGE, draws)}

    @property
    def entropies(self):
        K = self.patch_head.num_outputs
        patches = {"patch_entropy": ("for patches, the teacher has", K)}
        return super().entropies | patches

    def init(self, rng):
        keys, config = jax.random.split(rng, 3), self.config
        network, features = dict(self.model.init(keys[0])), jnp.zeros((1, self._width))
        params = {
            "network": network,
            "head": self.head.init(keys[1], features)["params"],
            "mask_token": jnp.zeros((1, 1, self._width)),
        }
        if config.separate_heads:
            patch_head = self.patch_head.init(keys[2], features)["params"]
            params["patch_head"] = patch_head
        if config.small_norm:
            norm = self._norm.init(keys[0], features)["params"]
            params |= {f"{_SMALL_NORM}{name}": x for name, x in norm.items()}
        copy = lambda tree: jax.tree.map(jnp.copy, tree)
        extra = {"teacher": copy(params), "step": jnp.zeros([], jnp.int32)}
        if config.centering == "center":
            extra["center"] = jnp.zeros(self.head.num_outputs)
            extra["patch_center"] = jnp.zeros(self.patch_head.num_outputs)
        if config.gram_weight:
            extra["anchor"] = copy(network)
        return params, extra

    def _most_masked(self, group: int, grid: Sides) -> int:
        """Returns the most masked patches of a group of crops; UserError if it is 0."""
        config, N = self.config, math.prod(grid)
        how = config.mask_share, config.mask_ratio, N
        most = int(block_masks.upper_counts(group, *how).sum())
        if not most:
            raise UserError(
                f"task.mask_share={config.mask_share} and task.mask_ratio="
                f"{config.mask_ratio} mask no patch of {group} crops of {N} patches: raise "
                "them, task.mask_group or the size of the crops"
            )
        return most

    def masked(self, batch: Batch) -> Masked:
        """Draws the masks of a batch.

        Args:
          batch: image (B, G, Y, X, C), and mask_noise (B, G, draws), uniform numbers in
            [0, 1).

        Raises:
          UserError: no crop of a group is masked.
        """
        noise, grid = batch["mask_noise"], self.model_of(batch["image"]).grid
        config, N = self.config, math.prod(grid)
        group = math.gcd(len(noise), config.mask_group) * NUM_LARGE
        most = self._most_masked(group, grid)
        how = config.mask_share, config.mask_ratio, N
        noise = noise.reshape(-1, group, noise.shape[-1])
        counts = block_masks.draw_counts(noise[..., :2], *how, config.mask_exact)
        counts, noise = counts.reshape(-1), noise.reshape(-1, noise.shape[-1])
        tries, single = jnp.split(noise[:, 2:], [4 * block_masks.TRIES], axis=1)
        tries = tries.reshape(len(tries), -1, 4)
        mask = block_masks.draw_masks(tries, counts, grid)
        if config.mask_exact:
            mask = block_masks.complete(mask, counts, single)
        per_crop = mask.sum(1, keepdims=True).clip(1) * len(mask)
        groups = mask.reshape(-1, group * N)
        # A fixed number, the largest possible; padding has the weight 0.
        index = jnp.argsort(~groups, axis=1, stable=True)[:, :most]
        weights = (mask / per_crop).reshape(groups.shape)
        weights = jnp.take_along_axis(weights, index, axis=1)
        return Masked(mask, index, weights.reshape(-1))

    def answers(
        self,
        params: dict,
        batch: Batch,
        masked: Masked,
        *,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> Answers:
        """Returns the outputs of a student or a teacher for a batch.

        Args:
          params: parameters of student or teacher.
          batch: image (B, G, Y, X, C) and, for a student, small_crops (B, S, y, x, C).
          masked: masked patches; the mask token replaces them for a student.
          train: True for a student, False for a teacher.
          key: random key of `Model.apply`.
        """
        keys = (None, None) if key is None else jax.random.split(key)
        hide = None
        if train:
            token, mask = params["mask_token"], masked.mask[..., None]
            hide = lambda x: jnp.where(mask, token.astype(x.dtype), x)
        large = self._tokens(params, batch["image"], train, keys[0], hide)
        classes = features = self._classes(large, NUM_LARGE)
        if "small_crops" in batch:
            crops = batch["small_crops"]
            small = self._small_tokens(params, crops, train, keys[1])
            small = self._classes(small, crops.shape[1])
            classes = jnp.concatenate([features, small], axis=1)
        patches = large[:, self.model.num_prefix_tokens :]
        groups = patches.reshape(len(masked.index), -1, patches.shape[-1])
        taken = jnp.take_along_axis(groups, masked.index[..., None], axis=1)
        taken = taken.reshape(-1, patches.shape[-1])
        head = params["patch_head" if self.config.separate_heads else "head"]
        with self.model.config.matmul_precision():
            classes = self.head.apply({"params": params["head"]}, classes)
            taken = self.patch_head.apply({"params": head}, taken)
        return Answers(features, patches, classes, taken)

    def class_outputs(self, params, crops):
        tokens = self._tokens(params, crops)
        with self.model.config.matmul_precision():
            return self.head.apply(
                {"params": params["head"]}, self._classes(tokens, crops.shape[1])
            )

    def _small_tokens(self, params, crops, train, key) -> Float[Array, "BV N D"]:
        if not self.config.small_norm:
            return self._tokens(params, crops, train, key)
        model = self._without_norm[crops.shape[-3:-1]]
        tokens = self._tokens(params, crops, train, key, model=model)
        norm = {
            name.removeprefix(_SMALL_NORM): value
            for name, value in params.items()
            if name.startswith(_SMALL_NORM)
        }
        return self._norm.apply({"params": norm}, tokens)

    def _tokens(self, params, crops, train=False, key=None, hide=None, model=None):
        """Returns the tokens of all crops, (B V, tokens, D)."""
        model = model or self.model_of(crops)
        images = crops.reshape(-1, *crops.shape[2:]).astype(model.options["dtype"])
        network = model.resize(params["network"], self.model)
        return model.encode(network, images, train=train, key=key, edit_patches=hide)

    def _classes(self, tokens, V) -> Float[Array, "B V D"]:
        x = tokens[:, 0].astype(jnp.float32)
        return x.reshape(-1, V, x.shape[-1])

    def targets(
        self, extra: dict, teacher: Answers, valid: Bool[Array, " M"]
    ) -> tuple[Float[Array, "B G K"], Float[Array, "M L"]]:
        """Returns the probabilities of a teacher for class tokens and masked patches.

        Args:
          extra: state with the centres and the step.
          teacher: answers of the teacher.
          valid: whether each masked patch is not padding.
        """
        temperature = self.teacher_temperature(extra["step"])
        outputs, patches = teacher.outputs, teacher.patch_outputs
        if self.config.centering == "center":
            return (
                dino_losses.centered(outputs, extra["center"], temperature),
                dino_losses.centered(patches, extra["patch_center"], temperature),
            )
        flat = outputs.reshape(-1, outputs.shape[-1])
        classes = dino_losses.sinkhorn_knopp(flat, temperature)
        patches = dino_losses.sinkhorn_knopp(patches, temperature, valid)
        return classes.reshape(outputs.shape), patches

    def loss(self, params, extra, batch, rng):
        config = self.config
        masked = self.masked(batch)
        valid = masked.weights > 0
        student = self.answers(params, batch, masked, train=True, key=rng)
        large = {"image": batch["image"]}
        teacher = jax.lax.stop_gradient(self.answers(extra["teacher"], large, masked))
        targets, patch_targets = self.targets(extra, teacher, valid)
        cool = lambda outputs: outputs / config.student_temperature
        ends = config.small_weight, config.small_weight_end
        steps = config.small_weight_steps
        small_weight = self._half_cosine(steps, *ends, extra["step"])
        dino = dino_losses.cross_entropies(cool(student.outputs), targets, small_weight)
        losses = {
            "dino": dino.mean(),
            "patch": dino_losses.patch_loss(
                cool(student.patch_outputs), patch_targets, masked.weights
            ),
        }
        if config.koleo_weight:
            crops = jnp.moveaxis(student.features, 1, 0)
            each = [dino_losses.koleo(crop, config.koleo_group) for crop in crops]
            losses["koleo"] = sum(each)
        if config.gram_weight:
            losses["gram"] = self._gram(extra, batch, student.patches)
        weights = {
            "dino": config.dino_weight,
            "patch": config.patch_weight,
            "koleo": config.koleo_weight,
            "gram": self._gram_weight(extra["step"]),
        }
        loss = sum(weights[name] * value for name, value in losses.items())
        count, entropies = valid.sum(dtype=jnp.float32), dino_losses.entropies
        metrics = {
            "loss": loss,
            **{f"{name}_loss": value for name, value in losses.items()},
            "teacher_entropy": entropies(targets).mean(),
            "patch_entropy": Ratio((entropies(patch_targets) * valid).sum(), count),
            "masked": masked.mask.mean(),
            "teacher_momentum": self.teacher_momentum(extra["step"]),
            "teacher_temperature": self.teacher_temperature(extra["step"]),
        }
        stats = {}
        if config.centering == "center":
            of_patches = jnp.where(valid[:, None], teacher.patch_outputs, 0)
            stats["center"] = teacher.outputs.mean((0, 1))
            stats["patch_center"] = Ratio(of_patches.sum(0), count)
        return loss, (metrics, stats)

    def _gram(self, extra, batch, patches) -> Float[Array, ""]:
        """Returns the loss of Gram anchoring, 0 before its start."""

        def compute(patches):
            tokens = self._tokens({"network": extra["anchor"]}, batch["anchor"])
            anchor = tokens[:, self.model.num_prefix_tokens :]
            grids = (self.model_of(batch[name]).grid for name in ("anchor", "image"))
            anchor = _resize_patches(anchor, *grids)
            return dino_losses.gram(patches, jax.lax.stop_gradient(anchor))

        started = extra["step"] >= self.config.gram_start_steps
        return jax.lax.cond(started, compute, lambda _: jnp.zeros([]), patches)

    def update(self, extra, params, stats, step):
        new = super().update(extra, params, stats, step)
        if self.config.gram_weight:
            teacher, due = new["teacher"]["network"], self._is_anchored(step)
            keep = lambda old, now: jnp.where(due, now, old)
            new["anchor"] = jax.tree.map(keep, extra["anchor"], teacher)
        return new

    def _is_anchored(self, step: Int[Array, ""]) -> Bool[Array, ""]:
        """Returns whether the teacher after `step` steps becomes the anchor."""
        config, start = self.config, self.config.gram_start_steps
        since, every = step - start, config.gram_every_steps
        # With start 0 the anchor already is the network that the run starts from.
        due = (since == 0) & (start > 0)
        number = 1
        if every:
            due |= (since > 0) & (since % every == 0)
            number = since // every + (start > 0)
        return due & (number <= config.gram_updates) if config.gram_updates else due

    def teacher_temperature(self, step):
        config, steps = self.config, self._teacher_warmup
        part = jnp.minimum(step / max(1, steps - 1), 1) if steps else 1
        start, end = config.teacher_temperature_start, config.teacher_temperature
        return jnp.asarray(start + (end - start) * part, jnp.float32)

    def teacher_momentum(self, step):
        config = self.config
        ends = config.teacher_momentum, config.teacher_momentum_end
        return self._half_cosine(config.teacher_momentum_steps, *ends, step)

    def _half_cosine(self, steps: int, start: float, end: float, step):
        """Returns the value after `step` steps of half a cosine from `start` to `end`.

        Args:
          steps: length of the schedule; 0 for the whole run.
          start, end: first and last value.
          step: number of steps taken.
        """
        steps = steps or self._run.total_steps
        part = 0.5 * (1 + jnp.cos(math.pi * jnp.minimum(step / steps, 1)))
        return jnp.asarray(end + (start - end) * part, jnp.float32)

    def _gram_weight(self, step) -> Float[Array, ""]:
        warmup = self.config.gram_warmup_steps
        since = (step - self.config.gram_start_steps) / max(1, warmup)
        part = 0.5 * (1 - jnp.cos(math.pi * since.clip(0, 1))) if warmup else 1.0
        return jnp.asarray(self.config.gram_weight * part, jnp.float32)

    def with_backbone(self, params, extra, network):
        params, extra = super().with_backbone(params, extra, network)
        if self.config.small_norm:
            student, teacher = (
                jax.tree.map(jnp.copy, _small_norm(network)) for _ in range(2)
            )
            params |= student
            extra |= {"teacher": extra["teacher"] | teacher}
        if self.config.gram_weight:
            extra |= {"anchor": jax.tree.map(jnp.copy, network)}
        return params, extra

    def with_task_params(self, params, extra, task_params):
        """Returns the state that begins as another run's, see `Dino`.

        If that run has no norm of small crops, its network's last norm is copied.
        """
        task_params = self._with_small_norm(extra, task_params)
        return super().with_task_params(params, extra, task_params)

    def left_out(self, params, extra, task_params):
        task_params = self._with_small_norm(extra, task_params)
        return super().left_out(params, extra, task_params)

    def _with_small_norm(self, extra: dict, task_params: dict) -> dict:
        """Returns pretrained parameters, with norms of small crops added if needed."""
        if not self.config.small_norm:
            return task_params
        of_teacher = extra["teacher"]["network"]
        teacher = _small_norm(of_teacher) | task_params["teacher"]
        student = _small_norm(task_params.get("network", of_teacher))
        return student | task_params | {"teacher": teacher}

    def _flops(self, sizes: CropSizes, shapes: dict) -> int:
        """Returns the operations of a training step per image for crops of given sizes.

        Neither teacher nor anchor has a backward pass. Branches that stochastic depth
        skips do not count.
        """
        config, large = self.config, self._models[sizes.large]
        num_patches = math.prod(large.grid)
        of = lambda name: 2 * sum(x.size for x in jax.tree.leaves(shapes[name]))
        head = of("head")
        patch_head = of("patch_head" if config.separate_heads else "head")
        group = (config.mask_group or NUM_LARGE) * NUM_LARGE
        how = config.mask_share, config.mask_ratio, num_patches
        hidden = block_masks.upper_counts(group, *how).sum() * NUM_LARGE / group
        of_heads = NUM_LARGE * head + round(hidden * patch_head)
        student = NUM_LARGE * _student_flops(large)
        if sizes.small:
            small = _student_flops(self._models[sizes.small])
            student += self.crops.num_small * (small + head)
        flops = 3 * (student + of_heads) + NUM_LARGE * cost.forward_flops(large)
        flops += of_heads
        if config.gram_weight:
            similarities = 2 * num_patches**2 * self._width
            flops += NUM_LARGE * cost.forward_flops(self._models[sizes.loaded])
            flops += NUM_LARGE * (3 + 1) * similarities
        return flops


def _resize_patches(
    patches: Float[Array, "C n D"], old_grid: Sides, grid: Sides
) -> Float[Array, "C N D"]:
    """Resizes an anchor's patches to the student's grid, as DINOv3 does."""
    if old_grid == grid:
        return patches
    x = patches.astype(jnp.float32).reshape(len(patches), *old_grid, -1)
    x = jax.vmap(lambda each: resizing.resize_grid(each, grid, "bicubic_plain"))(x)
    return x.reshape(len(patches), math.prod(grid), -1)


def _small_norm(network: dict) -> dict[str, Array]:
    """Returns parameters for the norm of small crops, equal to a network's last."""
    encoder = network["Transformer"]
    norm = encoder.get("cls_norm", encoder["encoder_norm"])
    return {f"{_SMALL_NORM}{name}": value for name, value in norm.items()}


def _student_flops(model: Model) -> int:
    """Returns the operations of a forward pass on an image in training."""
    whole, config = cost.forward_flops(model), model.config
    group = config.drop_path_group
    if not group or not config.drop_path_rate:
        return whole
    one = cost.forward_flops(model.replace(depth=1))
    two = cost.forward_flops(model.replace(depth=2))
    kept = max(1, math.floor(group * (1 - config.drop_path_rate) + 1e-9)) / group
    return whole - round((1 - kept) * config.depth * (two - one))
