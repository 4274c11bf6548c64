"""Images a CPU-second of the input pipeline: ours, tf.data, PyTorch with timm.

Run: python -m benchmarks.input.input --tf=TF_ENVIRONMENT/bin/python
       [--photographs=FOLDER] [--rounds=9] [--batches=12]

`--tf` is the Python of another environment, made by `pip install tensorflow-cpu`;
without it the rows of tf.data are left out, and without PyTorch those of timm. Needs
the extra `fast`.

JPEG files of 500x375 at quality 90, made of the photographs in a folder or of the two
in scikit-learn; inception crop to 224 and flip, shuffled, batches of 64. Each contender
is a process of its own that fetches batches when asked, one after the other, a round
of all of them at a time. The CPU time of a round is that of the process and its
children from the request until they are idle with their buffers full again, so all
that it takes to make the batches is in it, the flip too: of ours it runs compiled by
XLA on this CPU. Prints medians, and in brackets quartiles of the rounds. Errors are
mean absolute differences to Pillow's bilinear filter in float32, on given boxes.
"""

import argparse
import importlib.util
import json
import pathlib
import sys
import tempfile

import numpy as np
from PIL import Image, ImageOps

from benchmarks import smoke
from benchmarks.input.input_contender import Contender
from vit_jax.data.transforms import host as host_transforms

SIZE, SMALL_BATCH = 224, 512
OURS = {
    "antialiased": "antialias=True",
    "not antialiased": "antialias=False",
    "not antialiased, rough": "antialias=False, rough=True",
}


def make_files(folder, photographs, count):
    """Writes JPEG files of 500x375 with natural content; returns their paths."""
    if photographs:
        found = sorted(pathlib.Path(photographs).rglob("*.[jJ][pP]*[gG]"))
        pictures = [Image.open(path).convert("RGB") for path in found[:count]]
    else:
        from sklearn.datasets import load_sample_images

        pictures = [Image.fromarray(image) for image in load_sample_images().images]
    rng, paths = np.random.default_rng(0), []
    for i in range(count):
        picture = pictures[i % len(pictures)]
        if len(pictures) < count:  # Another part of the same photograph.
            w, h = (round(side * rng.uniform(0.8, 1)) for side in picture.size)
            left = rng.integers(picture.width - w + 1)
            top = rng.integers(picture.height - h + 1)
            picture = picture.crop((left, top, left + w, top + h))
        path = pathlib.Path(folder, "train", "photograph", f"{i:03}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        ImageOps.fit(picture, (500, 375), Image.Resampling.LANCZOS).save(
            path, quality=90
        )
        paths.append(path)
    return paths


def errors(contenders, paths, folder):
    """Returns each contender's mean absolute error to the float filter."""
    boxes, exact = [], []
    for i, path in enumerate(paths):
        box = host_transforms.RandomResizedCrop(SIZE).box(
            375, 500, np.random.default_rng(i)
        )
        top, left, height, width = box
        pixels = np.array(Image.open(path), np.float32)
        part = pixels[top : top + height, left : left + width]
        planes = [
            Image.fromarray(np.ascontiguousarray(p)) for p in np.moveaxis(part, 2, 0)
        ]
        how = Image.Resampling.BILINEAR
        exact.append(np.stack([p.resize((SIZE, SIZE), how) for p in planes], -1))
        boxes.append((str(path), box))
    request = pathlib.Path(folder, "boxes.json")
    request.write_text(json.dumps(boxes))
    result = {}
    for name, contender in contenders.items():
        contender.ask(request)
        result[name] = np.abs(np.load(f"{request}.npy") - np.stack(exact)).mean()
    return result


def interleaved(contenders, rounds, batches):
    """Returns CPU seconds and wall seconds a batch, (2, rounds) of each contender."""
    seconds = {name: [] for name in contenders}
    names = list(contenders)
    for contender in contenders.values():
        contender.measure(batches)  # What is compiled or tuned on the way is done.
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(contenders[name].measure(batches))
    return {name: np.array(values).T / batches for name, values in seconds.items()}


def spread(values):
    """Writes the median, and the quartiles in brackets."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    digits = 0 if middle > 20 else 2
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def jpeg_contenders(args, folder):
    """Starts all that read JPEG files, one process each and no workers."""
    ours = ("input_ours.py", "jpeg", folder, args.batch)
    started = {
        f"ours, {name}": Contender(sys.executable, *ours, OURS[name], 0)
        for name in args.ours.split(";")
    }
    if args.tf:
        for name, antialias in (("antialiased", True), ("not antialiased", False)):
            started[f"tf.data, {name}"] = Contender(
                args.tf, "input_tf.py", folder, args.batch, antialias
            )
    if importlib.util.find_spec("timm"):
        started["PyTorch and timm"] = Contender(
            sys.executable, "input_timm.py", folder, args.batch, 0
        )
    return started


def report_jpeg(args, folder, paths):
    """Prints images a CPU-second, errors and memory, and ratios to each."""
    started = jpeg_contenders(args, folder)
    seconds = interleaved(started, args.rounds, args.batches)
    wrong = errors(started, paths, folder)
    print(
        "| JPEG to 224 | images a CPU-second | error, grey levels | most memory, MB |\n"
        "|---|---|---|---|"
    )
    for name, (cpu, _) in seconds.items():
        cells = [
            spread(args.batch / cpu),
            f"{wrong[name]:.2f}",
            f"{started[name].peak():.0f}",
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    mine = [name for name in seconds if name.startswith("ours")]
    heads = [name.removeprefix("ours, ") for name in mine]
    print(f"\n| images a CPU-second, times | {' | '.join(heads)} |")
    print("|---" * (1 + len(mine)) + "|")
    for other in [name for name in seconds if name not in mine]:
        cells = [spread(seconds[other][0] / seconds[name][0]) for name in mine]
        print(f"| {other} | {' | '.join(cells)} |", flush=True)
    for contender in started.values():
        contender.close()
    ours = ("input_ours.py", "flip", folder, args.batch, "", 0)
    flip = Contender(sys.executable, *ours)
    cpu = interleaved({"": flip}, args.rounds, 20 * args.batches)[""][0]
    print(
        f"\nOur flip alone takes {spread(cpu / args.batch * 1e6)} us of CPU an image."
    )
    flip.close()


def report_workers(args, folder):
    """Prints images a second of ours as loader processes are added."""
    started = {}
    for workers in args.workers.split(","):
        ours = ("input_ours.py", "jpeg", folder, args.batch, "", workers)
        started[f"ours, {workers} workers"] = Contender(sys.executable, *ours)
    print(
        "\n| loader processes | images a second | images a CPU-second | MB of the "
        "largest |\n|---|---|---|---|"
    )
    for name, (cpu, wall) in interleaved(started, args.rounds, args.batches).items():
        cells = [spread(args.batch / wall), spread(args.batch / cpu)]
        cells.append(f"{started[name].peak():.0f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        started[name].close()


def report_memory(args, folder):
    """Prints images a CPU-second of a set in memory, and what 14 million records take."""
    ours = ("input_ours.py", "memory", folder, SMALL_BATCH)
    started = {
        "gathered": Contender(sys.executable, *ours, "", 0),
        "gathered, flipped and cropped": Contender(sys.executable, *ours, "augment", 0),
    }
    seconds = interleaved(started, args.rounds, 20 * args.batches)
    print("\n| 50,000 images of 32x32 in memory | images a CPU-second |\n|---|---|")
    for name, (cpu, _) in seconds.items():
        print(f"| {name} | {spread(SMALL_BATCH / cpu)} |", flush=True)
        started[name].close()
    ours = ("input_ours.py", "order", folder, args.batch, "", 0)
    order = Contender(sys.executable, *ours)
    empty = order.peak()
    order.ask(28)
    print(
        f"\nRecords of 14,197,122, from all over two epochs: {order.peak():.0f} MB at "
        f"most, {empty:.0f} of them before the first."
    )
    order.close()


def main():
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--tf", default="")
    add("--photographs", default="")
    add("--rounds", type=int, default=9)
    add("--batches", type=int, default=12)
    add("--batch", type=int, default=64, help="images")
    add("--files", type=int, default=256)
    add("--ours", default=";".join(OURS), help="names, separated by semicolons")
    add("--workers", default="0,1,2", help="loader processes")
    args = smoke.parse(
        parser,
        "--rounds=1 --batches=1 --batch=4 --files=8 --ours=antialiased --workers=1",
    )
    with tempfile.TemporaryDirectory() as folder:
        paths = make_files(folder, args.photographs, args.files)
        report_jpeg(args, folder, paths)
        report_workers(args, folder)
        report_memory(args, folder)


if __name__ == "__main__":
    main()
