"""CIFAR-10 in equal minutes of a CPU: `configs/cifar10.py:size=cpu`, and what each part of it gives.

Run: python -m benchmarks.finetuning.cifar10 --data_dir=DIR --out=runs/cifar10 \\
         [--minutes=10] [--seeds=0,1,2] [--only="recipe;resnet"]

Every line of the table is the recipe with one thing changed, trained on nine tenths of the
training images for as many steps as fit the minutes, at the median speed of short trials, which
take turns; they need an idle machine, the runs after them do not.
"val" is the other tenth, by which the recipe was chosen. "resnet" is a plain ResNet (arXiv:
1512.03385, section 4.2, of width 64 and with a first stride of 2) with the same optimiser.
Runs that are done are kept: the script goes on where it was ended.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics

import flax.linen as nn

from benchmarks import smoke
from configs import cifar10
from vit_jax.config.fields import key
from vit_jax.models import NetworkConfig
from vit_jax.models.layers import classify

TRIAL, TRIALS = 40, 2  # Steps and runs by which a speed is measured.
SPLITS = {"val": "train[90%:]", "test": "test"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig(NetworkConfig):
    """A ResNet for small images, with BatchNorm."""

    width: int = key(64, "Features of the first stage, doubled by each other one.")
    units: tuple[int, ...] = key((1, 1, 1), "Residual units of each stage.")

    def build(self, num_classes, image_shape):
        return ResNet(self, num_classes)


class ResNet(nn.Module):
    """Units of two convolutions each, and the mean of the last features."""

    config: ResNetConfig
    num_classes: int

    @nn.compact
    def __call__(self, images, *, train=False):
        def conv(x, features, side=3, stride=1):
            sides = (side, side)
            y = nn.Conv(features, sides, stride, padding=side // 2, use_bias=False)(x)
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)(y)

        x = nn.relu(conv(images, self.config.width, stride=2))
        for stage, count in enumerate(self.config.units):
            features = self.config.width * 2**stage
            for unit in range(count):
                stride = 2 if stage and not unit else 1
                y = nn.relu(conv(x, features, stride=stride))
                y = conv(y, features)
                if x.shape != y.shape:
                    x = conv(x, features, 1, stride)
                x = nn.relu(x + y)
        features = x.mean((1, 2))
        return classify(features, self.num_classes, self.config.head_bias_init)


def set_keys(section, **keys):
    """Returns a change of some keys of a section of the config."""
    return lambda c: c[section].update(keys)


def plain_patches(c):
    """Has patches of 4 pixels and more blocks, which take about as long."""
    c.model = {"variant": "Ti/4", "width": 128, "depth": 6, "num_heads": 4}
    c.model.update(mlp_dim=256, pool="gap")


def adam(c):
    """Has the optimiser of the other recipes, at the best of the rates 3e-3, 1e-3 and 3e-4."""
    c.optim.update(name="adam", learning_rate=1e-3, grad_clip_norm=1.0)
    c.optim.weight_decay = 0.1


def resnet(c):
    """Has another network."""
    c.model = {"variant": "benchmarks.finetuning.cifar10:ResNetConfig"}


CHANGES = {
    "recipe": lambda c: None,
    "windows of pixels not whitened": set_keys("model", stem_whitening=0),
    "LayerNorm in the stem": set_keys("model", stem_norm="layer"),
    "narrower": set_keys(
        "model", stem_widths=(64, 64, 128, 128), width=128, num_heads=2
    ),
    "two blocks": set_keys("model", depth=2),
    "patches of 4 pixels, six blocks": plain_patches,
    "AdamW": adam,
    "twice the rate": set_keys("optim", learning_rate=6e-3),
    "no label smoothing": set_keys("task", label_smoothing=0.0),
    "shifts up to 4 pixels": set_keys("data", train_transform="flip | pad_crop(4)"),
    "no flips and shifts": set_keys("data", train_transform=""),
    "resnet": resnet,
}


def train(name, workdir, seed, steps, args):
    """Trains for so many steps, if that was not done; returns report.json."""
    import vit_jax

    if not (workdir / "report.json").exists():
        c = cifar10.get_config("size=cpu")
        c.update(seed=seed, epochs=0.0, total_steps=steps, batch_size=args.batch)
        c.update(eval_every_epochs=0, checkpoint_every_epochs=0)
        c.update(checkpoint_every_steps=steps, log_every_steps=max(1, steps // 20))
        c.data.update(data_dir=args.data_dir, split="train[:90%]", num_examples=0)
        c.evals = SPLITS
        CHANGES[name](c)
        print(f"{name}: {steps} steps", flush=True)
        vit_jax.train(c.to_dict(), workdir, **({"evals": {}} if steps == TRIAL else {}))
    return json.loads((workdir / "report.json").read_text())


def lengths(names, args):
    """Returns how many steps of each name fit the minutes, by the median of its trials."""
    if args.steps:
        return dict.fromkeys(names, args.steps)
    speeds = {name: [] for name in names}
    for trial in range(TRIALS):
        for name, each in speeds.items():
            workdir = args.out / f"{stem(name)}_trial{trial}"
            each.append(train(name, workdir, 0, TRIAL, args)["images_per_second"])
    factor = 60 * args.minutes / args.batch
    return {
        name: int(factor * statistics.median(each)) for name, each in speeds.items()
    }


def measure(name, seed, steps, args):
    """Returns the scores of a run of so many steps."""
    report = train(name, args.out / f"{stem(name)}_{seed}", seed, steps, args)
    scores = {split: report["final"][split]["params"]["top1"] for split in SPLITS}
    return {"steps": steps, **scores}


def stem(name):
    """Returns the beginning of the folders of a line of the table."""
    return name.replace(", ", "_").replace(" ", "_")


def table(found):
    """Prints a table of the means over seeds."""
    heads = ("changed", "seeds", "steps", *SPLITS)
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name, runs in found.items():
        mean = {head: statistics.mean(run[head] for run in runs) for head in runs[0]}
        scores = " | ".join(f"{100 * mean[split]:.2f}" for split in SPLITS)
        print(f"| {name} | {len(runs)} | {mean['steps']:,} | {scores} |", flush=True)


def main():
    """Reads the flags, runs what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data_dir", required=True, help="of CIFAR-10 as TFDS has it, in ArrayRecord")
    add("--out", type=pathlib.Path, required=True)
    add("--minutes", type=float, default=10.0, help="of each run")
    add("--steps", type=int, default=0, help="of each run, instead of the minutes")
    add("--seeds", default="0", help="as 0,1,2")
    add("--only", default=";".join(CHANGES), help="names, separated by semicolons")
    add("--batch", type=int, default=128, help="images of a step")
    args = smoke.parse(
        parser,
        "--data_dir={folder} --out={folder}/runs --batch=8 --steps=2 --only=resnet",
    )
    args.data_dir = str(pathlib.Path(args.data_dir).resolve())
    if args.smoke:
        from benchmarks.self_supervised import without_labels

        without_labels.make_cifar10(args.data_dir, args.batch)
    found, seeds = {}, [int(seed) for seed in args.seeds.split(",")]
    for name, steps in lengths(args.only.split(";"), args).items():
        found[name] = [measure(name, seed, steps, args) for seed in seeds]
        table({name: found[name]})
    table(found)


if __name__ == "__main__":
    main()
