"""Converts weights: python -m vit_jax.convert --model=runs/x --to=timm --out=exported

--model takes a run's workdir, a file or folder of any format that this project reads,
or an address such as hf://owner/name. --to is one of
  timm         a folder for timm.create_model("local-dir:...")
  timm_naflex  a folder for timm's NaFlexVit, which reads images of any size as patches
  hf           a folder for from_pretrained of transformers
  google       an .npz file with the published names
  safetensors  a file of this project, with everything that a model needs
  mae          a .pth file for facebookresearch/mae, with a run's decoder
  dino         a .pth file for facebookresearch/dino or dinov2, with a run's student and heads
  hf_mae       a folder for ViTMAE of transformers, with a run's decoder
  microsoft    a .pth file for microsoft/Swin-Transformer
  hf_clip      a folder for CLIP or SigLIP of transformers, with the text tower if any
  hf_siglip2   a folder for Siglip2 of transformers, with the text tower if any
  open_clip    a folder for CLIP of OpenCLIP, with its text tower
  hf_dinov3    a folder for DINOv3ViTModel of transformers
  hf_beit      a folder for BeitModel of transformers
  hf_ijepa     a folder for IJepaModel of transformers
  peft         a folder for PeftModel of PEFT: the low-rank updates of a run of lora or adapters
  hf_dinov2    a folder for Dinov2 of transformers, with or without register tokens
  stablehlo    a folder with the whole program, for JAX without this project
  onnx         the whole program for ONNX Runtime; needs: pip install -e '.[onnx]'
  onnx_int8    the same with int8 weights, as --to=onnx --int8 writes it
Class names and preprocessing are written into the formats that can hold them; flags
replace the values stored with the source. --push=owner/name uploads the result with a
model card. Exit codes: 0 done, 2 bad input (one line says what; nothing is left in
--out).
"""

import argparse
import dataclasses
import os
import pathlib

from vit_jax.command_line import cli
from vit_jax.command_line.printing import print_line
from vit_jax.errors import UserError

# Parameters outside the network, by their names in `Pretrained.task_params`.
_TASK_PARTS = {"text": "text tower", "segmenter": "segmentation head"}


def main(flags: argparse.Namespace) -> None:
    """Converts the weights given by the flags."""
    cli.refuse_overrides(flags, "converting")
    # Imported after the flags are checked, so that their errors come at once.
    from vit_jax.weights import export
    from vit_jax.weights.hub import push

    if flags.int8 and flags.to != "onnx":
        raise UserError(f"--int8 is for --to=onnx, not --to={flags.to}; leave it out")
    flags.to += "_int8" if flags.int8 else ""
    out = pathlib.Path(flags.out)
    export.check(flags.to, out, overwrite=flags.overwrite)
    if flags.push:
        push.check_repository(flags.push)
    for name in ("private", "license"):
        if getattr(flags, name) and not flags.push:
            raise UserError(
                f"--{name} is for --push=OWNER/NAME; add that, or leave it out"
            )
    pretrained = open_weights(flags)
    print_line(
        f"read {flags.model}: {pretrained.format} weights of {pretrained.options['variant']}"
    )
    for note in pretrained.notes:
        print_line(f"  {note}")
    files, notes = export.export(pretrained, flags.to, out, overwrite=flags.overwrite)
    print_line(f"wrote {out}")
    for note in notes:
        print_line(f"  {note}")
    for file in files:
        print_line(f"  {file.name}: {file.stat().st_size / 1e6:,.1f} MB")
    print_line("load it in Python:")
    for line in export.usage(flags.to, pretrained, str(out)).splitlines():
        print_line(line)
    if flags.push:
        text = push.model_card(
            pretrained,
            flags.push,
            to=flags.to,
            usage=export.usage(flags.to, pretrained, flags.push, out.name),
            license=flags.license,
            scores=read_scores(flags.model),
        )
        url = push.upload(files, flags.push, text, private=flags.private)
        print_line(f"pushed to {flags.push}: {url}")


def open_weights(flags: argparse.Namespace):
    """Opens a checkpoint; flags override the values stored with it."""
    from vit_jax import weights
    from vit_jax.weights import surgery
    from vit_jax.weights.formats import registry
    from vit_jax.weights.preprocessing import usual_preprocess

    names = cli.read_labels(flags.labels) if flags.labels else ()
    pretrained = weights.open_pretrained(
        flags.model,
        use_ema=not flags.no_ema,
        num_heads=flags.num_heads,
        architecture=flags.architecture,
        with_task=True,
        image_size=flags.resolution,
    )
    num_classes = pretrained.num_classes
    if names and len(names) != num_classes:
        raise UserError(
            f"--labels={flags.labels} has {len(names)} names, but the weights have "
            f"{num_classes} classes: give one name per class"
        )
    given = cli.image_flags(flags)
    lines = []
    preprocess = weights.preprocess_with(pretrained, given, lines.append)
    preprocess.check(pretrained.options["channels"])
    notes = (*pretrained.notes, *lines)
    if not registry.WRITERS[flags.to].with_task:
        notes += tuple(
            f"{what}: left out, --to={flags.to} has no place for it"
            for name, what in _TASK_PARTS.items()
            if name in pretrained.task_params
        )
    writer = registry.WRITERS[flags.to]
    if pretrained.calibration and not (writer.program or writer.any_network):
        scale = f"divide its logits by {pretrained.calibration.temperature:.3g}"
        note = f"calibration: left out, --to={flags.to} has no place for it; {scale}"
        notes = (*notes, note)
    if (
        not pretrained.preprocess
        and not {"mean", "std", "crop_fraction"} <= given.keys()
    ):
        usual, how = (
            usual_preprocess(pretrained).family,
            preprocess.describe(),
        )
        notes += (f"preprocessing: not in the weights, assumed as for {usual}: {how}",)
    resized = flags.resolution not in (None, tuple(pretrained.options["image_size"]))
    if preprocess.max_tokens and not registry.WRITERS[flags.to].program:
        fixed = dataclasses.replace(preprocess, max_tokens=0)
        pretrained = surgery.resize_patches(pretrained, fixed)
    elif resized or flags.patch:
        model, params = surgery.fit_network(pretrained, preprocess)
        pretrained = dataclasses.replace(
            pretrained, params=params, options=model.options
        )
    return dataclasses.replace(
        pretrained,
        preprocess=preprocess,
        class_names=names or pretrained.class_names,
        notes=notes,
    )


def read_scores(source: str) -> dict[str, float]:
    """Returns the accuracies in the report of a workdir; an empty dict without one."""
    from vit_jax.training import run_report

    report = run_report.read_report(source) if os.path.isdir(source) else None
    scores = run_report.flatten_scores(report["final"]) if report else {}
    return {name: value for name, value in scores.items() if name.endswith("/top1")}


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__, local=("out",))
    add = parser.add_argument
    add("--model", required=True, metavar="CHECKPOINT", help="weights, see above")
    add("--to", required=True, metavar="FORMAT", help="format, one of the names above")
    add("--out", required=True, help="folder or file to write")
    add("--int8", action="store_true", help="round the weights of --to=onnx to int8")
    cli.add_step_flag(parser)
    add("--overwrite", action="store_true", help="replace an existing --out")
    add(
        "--no_ema",
        action="store_true",
        help="use the last parameters of a run or training checkpoint, not the average",
    )
    add(
        "--resolution",
        type=cli.size,
        help="image size in pixels, or HEIGHTxWIDTH; default: the weights' size",
    )
    add("--push", default="", metavar="OWNER/NAME", help="repository to upload to")
    add("--private", action="store_true", help="make a new repository private")
    add("--license", default="", help="license for the model card: apache-2.0")
    cli.add_image_flags(parser)
    cli.add_patch_flags(parser)
    return parser


if __name__ == "__main__":
    cli.run(main, parser())
