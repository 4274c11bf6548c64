"""Opens any published checkpoint, and fits it to a model or to the model of a run."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.config import fields
from vit_jax.config.fields import is_custom
from vit_jax.data import imagenet
from vit_jax.data.class_names import match
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.models.layers import CLASSIFIERS
from vit_jax.weights import adapters, rewriting, surgery, workdir
from vit_jax.weights.formats import files, registry, tables
from vit_jax.weights.hub import download
from vit_jax.weights.pretrained import (
    Preprocess,
    Pretrained,
    describe_preprocess,
    preprocessing_of,
    usual_preprocess,
)
from vit_jax.weights.surgery import FitRow

# Keys whose difference is no change of results, or is said in other words.
_SAID = {"variant", "dtype", "posemb_resize", "bias_resize", "representation_layer"}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Parameters that fit a model, and a report of the fitting.

    Attributes:
      params: nested dict of arrays, as from `Model.init`.
      rows: what was loaded, resized, replaced, missing, left over or differs.
      pretrained: the checkpoint as it was read.
    """

    params: dict
    rows: tuple[FitRow, ...]
    pretrained: Pretrained

    def table(self) -> list[str]:
        """Returns a line for the checkpoint, and one for each note and each row."""
        found = self.pretrained
        cells = [
            (f"{row.what}: {row.action}", *map(_shape, (row.before, row.after)))
            for row in self.rows
        ]
        if any(before or after for _, before, after in cells):
            cells.insert(0, ("", "checkpoint", "model"))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = (
            "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
            for line in cells
        )
        return [
            f"{found.format} checkpoint of {found.options['variant']}: {found.source}",
            *found.notes,
            *lines,
        ]


def open_pretrained(
    checkpoint: str | os.PathLike,
    *,
    use_ema: bool = True,
    num_heads: int = 0,
    architecture: str = "",
    with_task: bool = False,
    image_size: tuple[int, int] | None = None,
) -> Pretrained:
    """Reads a checkpoint of any known format.

    Args:
      checkpoint: a workdir, WORKDIR/checkpoints/STEP, a file or folder with weights, or
        any source that `hub.download` takes: "hf://owner/name", "timm/...", "gs://...",
        "https://...", "augreg:B/16". A LoRA adapter of PEFT is merged into its base.
      use_ema: read the averaged parameters of a workdir if it has them.
      num_heads: attention heads, for files that do not state them (timm's without a
        config); 0 if unknown.
      architecture: timm's name of the network, for its files without a config.json.
      with_task: read what a workdir's task has beside the network too.
      image_size: height and width that it was trained at, for files that do not tell the
        sides of a grid of positions that is no square (Google's).

    Returns:
      The checkpoint under the names and options of this project.

    Raises:
      UserError: the checkpoint does not exist, is unreadable, or of no known format; or
        `num_heads` or `architecture` is not what it states.
    """
    found = _open(checkpoint, use_ema, num_heads, architecture, with_task, image_size)
    own = models.create(**found.options).options.get("num_heads", 0)
    if num_heads not in (0, own):
        raise UserError(
            f"num_heads={num_heads}: {found.source} is of num_heads={own}; leave it out"
        )
    if architecture and found.format != "timm":
        raise UserError(
            f"architecture={architecture!r}: {found.source} is of format {found.format}, "
            "and this is for timm's; leave it out"
        )
    return found


def open_weights(
    checkpoint: str,
    given: Mapping[str, object],
    *,
    use_ema: bool,
    num_heads: int,
    architecture: str = "",
    with_task: bool = False,
    tell: Callable[[str], None],
) -> tuple[Pretrained, Preprocess]:
    """Opens weights, and returns the preprocessing of their images.

    Args:
      checkpoint, use_ema, num_heads, architecture, with_task: as of `open_pretrained`.
      given: fields of `Preprocess` that replace those of the checkpoint.
      tell: called with one line about all that was guessed, if anything was.

    Returns:
      The checkpoint and the preprocessing.

    Raises:
      UserError: there is no checkpoint, or it cannot be read.
    """
    pretrained = open_pretrained(
        checkpoint,
        use_ema=use_ema,
        num_heads=num_heads,
        architecture=architecture,
        with_task=with_task,
        image_size=given.get("image_size"),
    )
    guesses = list(pretrained.notes)  # Such as a guessed number of heads.
    preprocess = dataclasses.replace(preprocessing_of(pretrained), **given)
    complete = {"mean", "std", "interpolation", "crop_fraction"} <= given.keys()
    if not pretrained.preprocess and not complete:
        guesses.append(
            "does not tell how its images are prepared; assumed as of "
            f"{usual_preprocess(pretrained).family}: {describe_preprocess(preprocess)}"
        )
    pretrained = _name_classes(pretrained, guesses.append)
    if guesses:
        # Of a file its name alone; "deit:Ti/16" is no path.
        place = pathlib.Path(checkpoint)
        name = place.name if place.exists() else checkpoint
        tell(f"{name}: {'; '.join(guesses)}")
    return pretrained, preprocess


def _name_classes(pretrained: Pretrained, tell: Callable[[str], None]) -> Pretrained:
    """Returns a checkpoint with the names of ImageNet's classes if it has 1,000 unnamed."""
    published = pretrained.format not in ("workdir", "vit_jax")
    count = pretrained.options["num_classes"]
    if pretrained.class_names or not published or count != imagenet.NUM_CLASSES:
        return pretrained
    tell("does not name its 1,000 classes; taken for ImageNet's")
    return dataclasses.replace(pretrained, class_names=imagenet.class_names())


def _open(
    checkpoint: str | os.PathLike,
    use_ema: bool,
    num_heads: int,
    architecture: str,
    with_task: bool,
    image_size: tuple[int, int] | None,
) -> Pretrained:
    """See `open_pretrained`; `num_heads` is without effect where a file states them."""
    name = os.fspath(checkpoint)
    of_step = workdir.split_step(name)[1] is not None
    path = name if of_step else download.download(name)
    if workdir.has_checkpoint(path):
        found = workdir.load_pretrained(path, use_ema=use_ema, with_task=with_task)
        return dataclasses.replace(found, source=name)
    if "://" in os.fspath(path):  # A folder in a bucket can only be a workdir.
        raise UserError(
            f"{name} has no finished checkpoint: give the workdir of a finished run, or "
            "one file with weights"
        )
    tensors = files.read(path)
    if files.ADAPTER in tensors.sidecars:
        base = adapters.base_of(tensors)
        place = base if os.path.exists(base) else f"hf://{base}"
        tensors = adapters.merge(tensors, files.read(download.download(place)))
    tensors = dataclasses.replace(tensors, image_size=image_size)
    if architecture:
        if "config.json" in tensors.sidecars:
            raise UserError(
                f"architecture={architecture!r}: {name} has a config.json, which states "
                "the network; leave it out"
            )
        sidecars = tensors.sidecars | {"config.json": {"architecture": architecture}}
        tensors = dataclasses.replace(tensors, sidecars=sidecars)
    try:
        reader, tensors = registry.find_reader(tensors)
        found = reader.read(tensors, num_heads)
        for key, value in flatten_dict(found.params, sep="/").items():
            if value.ndim:  # Scalars, such as step counters, are not weights.
                tables.check_floating(key, value, name)
        if is_custom(found.options["variant"]):
            raise UserError(
                f"{name} is of model.variant={found.options['variant']!r}, a network of "
                "a module, and reading files of weights imports no module: give the "
                "workdir of its run"
            )
        try:
            models.create(**found.options)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    except UserError:
        raise
    except Exception as error:  # For example a number instead of a list in config.json.
        what = f"{error} is missing" if isinstance(error, KeyError) else repr(error)
        raise UserError(
            f"{name} has a config.json, a header or arrays of another form than its "
            f"format has: {what}"
        ) from error
    # By its name, because files of a tokenizer are not downloaded with weights.
    tokenizer = name if found.tokenizer == tensors.path else found.tokenizer
    notes = (*tensors.notes, *found.notes)
    return dataclasses.replace(
        found,
        source=name,
        tokenizer=tokenizer,
        notes=notes,
        architecture=tensors.config.get("architecture", ""),
    )


def load(
    checkpoint: str | os.PathLike,
    model: models.Model,
    *,
    head: str = "keep",
    head_bias_init: float = 0.0,
    allow_mismatch: Sequence[str] = (),
    posemb_resize: str = "",
    use_ema: bool = True,
    init: Callable[[], dict] | None = None,
    with_task: bool = False,
    class_names: Sequence[str] = (),
) -> Loaded:
    """Reads a checkpoint of any known format and fits it to a model.

    Args:
      checkpoint, use_ema: see `open_pretrained`.
      model: to fit the parameters to.
      head, head_bias_init, allow_mismatch: see `surgery.fit`.
      posemb_resize: likewise; "" is as the checkpoint's network says.
      init: returns the initial values of parameters that may be missing; `model.init`
        with key 0 if None.
      with_task: see `open_pretrained`.
      class_names: of the model, to which a head that is kept is put in order.

    Returns:
      The parameters, and a table of what fitting did.

    Raises:
      UserError: the checkpoint cannot be read, or does not fit the model.
    """
    # A file of other heads is refused where it is fitted, which says what differs.
    found = _open(
        checkpoint,
        use_ema,
        model.options["num_heads"] if model.has_encoder else 0,
        "",
        with_task,
        model.image_shape[:2],
    )
    source = models.create(**found.options)
    given, theirs, learned = found.params, source.options, []
    if head == "keep" and class_names:
        given, learned = _order_head(found, class_names)
    if _learns_positions(theirs, model.options):
        flat, theirs, notes = rewriting.learn_positions(
            flatten_dict(given, sep="/"), theirs, source.grid
        )
        learned += notes
        given = unflatten_dict(flat, sep="/")
    try:
        params, rows = surgery.fit(
            given,
            model,
            source,
            head=head,
            head_bias_init=head_bias_init,
            posemb_resize=posemb_resize,
            allow_mismatch=allow_mismatch,
            init=init,
        )
    except UserError as error:
        hints = _hints(source.options, model.options)
        raise UserError("; ".join([str(error), *hints])) from error
    rows += [
        FitRow("differs", f"{key} {old} in the checkpoint, {new} in the model")
        for key, old, new in _differences(theirs, model)
    ]
    found = dataclasses.replace(found, notes=(*found.notes, *learned))
    if model.stacked:
        params = stacking.stack(params)
    return Loaded(params, tuple(rows), found)


def _order_head(found: Pretrained, names: Sequence[str]) -> tuple[dict, list[str]]:
    """Returns parameters with the head in the order of other classes, and notes."""
    num_classes = found.options["num_classes"]
    try:
        matched = match(
            names, found.class_names, num_classes, where="classes of the data"
        )
    except UserError as error:
        # Another number of classes does not fit, which is told of the shapes.
        same = len(names) == num_classes
        return found.params, [f"head kept class by class; {error}"] if same else []
    heads = {
        name: {key: value[..., matched.indices] for key, value in head.items()}
        for name, head in found.params.items()
        if name in CLASSIFIERS
    }
    line = f"head kept: {matched.line}" if matched.line else ""
    return {**found.params, **heads}, [line] if line else []


def _hints(theirs: dict, ours: dict) -> list[str]:
    """Returns what may be the reason that a checkpoint does not fit a model."""
    hints = []
    if theirs["variant"] != ours["variant"]:
        hints.append(
            f"the checkpoint is a {theirs['variant']} and the model a {ours['variant']}"
        )
    registers, gated = (
        [options.get(name) for options in (theirs, ours)]
        for name in ("num_register_tokens", "activation")
    )
    if registers[0] != registers[1]:
        hints.append(f"the checkpoint has model.num_register_tokens={registers[0]}")
    if gated[0] != gated[1] and "swiglu" in gated:
        hints.append(f"the checkpoint has model.activation={gated[0]!r}")
    return hints


def _learns_positions(theirs: dict, ours: dict) -> bool:
    """Returns whether a model learns positions that are fixed or factored in a source."""
    placed = [options.get("posemb_placement") for options in (theirs, ours)]
    factored = "2d" in theirs.get("posemb", "") and ours.get("posemb") == "learned"
    return factored and placed == ["stem", "stem"]


def _differences(theirs: dict, model: models.Model) -> list[tuple]:
    """Returns the keys by which the same parameters compute something else."""
    ours, keys = model.options, fields.fields(type(model.config))
    return [
        (name, theirs[name], ours[name])
        for name, about in keys.items()
        if name in theirs
        and theirs[name] != ours[name]
        and about.changes_result
        and not about.training_only
        and name not in _SAID
    ]


def _shape(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape)) if shape else ""
