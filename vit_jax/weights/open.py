"""Opens checkpoints of any format, and fits them to a model."""

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
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.models.layers import CLASSIFIERS
from vit_jax.weights import adapters, checkpoint_folders, rewriting, surgery, workdir
from vit_jax.weights.formats import files, registry, tables
from vit_jax.weights.hub import download
from vit_jax.weights.preprocessing import preprocess_with, usual_preprocess
from vit_jax.weights.pretrained import Pretrained
from vit_jax.weights.surgery import FitRow

# Keys whose difference does not change results, or is reported in another row.
_REPORTED = {
    *("variant", "dtype", "matmul_dtype", "representation_layer"),
    *("posemb_resize", "bias_resize", "patch_resize"),
}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Parameters that fit a model, and a report of the fitting.

    Attributes:
      params: nested dict of arrays, as from `Model.init`.
      rows: parameters that were loaded, resized, replaced, missing or left over, and
        options that differ.
      pretrained: the checkpoint before the fitting.
    """

    params: dict
    rows: tuple[FitRow, ...]
    pretrained: Pretrained

    def table(self) -> list[str]:
        """Returns a line for the checkpoint, for each note and for each row."""
        pretrained = self.pretrained
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
        name = f"{pretrained.format} checkpoint of {pretrained.options['variant']}"
        return [
            f"{name}: {pretrained.source}",
            *pretrained.notes,
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
      use_ema: whether to read the averaged parameters of a workdir or of a PyTorch
        training checkpoint, if it has any.
      num_heads: number of attention heads, for files that do not record it (timm's
        without a config); 0 if unknown.
      architecture: timm's name of the network, for timm files without a config.json.
      with_task: whether to also read the parameters of the task outside the network.
      image_size: height and width during training in pixels, for files whose position
        embeddings have a grid that is not square (Google's).

    Returns:
      The checkpoint, with the names and options of this project.

    Raises:
      UserError: the checkpoint does not exist, is unreadable, or has no known format;
        or
        `num_heads` or `architecture` contradicts it.
    """
    pretrained = _open(
        checkpoint, use_ema, num_heads, architecture, with_task, image_size
    )
    actual = models.create(**pretrained.options).options.get("num_heads", 0)
    if num_heads not in (0, actual):
        raise UserError(
            f"num_heads={num_heads}: {pretrained.source} has num_heads={actual}; leave "
            "it out"
        )
    if architecture and pretrained.format != "timm":
        raise UserError(
            f"architecture={architecture!r}: {pretrained.source} has format "
            f"{pretrained.format}, but this is for timm's files only; leave it out"
        )
    return pretrained


def open_weights(
    checkpoint: str,
    given: Mapping[str, object],
    *,
    use_ema: bool,
    num_heads: int,
    architecture: str = "",
    with_task: bool = False,
    token_merging: int = 0,
    tell: Callable[[str], None],
) -> tuple[Pretrained, Preprocess]:
    """Opens weights, and determines the preprocessing of their images.

    Args:
      checkpoint, use_ema, num_heads, architecture, with_task: arguments of
        `open_pretrained`.
      given: fields of `Preprocess` that replace those of the checkpoint.
      token_merging: number of tokens that each block merges, see models/merging.py.
      tell: function called with one line about all guesses, if there were any.

    Returns:
      The checkpoint and the preprocessing.

    Raises:
      UserError: the checkpoint cannot be opened.
    """
    pretrained = open_pretrained(
        checkpoint,
        use_ema=use_ema,
        num_heads=num_heads,
        architecture=architecture,
        with_task=with_task,
        image_size=given.get("image_size"),
    )
    guesses = list(pretrained.notes)  # For example, a guessed number of heads.
    preprocess = preprocess_with(pretrained, given, guesses.append)
    complete = {"mean", "std", "interpolation", "crop_fraction"} <= given.keys()
    if not pretrained.preprocess and not complete:
        guesses.append(
            "has no preprocessing; assumed the preprocessing of "
            f"{usual_preprocess(pretrained).family}: {preprocess.describe()}"
        )
    pretrained = _name_classes(pretrained, guesses.append)
    pretrained = dataclasses.replace(pretrained, token_merging=token_merging)
    if guesses:
        # The name of a file without its folder; "deit:Ti/16" is not a path.
        place = pathlib.Path(checkpoint)
        name = place.name if place.exists() else checkpoint
        tell(f"{name}: {'; '.join(guesses)}")
    return pretrained, preprocess


def _name_classes(pretrained: Pretrained, tell: Callable[[str], None]) -> Pretrained:
    """Adds ImageNet's class names to a checkpoint with 1,000 unnamed classes."""
    published = pretrained.format not in ("workdir", "vit_jax")
    count = pretrained.options["num_classes"]
    if pretrained.class_names or not published or count != imagenet.NUM_CLASSES:
        return pretrained
    tell("does not name its 1,000 classes; assumed ImageNet's classes")
    return dataclasses.replace(pretrained, class_names=imagenet.class_names())


def _open(
    checkpoint: str | os.PathLike,
    use_ema: bool,
    num_heads: int,
    architecture: str,
    with_task: bool,
    image_size: tuple[int, int] | None,
) -> Pretrained:
    """Reads a checkpoint; `num_heads` is ignored for files that have the number."""
    name = os.fspath(checkpoint)
    of_step = checkpoint_folders.split_step(name)[1] is not None
    path = name if of_step else download.download(name)
    if checkpoint_folders.has_checkpoint(path):
        pretrained = workdir.load_pretrained(path, use_ema=use_ema, with_task=with_task)
        return dataclasses.replace(pretrained, source=name)
    if "://" in os.fspath(path):  # A folder in a bucket can only be a workdir.
        raise UserError(
            f"{name} has no finished checkpoint: give the workdir of a finished run, or "
            "one file with weights"
        )
    tensors = files.read(path, use_ema=use_ema)
    if files.ADAPTER in tensors.sidecars:
        tensors = adapters.merge(tensors, _open_base(tensors, use_ema))
    tensors = dataclasses.replace(tensors, image_size=image_size)
    if architecture:
        if "config.json" in tensors.sidecars:
            raise UserError(
                f"architecture={architecture!r}: {name} has a config.json, which names "
                "the network; leave it out"
            )
        sidecars = tensors.sidecars | {"config.json": {"architecture": architecture}}
        tensors = dataclasses.replace(tensors, sidecars=sidecars)
    return _convert(tensors, num_heads, name)


def _open_base(adapter: files.Tensors, use_ema: bool) -> files.Tensors:
    """Reads the base weights of an adapter under the names of its layers."""
    name = adapters.base_of(adapter)
    place = name if os.path.exists(name) or ":" in name else f"hf://{name}"
    path = download.download(place)
    if not checkpoint_folders.has_checkpoint(path):
        base = files.read(path, use_ema=use_ema)
        if adapters.fits(adapter, base):
            return base
    opened = _open(place, use_ema, 0, "", False, None)
    try:
        return adapters.tensors_of(opened)
    except UserError as error:
        raise UserError(
            f"{adapter.path}: base_model_name_or_path={name!r} in {files.ADAPTER}: {error}; "
            "give the weights that it was trained on, in the format of transformers"
        ) from error


def _convert(tensors: files.Tensors, num_heads: int, name: str) -> Pretrained:
    """Converts the tensors of a file, and checks that a known network results."""
    try:
        reader, tensors = registry.find_reader(tensors)
        pretrained = reader.read(tensors, num_heads)
        for key, value in flatten_dict(pretrained.params, sep="/").items():
            if value.ndim:  # Scalars, such as step counters, are not weights.
                tables.check_floating(key, value, name)
        if is_custom(pretrained.options["variant"]):
            raise UserError(
                f"{name} has model.variant={pretrained.options['variant']!r}, a network "
                "from a module, which is not imported when files of weights are read: "
                "give the workdir of its run"
            )
        try:
            models.create(**pretrained.options)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    except UserError:
        raise
    except (
        Exception
    ) as error:  # For example, a number instead of a list in config.json.
        what = f"{error} is missing" if isinstance(error, KeyError) else repr(error)
        raise UserError(
            f"{name} has a config.json, a header or arrays that are not as its "
            f"format requires: {what}"
        ) from error
    # The name and not the local path: tokenizers are not downloaded with weights.
    tokenizer = name if pretrained.tokenizer == tensors.path else pretrained.tokenizer
    return dataclasses.replace(
        pretrained,
        source=name,
        tokenizer=tokenizer,
        notes=(*tensors.notes, *pretrained.notes),
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
    channels: str = "repeat",
) -> Loaded:
    """Reads a checkpoint of any known format and fits it to a model.

    Args:
      checkpoint, use_ema, with_task: arguments of `open_pretrained`.
      model: model that the parameters are fitted to.
      head, head_bias_init, allow_mismatch, posemb_resize, init, channels: arguments of
        `surgery.fit`.
      class_names: the model's class names; the classes of a kept head are sorted into
        their order.

    Returns:
      The parameters, and a report of the fitting.

    Raises:
      UserError: the checkpoint cannot be read, or does not fit the model.
    """
    # Fitting rejects files with another number of heads, and reports all differences.
    pretrained = _open(
        checkpoint,
        use_ema,
        model.options["num_heads"] if model.config.has_encoder else 0,
        "",
        with_task,
        model.image_shape[:2],
    )
    source = models.create(**pretrained.options)
    given, options, learned = pretrained.params, source.options, []
    if head == "keep" and class_names:
        given, learned = _order_head(pretrained, class_names)
    if _learns_positions(options, model.options):
        flat, options = flatten_dict(given, sep="/"), dict(options)
        learned += rewriting.learn_positions(flat, options, source.grid)
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
            channels=channels,
        )
    except UserError as error:
        hints = _hints(source.options, model.options)
        raise UserError("; ".join([str(error), *hints])) from error
    rows += [
        FitRow("differs", f"{key} {old} in the checkpoint, {new} in the model")
        for key, old, new in _differences(options, model)
    ]
    pretrained = dataclasses.replace(pretrained, notes=(*pretrained.notes, *learned))
    if model.config.stacked:
        params = stacking.stack(params)
    return Loaded(params, tuple(rows), pretrained)


def _order_head(pretrained: Pretrained, names: Sequence[str]) -> tuple[dict, list[str]]:
    """Returns parameters whose head is in the order of other classes, and notes."""
    num_classes = pretrained.options["num_classes"]
    try:
        matched = match(
            names, pretrained.class_names, num_classes, where="classes of the data"
        )
    except UserError as error:
        # A different number of classes is reported when shapes are fitted.
        same = len(names) == num_classes
        return pretrained.params, [f"head kept in its order; {error}"] if same else []
    heads = {
        name: {key: value[..., matched.indices] for key, value in head.items()}
        for name, head in pretrained.params.items()
        if name in CLASSIFIERS
    }
    line = f"head kept: {matched.line}" if matched.line else ""
    return {**pretrained.params, **heads}, [line] if line else []


def _hints(options: dict, wanted: dict) -> list[str]:
    """Returns possible reasons why a checkpoint does not fit a model."""
    hints = []
    if options["variant"] != wanted["variant"]:
        hints.append(
            f"the checkpoint is a {options['variant']} and the model a "
            f"{wanted['variant']}"
        )
    registers, activations = (
        [both.get(name) for both in (options, wanted)]
        for name in ("num_register_tokens", "activation")
    )
    if registers[0] != registers[1]:
        hints.append(f"the checkpoint has model.num_register_tokens={registers[0]}")
    if activations[0] != activations[1] and "swiglu" in activations:
        hints.append(f"the checkpoint has model.activation={activations[0]!r}")
    return hints


def _learns_positions(options: dict, wanted: dict) -> bool:
    """Returns whether a model learns the checkpoint's fixed or factorized positions."""
    places = [both.get("posemb_placement") for both in (options, wanted)]
    factored = "2d" in options.get("posemb", "") and wanted.get("posemb") == "learned"
    return factored and places == ["stem", "stem"]


def _differences(options: dict, model: models.Model) -> list[tuple]:
    """Returns key, old and new value of options that change the computation."""
    wanted, keys = model.options, fields.fields(type(model.config))
    return [
        (name, options[name], wanted[name])
        for name, about in keys.items()
        if name in options
        and options[name] != wanted[name]
        and about.changes_result
        and not about.training_only
        and name not in _REPORTED
    ]


def _shape(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape)) if shape else ""
