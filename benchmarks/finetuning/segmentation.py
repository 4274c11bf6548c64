"""Heads for masks on a published network beside a U-Net from scratch, in equal minutes.

Run:  python -m benchmarks.finetuning.segmentation --out=DIR --mni=DIR --photographs=DIR
          [--model=deit:Ti/16, or a file of it] [--minutes=4] [--sets=...] [--methods=...]
Result: docs/benchmarks/segmentation.md

Two sets of images with exact masks, written to --out:

brain     slices of the MNI152 template (T1), axial, coronal and sagittal, whose pixels are
          grey matter, white matter or neither. --mni is the folder nilearn/datasets/data
          of the package nilearn. Of 30 neighbouring slices the first 18 are for training
          and 4 for validation, 4 apart on both sides. The template is symmetric, so
          sagittal slices are of one half.
mosaics   polygons, each filled from another photograph; the class of a pixel is the class
          of its photograph. --photographs has train/CLASS and val/CLASS, and mosaics of
          one split show photographs of that split alone.

Four methods, one after the other, for as many steps as fit the minutes by a trial of each:
DeiT-Ti frozen with a linear head ("frozen"), fine-tuned with it ("linear"), fine-tuned with
a pyramid ("pyramid"), and a U-Net ("unet"). Transforms, batch and image size are the same.

Prints a line for each run: scores of the last parameters on the validation images, minutes of
the steps, steps, and the mean IoU minus scikit-learn's of the masks that `load_model(...).segment`
gives. The last line is the time of `predict --out` on the validation images.
Runs that are done are kept. Needs scikit-learn.
"""

import argparse
import dataclasses
import gzip
import json
import pathlib
import subprocess
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageOps

from benchmarks import smoke
from vit_jax.config.fields import key
from vit_jax.models import NetworkConfig
from vit_jax.models.segmenter import depth_to_space

TRIAL = 20  # Steps.
MOSAICS = {"train": 1_000, "val": 150}
# Of slices in a row: trained on, and validated on; the others are of neither.
CYCLE, TRAINED, VALIDATED = 30, range(18), range(22, 26)
BRAIN = ("neither", "grey matter", "white matter")
ADAPTED = {"learning_rate": 5e-4, "weight_decay": 0.05, "layer_decay": 0.75}
# Sections of the config, not tuned on either set.
METHODS = {
    "frozen": {
        "task": {"head": "linear", "frozen": True},
        "optim": {"learning_rate": 1e-3, "weight_decay": 1e-4},
    },
    "linear": {"task": {"head": "linear"}, "optim": ADAPTED},
    "pyramid": {
        "task": {"head": "pyramid", "layers": (2, 5, 8, 11), "width": 128},
        "optim": ADAPTED,
    },
    "unet": {
        "task": {"head": "linear"},
        "optim": {"learning_rate": 1e-3, "weight_decay": 0.01},
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNetConfig(NetworkConfig):
    """U-Net (arXiv:1505.04597), padded, with GroupNorm; its head is the task's."""

    side_multiple = 16  # The coarsest map has cells of so many pixels.
    width: int = key(16, "Features at full resolution, twice as many at each halving.")

    def build(self, num_classes, image_shape):
        return UNet(self.width)


class UNet(nn.Module):
    """Returns a feature vector for each pixel."""

    width: int
    halvings: int = 4

    @nn.compact
    def __call__(self, images, *, train=False, classify=True):
        x, kept = images, []
        for level in range(self.halvings):
            kept.append(x := self._block(x, level))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = self._block(x, self.halvings)
        for level in reversed(range(self.halvings)):
            x = depth_to_space(nn.Dense(4 * self.width * 2**level)(x))
            x = self._block(jnp.concatenate([kept[level], x], -1), level)
        return {"pre_logits": x.mean((1, 2))} if classify else x

    def _block(self, x, level):
        for _ in range(2):
            x = nn.Conv(self.width * 2**level, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.GroupNorm(num_groups=8)(x))
        return x


def read_nifti(path):
    """Returns the bytes of the voxels, (x, y, z) from left, back and below, of a file."""
    content = gzip.decompress(path.read_bytes())
    sides = np.frombuffer(content, "<i2", 3, offset=42)
    (kind,) = np.frombuffer(content, "<i2", 1, offset=70)
    (start,) = np.frombuffer(content, "<f4", 1, offset=108)
    if kind != 2:  # Unsigned bytes.
        raise SystemExit(f"{path}: its voxels are not bytes")
    return np.frombuffer(content, np.uint8, offset=int(start)).reshape(sides, order="F")


def save(folder, split, name, image, mask):
    """Writes an image and its mask."""
    for kind, pixels in (("images", image), ("masks", mask)):
        path = folder / kind / split / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


def make_brain(source, folder):
    """Writes slices of the template that show grey or white matter."""
    t1, grey, white = (
        read_nifti(source / f"mni_icbm152_{name}_tal_nlin_sym_09a_converted.nii.gz")
        for name in ("t1", "gm", "wm")
    )
    classes = np.argmax([np.full_like(grey, 127), grey, white], 0).astype(np.uint8)
    for axis, direction in enumerate(("sagittal", "coronal", "axial")):
        first = t1.shape[0] // 2 if direction == "sagittal" else 0
        for i in range(first, t1.shape[axis]):
            mask = classes.take(i, axis)
            if (mask > 0).mean() < 0.02:
                continue
            place = (i - first) % CYCLE
            for split, places in (("train", TRAINED), ("val", VALIDATED)):
                if place in places:
                    image = t1.take(i, axis)
                    upright = [np.ascontiguousarray(a.T[::-1]) for a in (image, mask)]
                    save(folder, split, f"{direction}_{i:03d}", *upright)
    (folder / "classes.txt").write_text("\n".join(BRAIN) + "\n")


def make_mosaics(source, folder, counts, side):
    """Writes mosaics of 3 to 6 photographs in the cells of as many random points."""
    rng = np.random.default_rng(0)
    names = sorted(path.name for path in (source / "train").iterdir())
    grid = np.mgrid[:side, :side].reshape(2, 1, -1)
    for split, count in counts.items():
        files = sorted((source / split).glob("*/*"))
        for number in range(count):
            points = rng.uniform(0, side, (2, rng.integers(3, 7), 1))
            cells = ((grid - points) ** 2).sum(0).argmin(0).reshape(side, side)
            image = np.zeros((side, side, 3), np.uint8)
            mask = np.zeros((side, side), np.uint8)
            chosen = rng.choice(len(files), points.shape[1], replace=False)
            for cell in np.unique(cells):
                inside, file = cells == cell, files[chosen[cell]]
                rows, columns = (np.flatnonzero(inside.any(a)) for a in (1, 0))
                box = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
                part = inside[box]
                photograph = Image.open(file).convert("RGB")
                fitted = ImageOps.fit(photograph, part.shape[::-1])
                image[box][part] = np.asarray(fitted)[part]
                mask[inside] = names.index(file.parent.name)
            save(folder, split, f"{number:04d}", image, mask)
    (folder / "classes.txt").write_text("\n".join(names) + "\n")


def config_of(method, folder, steps, args):
    """Returns the config of a run."""
    of_method = METHODS[method]
    model = {"variant": "Ti/16", "activation": "gelu"}
    if method == "unet":
        model = {"variant": "benchmarks.finetuning.segmentation:UNetConfig"}
    found = {
        "name": f"{folder.name}_{method}",
        "total_steps": steps,
        "batch_size": args.batch,
        "task": dict(name="segmentation", **of_method["task"]),
        "model": model,
        "evals": {"val": {"kind": "segmentation", "split": "val"}},
        "ema": {"decay": 0.0},
        "log_every_steps": max(1, steps // 20),
        "checkpoint_every_steps": steps,
    }
    if method != "unet" and args.model:
        found["init"] = args.model
    found["optim"] = dict(
        warmup_fraction=0.1, schedule="cosine", grad_clip_norm=1.0, **of_method["optim"]
    )
    found["data"] = {
        "name": "masks",
        "data_dir": str(folder),
        "mask_key": "masks",
        "num_classes": len((folder / "classes.txt").read_text().splitlines()),
        "split": "train",
        "image_size": (args.side, args.side),
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "train_transform": "scale_crop(scale=(0.75, 1.5)) | flip",
    }
    return found


def train(method, folder, args):
    """Returns the workdir and the report of a run as long as the minutes."""
    import vit_jax

    steps, trial = args.steps, args.out / "trials" / f"{folder.name}_{method}"
    if not steps:
        if not (trial / "report.json").exists():
            vit_jax.train(config_of(method, folder, TRIAL, args), trial, evals={})
        speed = json.loads((trial / "report.json").read_text())["images_per_second"]
        steps = int(60 * args.minutes * speed / args.batch)
    workdir = args.out / f"{folder.name}_{method}"
    if not (workdir / "report.json").exists():
        vit_jax.train(config_of(method, folder, steps, args), workdir)
    return workdir, json.loads((workdir / "report.json").read_text())


def sklearn_miou(workdir, folder):
    """Returns scikit-learn's mean IoU over all pixels of all validation images."""
    from sklearn.metrics import jaccard_score

    import vit_jax

    files = sorted((folder / "images" / "val").iterdir())
    predicted = vit_jax.load_model(workdir).segment(files)
    masks = [Image.open(folder / "masks" / "val" / file.name) for file in files]
    true, predicted = (
        np.concatenate([np.asarray(each).ravel() for each in maps])
        for maps in (masks, predicted)
    )
    return float(jaccard_score(true, predicted, average="macro"))


def measure(method, folder, args):
    """Returns what is printed of one run."""
    workdir, report = train(method, folder, args)
    scores = report["final"]["val"]["params"]
    steps, speed = report["steps"], report["images_per_second"]
    return {
        "set": folder.name,
        "method": method,
        "scores": {name: round(value, 4) for name, value in scores.items()},
        "minutes": round(steps * args.batch / speed / 60, 2),
        "steps": steps,
        "minus scikit-learn": scores["miou"] - sklearn_miou(workdir, folder),
    }


def time_predict(workdir, folder):
    """Returns images and seconds from Python's start to the last line of `predict --out`."""
    images, out = folder / "images" / "val", workdir / "predicted"
    words = ["-m", "vit_jax.predict", f"--model={workdir}", f"--out={out}", str(images)]
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return len(list(images.iterdir())), time.perf_counter() - began


def make_smoke_sets(args):
    """Writes a few random voxels and photographs where the sets are made of."""
    rng = np.random.default_rng(0)
    header = bytearray(352)
    header[40:56] = np.array([3, 40, 46, 44, 1, 1, 1, 1], "<i2").tobytes()
    header[70:72], header[108:112] = b"\2\0", np.float32(352).tobytes()
    args.mni.mkdir()
    for name in ("t1", "gm", "wm"):
        content = bytes(header) + rng.bytes(40 * 46 * 44)
        path = args.mni / f"mni_icbm152_{name}_tal_nlin_sym_09a_converted.nii.gz"
        path.write_bytes(gzip.compress(content))
    for split in ("train", "val"):
        for label in ("daisy", "rose"):
            to = args.photographs / split / label
            to.mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(0, 256, (50, 60, 3), np.uint8)
                Image.fromarray(pixels).save(to / f"{i}.png")


def main():
    """Makes the sets and runs the methods on them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=pathlib.Path, required=True, help="gets the sets and the runs")
    add("--mni", type=pathlib.Path, required=True)
    add("--photographs", type=pathlib.Path, required=True)
    add("--model", default="deit:Ti/16")
    add("--minutes", type=float, default=4.0, help="of the steps of each run")
    add("--steps", type=int, default=0, help="of each run, in place of minutes")
    add("--side", type=int, default=160, help="pixels of an image's side")
    add("--batch", type=int, default=16)
    add("--sets", default="brain,mosaics")
    add("--methods", default=",".join(METHODS))
    args = smoke.parse(
        parser,
        "--out={folder}/runs --mni={folder}/mni --photographs={folder}/photographs "
        "--model= --steps=2 --side=32 --batch=2",
    )
    counts = MOSAICS
    if args.smoke:
        smoke.shrink()
        make_smoke_sets(args)
        METHODS["pyramid"]["task"]["layers"], counts = (-1,), {"train": 4, "val": 2}
        args.methods = "unet"  # On the first set; then a pyramid, on the second.
    args.out = args.out.resolve()
    makers = {
        "brain": lambda to: make_brain(args.mni, to),
        "mosaics": lambda to: make_mosaics(args.photographs, to, counts, args.side),
    }
    for name in args.sets.split(","):
        folder = args.out / "sets" / name
        if not (folder / "classes.txt").exists():
            makers[name](folder)
        for method in args.methods.split(","):
            print(json.dumps(measure(method, folder, args)), flush=True)
            jax.clear_caches()
        if args.smoke:
            args.methods = "pyramid"
    workdir = args.out / f"{folder.name}_pyramid"
    images, seconds = time_predict(workdir, folder)
    print(f"predict --out: {images} images in {seconds:.1f} s")


if __name__ == "__main__":
    main()
