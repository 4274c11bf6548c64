"""Programs: a network and its weights that run without this project.

- `stablehlo`: a program of `jax.export` (docs.jax.dev/en/latest/export), for JAX on
  CPU, GPU and TPU. JAX can read it for at least half a year of later releases.
- `onnx`: written by jax2onnx (github.com/enpasos/jax2onnx), with the extra `onnx`.

A program accepts any number of resized and cropped images, and normalises them. If the
preprocessing keeps the aspect ratio of images, it accepts sequences of patches instead:
pixels, and the grids of the images (models/patches.py). Its folder has the
preprocessing in `preprocess.json`, and the class names in `labels.txt`. Letters: B
images, H, W pixels, C channels.
"""

import contextlib
import dataclasses
import io
import json
import logging
import pathlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from vit_jax.data.transforms import device as device_transforms
from vit_jax.errors import UserError
from vit_jax.models import segmenter
from vit_jax.models.patches import PatchSequences
from vit_jax.models.targets import Decoded
from vit_jax.weights import surgery
from vit_jax.weights.calibration import LEVELS
from vit_jax.weights.formats.registry import WRITERS, Writer
from vit_jax.weights.preprocessing import with_patch
from vit_jax.weights.pretrained import Pretrained
from vit_jax.weights.segmenter import has_segmenter, segmenter_of

_STABLEHLO, _ONNX = "model.stablehlo", "model.onnx"
_PREPROCESS, _LABELS = "preprocess.json", "labels.txt"
_PLATFORMS = ("cpu", "cuda", "tpu")
_OPSET = 21  # Supported by ONNX Runtime since version 1.20.
_INPUTS = "images", "grids"


@dataclasses.dataclass(frozen=True)
class Program:
    """A network as a function.

    Attributes:
      function: function of parameters and images, (B, H, W, C), or sequences, that
        returns the outputs, each in float32.
      params: parameters on the host.
      shape: shape of an image, (H, W, C), or of the patches of one image.
      outputs: names of the outputs: "logits" (B, classes) if there is a classifier, and
        "pre_logits" (B, D), the features of the image, if the network has them; for a
        segmentation head only "logits" (B, H, W, classes); for numbers the fields of
        `models.targets.Decoded` that are known, such as "values" (B, T), in place of
        "logits".
      pixels: dtype of the images.
      any_size: whether the program accepts sequences.
    """

    function: Callable[[dict, jax.Array], tuple[jax.Array, ...]]
    params: dict
    shape: tuple[int, int, int]
    outputs: tuple[str, ...]
    pixels: str
    any_size: bool = False

    @property
    def batch(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of any number of images, (B, H, W, C), and their grids, (B, 1, 2)."""
        scope = jax.export.SymbolicScope()

        def any_number(shape, dtype):
            sides = ", ".join(map(str, ("B", *shape)))
            symbolic = jax.export.symbolic_shape(sides, scope=scope)
            return jax.ShapeDtypeStruct(symbolic, dtype)

        images = any_number(self.shape, self.pixels)
        grids = (any_number((1, 2), jnp.int32),) if self.any_size else ()
        return images, *grids


def build(pretrained: Pretrained) -> Program:
    """Builds the function of a checkpoint, in float32.

    Args:
      pretrained: a checkpoint with preprocessing, whose image size may be different
        from the network's.

    Raises:
      UserError: the preprocessing is missing or does not fit.
    """
    how = pretrained.preprocess
    if how is None:
        raise UserError(
            f"{pretrained.source}: its preprocessing is unknown, which a program "
            "contains: give --mean, --std and --crop_pct"
        )
    how = with_patch(how, pretrained.options)
    # Memory layouts for GPUs, or for products of bfloat16, would not be portable.
    portable = {"dtype": "float32", "matmul_dtype": "", "platform": "cpu"}
    options = {**pretrained.options, **portable}
    any_size = bool(how.max_tokens)
    if any_size and has_segmenter(pretrained):
        raise UserError(
            f"max_tokens={how.max_tokens} with a segmentation head, whose programs need "
            "windows of one size: set --max_tokens=0"
        )
    model, params = surgery.fit_network(
        dataclasses.replace(pretrained, options=options), how
    )

    def run(params, images, *grids):
        images = device_transforms.normalize(images, how.mean, how.std)
        outputs = apply(params, PatchSequences(images, *grids) if grids else images)
        if decisions and "logits" in names:
            outputs = outputs | {"logits": decisions.scale(outputs["logits"])}
        return tuple(outputs[name].astype(jnp.float32) for name in names)

    decisions = pretrained.calibration
    shape, apply = model.image_shape, model.apply
    if has_segmenter(pretrained):
        segment = segmenter_of(pretrained, model)
        apply = lambda *args: {"logits": segmenter.resize(segment(*args), shape[:2])}
    if pretrained.targets:
        network = apply

        def apply(*args):
            outputs = network(*args)
            decoded = pretrained.targets.decode(outputs["logits"], jnp)._asdict()
            return outputs | {k: v for k, v in decoded.items() if v is not None}

    example = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    shapes = jax.eval_shape(apply, params, example)
    known = (*Decoded._fields, "pre_logits")
    if not pretrained.targets:
        known = "logits", "pre_logits"
    names = tuple(name for name in known if name in shapes)
    if not pretrained.num_classes:
        names = tuple(name for name in names if name != "logits")
    if any_size:
        shape = how.transforms[-1].output_shapes(shape[-1])["image"]
    return Program(run, params, shape, names, how.pixels, any_size)


def write_stablehlo(pretrained: Pretrained, folder: pathlib.Path) -> list[str]:
    """Writes a folder with a program of `jax.export`; see `registry.Writer`."""
    program = build(pretrained)

    @jax.jit
    def images_to_outputs(*images):
        outputs = program.function(program.params, *images)
        return dict(zip(program.outputs, outputs, strict=True))

    export = jax.export.export(images_to_outputs, platforms=_PLATFORMS)
    exported = export(*program.batch)
    (folder / _STABLEHLO).write_bytes(exported.serialize())
    return _write_sidecars(pretrained, program, folder)


def write_onnx(pretrained: Pretrained, folder: pathlib.Path) -> list[str]:
    """Writes a folder with an ONNX program; see `registry.Writer`.

    Raises:
      UserError: the extra is not installed.
    """
    # Both libraries warn about missing optional parts and about every shape.
    for name in ("jax2onnx", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with silenced():
            import jax2onnx
    except ImportError as error:
        raise UserError(
            f"--to=onnx needs jax2onnx ({error}): pip install -e '.[onnx]' in the clone"
        ) from error
    program = build(pretrained)
    # jax2onnx prints what it traces, and adds vectors to images.
    with silenced(), jax.numpy_rank_promotion("allow"):
        jax2onnx.to_onnx(
            lambda *images: program.function(program.params, *images),
            list(program.batch),
            model_name=pretrained.options["variant"],
            opset=_OPSET,
            return_mode="file",
            output_path=folder / _ONNX,
            input_names=list(_inputs(pretrained)),
            output_names=list(program.outputs),
        )
    return _write_sidecars(pretrained, program, folder)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Discards what a library prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        yield


def _write_sidecars(
    pretrained: Pretrained, program: Program, folder: pathlib.Path
) -> list[str]:
    """Writes the preprocessing, and class names and decisions if there are any.

    Returns:
      A line about the decisions, if there are any.
    """
    content = dataclasses.asdict(pretrained.preprocess) | {
        "channels": program.shape[-1],
        "input": f"{_INPUTS[0]}: {program.pixels} (any number, {', '.join(map(str, program.shape))}), "
        "normalised by the program",
        "outputs": list(program.outputs),
    }
    if pretrained.targets:
        content["targets"] = dataclasses.asdict(pretrained.targets)
    else:
        content["probabilities"] = (
            "sigmoid" if pretrained.loss == "sigmoid" else "softmax"
        )
        content["multi_label"] = pretrained.multi_label
    if program.any_size:
        content["input"] += (
            f"; {_INPUTS[1]}: int32 (as many, 1, 2), rows and columns of patches"
        )
    decisions, notes = pretrained.calibration, []
    if decisions:
        content["calibration"] = _described(pretrained)
        notes.append(
            f"calibration: the program divides the logits by {decisions.temperature:.3g} "
            f"and adds {decisions.bias:.3g}; thresholds and sets are in {_PREPROCESS}"
        )
    (folder / _PREPROCESS).write_text(json.dumps(content, indent=2) + "\n")
    if pretrained.class_names:
        lines = "".join(f"{name}\n" for name in pretrained.class_names)
        (folder / _LABELS).write_text(lines)
    return notes


def _described(pretrained: Pretrained) -> dict:
    """Returns the decisions of a model for programs in other languages."""
    decisions = pretrained.calibration
    smallest = {}
    for level in LEVELS if decisions.scores else ():
        with contextlib.suppress(UserError):  # Too few images for this coverage.
            smallest[f"{level:g}"] = decisions.smallest_probability(level)
    return {
        "logits": "scaled by the program",
        "temperature": decisions.temperature,
        "bias": decisions.bias,
        "thresholds": list(decisions.thresholds),
        "smallest_probability_by_coverage": smallest,
        "fitted": dict(decisions.fitted),
        "measured": dict(decisions.measured),
    }


def _inputs(pretrained: Pretrained) -> tuple[str, ...]:
    return _INPUTS if pretrained.preprocess.max_tokens else _INPUTS[:1]


def _stablehlo_usage(pretrained: Pretrained, place: str, _hub: bool) -> str:
    given = ", ".join(_inputs(pretrained))
    return (
        "import jax, pathlib\n"
        f'data = pathlib.Path("{place}/{_STABLEHLO}").read_bytes()\n'
        f"outputs = jax.export.deserialize(bytearray(data)).call({given})"
    )


def _onnx_usage(pretrained: Pretrained, place: str, _hub: bool) -> str:
    given = ", ".join(f'"{name}": {name}' for name in _inputs(pretrained))
    output = "values" if pretrained.targets else "logits"
    return (
        "import onnxruntime\n"
        f'session = onnxruntime.InferenceSession("{place}/{_ONNX}")\n'
        f'{output} = session.run(["{output}"], {{{given}}})[0]'
    )


WRITERS["stablehlo"] = Writer(
    write_stablehlo,
    usage=_stablehlo_usage,
    program=True,
    files=(_STABLEHLO, _PREPROCESS, _LABELS),
)
WRITERS["onnx"] = Writer(
    write_onnx,
    usage=_onnx_usage,
    library="onnx",
    program=True,
    files=(_ONNX, f"{_ONNX}.data", _PREPROCESS, _LABELS),
)
