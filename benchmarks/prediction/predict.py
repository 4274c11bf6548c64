"""Predictions for a folder of photographs: `vit_jax.predict` beside timm.

Run:  python -m benchmarks.prediction.predict --model=FILE --photographs=FOLDER
          [--architecture=deit_tiny_patch16_224] [--limit=200] [--rounds=5]

Each contender is a process that does what a user's command does, from Python's start to
the last line: `python -m vit_jax.predict`, and timm's model and transform for the same
file behind PyTorch's DataLoader with two workers, as its inference.py has them. They
alternate. Prints medians in seconds, the ratio with the quartiles of single rounds, for how
many photographs both name the same class, and the largest difference of its probability.
Needs the extra `parity`.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np
import torch

from benchmarks import smoke


class Photographs:
    """Files as timm prepares them, for a DataLoader."""

    def __init__(self, paths, transform):
        self.paths, self.transform = paths, transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        from PIL import Image

        return self.transform(Image.open(self.paths[index]).convert("RGB"))


def predict_with_timm(flags):
    """Prints the best class of each photograph, as `vit_jax.predict --json` does."""
    from benchmarks import timm_import

    timm_import.import_timm()
    import timm
    from timm.data import create_transform, resolve_data_config

    model = timm.create_model(flags.architecture, checkpoint_path=flags.model).eval()
    transform = create_transform(**resolve_data_config({}, model=model))
    paths = photographs(flags)
    loader = torch.utils.data.DataLoader(
        Photographs(paths, transform), batch_size=flags.batch, num_workers=2
    )
    with torch.inference_mode():
        rows = torch.cat([model(images).softmax(-1) for images in loader])
    for path, row in zip(paths, rows, strict=True):
        label = int(row.argmax())
        best = {"label": label, "probability": float(row[label])}
        print(json.dumps({"file": str(path), "predictions": [best]}))


def photographs(flags):
    """Returns the first files of the folder, by name."""
    paths = sorted(pathlib.Path(flags.photographs).iterdir())
    return paths[: flags.limit] if flags.limit else paths


def run(words):
    """Returns the seconds of a process, and its best class of each photograph."""
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - begun
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    best = [row["predictions"][0] for row in rows]
    return seconds, [(one["label"], one["probability"]) for one in best]


def make_small(folder, flags):
    """Writes a network with random parameters and noise, to see that the script works."""
    from PIL import Image

    from benchmarks import timm_import

    timm_import.import_timm()
    import timm
    from safetensors.torch import save_file

    flags.model = f"{folder}/model.safetensors"
    flags.photographs = f"{folder}/photographs"
    save_file(timm.create_model(flags.architecture).state_dict(), flags.model)
    pathlib.Path(flags.photographs).mkdir()
    rng = np.random.default_rng(0)
    for i in range(3):
        pixels = rng.integers(0, 256, (240, 300, 3), np.uint8)
        Image.fromarray(pixels).save(f"{flags.photographs}/{i}.jpg")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="file of timm's names")
    parser.add_argument("--photographs", default="", help="folder of images")
    parser.add_argument("--architecture", default="deit_tiny_patch16_224")
    parser.add_argument("--limit", type=int, default=200, help="images; 0 is all")
    parser.add_argument("--batch", type=int, default=32, help="images")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--timm", action="store_true", help=argparse.SUPPRESS)
    flags = smoke.parse(parser, "--folder={folder} --rounds=1 --batch=3")
    if flags.timm:
        predict_with_timm(flags)
        return
    if flags.folder:
        make_small(flags.folder, flags)
    images = list(map(str, photographs(flags)))
    common = [f"--model={flags.model}", f"--architecture={flags.architecture}"]
    ours = ["-m", "vit_jax.predict", *common, "--json", "--topk=1"]
    ours += [f"--batch_size={flags.batch}", *images]
    timm = ["-m", "benchmarks.prediction.predict", "--timm", *common]
    timm += [f"--limit={flags.limit}"]
    timm += [f"--batch={flags.batch}", f"--photographs={flags.photographs}"]
    pairs = [(run(ours), run(timm)) for _ in range(flags.rounds)]
    for i, name in enumerate(("vit_jax", "timm")):
        seconds = [pair[i][0] for pair in pairs]
        print(f"{name:8} {statistics.median(seconds):6.2f} s for {len(images)} images")
    ratios = [ours[0] / timm[0] for ours, timm in pairs]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    print(f"ratio    {middle:6.2f} ({low:.2f} to {high:.2f})")
    (_, ours), (_, timm) = pairs[0]
    same = sum(a[0] == b[0] for a, b in zip(ours, timm, strict=True))
    far = max(abs(a[1] - b[1]) for a, b in zip(ours, timm, strict=True))
    print(f"the same class for {same} of {len(images)}, probabilities within {far:.1g}")


if __name__ == "__main__":
    main()
