"""Features of JPEG files against the bare forward pass of the same network.

Run:  python -m benchmarks.prediction.features [--images=10000] [--data=FOLDER]

The bare pass has its images on the device and only computes; features are made as
evaluations make them: files are read, decoded, resized and cropped in threads, sent,
computed, and fetched into one array. --images go through each of them, in rounds that
alternate, so that the machine's moods hit both: 12 minutes for S/16 on 2 cores that do
30 images a second. Prints medians of the rounds, their ratio, and in brackets the
quartiles of the ratios of single rounds. Without --data the files are made: blurred
noise of 500x375 pixels.
"""

import argparse
import io
import pathlib
import tempfile
import time

import jax
import numpy as np
from PIL import Image, ImageFilter

from benchmarks import smoke
from vit_jax import models
from vit_jax.data import pipeline
from vit_jax.data.config import DataConfig
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources import folder
from vit_jax.data.transforms import device as transforms
from vit_jax.distributed import compilation
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.evaluators import forward_passes, splits

MADE = 64  # Files; they are read again and again.


def make_files(root):
    """Writes JPEG files as large as ImageNet's usual ones."""
    rng = np.random.default_rng(0)
    for i in range(MADE):
        noise = rng.integers(0, 256, (375, 500, 3), dtype=np.uint8)
        picture = Image.fromarray(noise).filter(ImageFilter.GaussianBlur(2))
        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=90)
        path = root / "all" / str(i % 2) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stream.getvalue())


def open_rows(root, split, count):
    """Returns `count` records of a folder, the same ones again where it has fewer."""
    source = folder.open_folder(str(root), split, split)
    return splits.Subset(source, np.arange(count) % len(source))


def main(args):
    """Prints the comparison."""
    side, batch = args.side, args.batch
    model = models.create(
        args.variant, num_classes=0, image_size=(side, side), dtype=args.dtype
    )
    params = jax.jit(model.init)(jax.random.key(0))
    data = DataConfig(
        image_size=(side, side), num_classes=2**31 - 1, num_threads=args.threads
    )
    mesh = meshes.create(MeshConfig(data=1), jax.devices()[:1])
    wanted = forward_passes.Wanted(features=True)
    step = forward_passes.make_eval_step(model, data, mesh, wanted)
    how = Preprocess((side, side), interpolation="bicubic", crop_fraction=0.875)

    @jax.jit
    def plain(params, images):
        images = transforms.normalize(images, data.mean, data.std)
        return model.apply(params, images.astype(args.dtype))["pre_logits"]

    shape = jax.ShapeDtypeStruct((batch, side, side, 3), np.uint8)
    bare = plain.lower(params, shape).compile(compilation.options())
    pixels = np.random.default_rng(1).integers(0, 256, shape.shape, np.uint8)
    pixels = jax.device_put(pixels)

    def forward(batches):
        for _ in range(batches):
            found = bare(params, pixels)
        found.block_until_ready()

    def features(source):
        with pipeline.eval_batches(
            source, data, batch_size=batch, host=how.transforms
        ) as batches:
            found = forward_passes.collect_outputs(
                step, {"one": params}, batches, mesh
            )["one"]
        assert len(found.features) == len(source)

    with tempfile.TemporaryDirectory() as made:
        root, split = pathlib.Path(args.data or made), args.split
        if not args.data:
            make_files(root)
        batches = -(-args.round // batch)
        rounds = max(2, -(-args.images // (batches * batch)))
        source = open_rows(root, split, batches * batch)
        forward(1)  # Both are compiled before the clock starts.
        features(open_rows(root, split, batch))
        seconds = {"forward": [], "features": []}
        for i in range(rounds):
            for name in list(seconds)[:: 1 if i % 2 else -1]:
                start = time.perf_counter()
                forward(batches) if name == "forward" else features(source)
                seconds[name].append(time.perf_counter() - start)
    report(args, seconds, batches * batch)


def report(args, seconds, images):
    """Prints a table."""
    speeds = {name: images / np.array(values) for name, values in seconds.items()}
    ratios = speeds["features"] / speeds["forward"]
    low, high = np.quantile(ratios, (0.25, 0.75))
    forward, features = (np.median(speeds[name]) for name in ("forward", "features"))
    rounds = len(ratios)
    print("| model | images | forward, images/s | features, images/s | ratio |")
    print("|---|---|---|---|---|")
    print(
        f"| {args.variant} at {args.side} | {rounds * images:,} in {rounds} rounds "
        f"| {forward:.1f} | {features:.1f} "
        f"| {features / forward:.3f} ({low:.3f} to {high:.3f}) |"
    )


def parse():
    """Returns the flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--variant", default="S/16")
    add("--images", type=int, default=10_000, help="of each, in all")
    add("--round", type=int, default=160, help="images a round")
    add("--batch", type=int, default=32)
    add("--side", type=int, default=224)
    add("--dtype", default="float32")
    add("--threads", type=int, default=2)
    add("--data", default="", help="folder of class folders, or with splits")
    add("--split", default="all", help="of --data")
    args = smoke.parse(
        parser, "--variant=Ti/16 --side=64 --images=4 --round=2 --batch=2"
    )
    if args.smoke:
        smoke.shrink()
    return args


if __name__ == "__main__":
    main(parse())
