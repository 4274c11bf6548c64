"""Fine-tuning on the paper's five data sets (arXiv:2010.11929, tables 2, 4 and 5).

Run:    python -m vit_jax.train --workdir=gs://... --config.init=CHECKPOINT \\
            --config=configs/transfer.py:model=B/16,dataset=cifar100
Sweep:  python -m vit_jax.transfer --model=CHECKPOINT --dataset=cifar100, which also
        trains and tests three times at the best rate. By hand: add ,dev,rate=R to the
        first command; dev evaluates on a held-out part of train
Try:    the same with ,quick (3 steps, any machine, no checkpoint)
Result: not run by us; the paper's B/16 from ImageNet-21k reaches 91.67 % on CIFAR-100

Steps, rates and splits of table 4 are in `vit_jax.tools.sweeps.recipes`, which the
command `transfer` reads too. `init` must be set: a workdir, or a published .npz. The
resolution is 384, or 518 for H/14, whose patches do not divide 384; table 2 uses 512
for L/16 on ImageNet (`resolution=512`). Above 384 on ImageNet the parameters are
averaged, as in table 2. Resizes use the filter of Google's code; the command `transfer`
uses the filter of other authors for their weights. The paper mentions neither
augmentation nor warmup. With `protocol=paper`, images are resized and cropped at the
ratio of 448 to 384, as in the authors' VTAB code, and the rate starts at its peak.
`protocol=code` is google-research/vision_transformer: inception crop, 500 steps of
warmup, momentum in bfloat16 (rounded by up to 0.2 % in each step). It has no recipe for
Pets and Flowers, whose warmup of 100 steps is big_vision's. Both codes train on the
part of `dev`.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg, quick
from vit_jax.tools.sweeps import recipes

ARGUMENTS = dict(
    model=("B/16", "B/32", "L/16", "L/32", "H/14"),
    dataset=tuple(recipes.TABLE_4),
    protocol=("paper", "code"),
    rate=0.0,  # 0 is the third rate of the sweep.
    resolution=0,  # 0 is 384, or 518 for H/14.
    dev=False,
    quick=False,
)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    recipe = recipes.find(arg.dataset)
    side = arg.resolution or (518 if arg.model == "H/14" else 384)
    size = (side, side)
    c = ConfigDict()
    c.seed = 0
    c.total_steps = recipe.steps
    c.batch_size = 512
    c.mesh = dict(data=-1)
    c.init = "?"

    c.data = dict(
        name=arg.dataset,
        split=recipe.part if arg.dev else recipe.train,
        num_classes=recipe.num_classes,
        image_size=size,
        **recipe.transforms(size, "bilinear_plain"),
    )
    c.evals = dict(dev=recipe.held_out) if arg.dev else dict(test=recipe.test)

    c.model = dict(
        variant=arg.model,
        pool="token",
        representation_layer=False,
        dropout=0.0,
        dtype="bfloat16",
    )
    c.task = dict(loss="softmax")
    c.optim = dict(
        name="sgd",
        momentum=0.9,
        learning_rate=arg.rate or recipe.rates[2],
        schedule="cosine",
        weight_decay=0.0,
        grad_clip_norm=1.0,
    )
    if arg.protocol == "code":
        c.data.train_transform = "inception_crop | flip"
        warmup = 500 if recipe.steps > 500 else 100
        c.optim.update(warmup_steps=warmup, mu_dtype="bfloat16")
    c.ema = dict(decay=recipe.average(size))

    c.log_every_steps = 50
    c.eval_every_steps = max(100, recipe.steps // 10)
    c.checkpoint_every_steps = 1_000
    return quick(c) if arg.quick else c
