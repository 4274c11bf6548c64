"""Fine-tuning on a task of VTAB-1k (arXiv:2010.11929, tables 2, 4 and 9).

Run:    python -m vit_jax.train --workdir=gs://... --config.init=CHECKPOINT \\
            --config=configs/vtab.py:model=B/16,task=caltech101
All:    python -m vit_jax.transfer --model=CHECKPOINT --dataset=vtab, which runs the 19
        tasks with three seeds each and reports the means
Try:    the same with ,quick (3 steps, any machine, no checkpoint)
Result: not run by us; the paper's table 9 does not include B/16; H/14 from JFT reaches
        77.63 % on average

Training uses 1,000 images, and the rate of table 4, which was not swept. Warmup, each
task's transforms, the filter of resizes and momentum in bfloat16 are those of the
authors' VTAB code; the command `transfer` uses the filter of other authors for their
weights.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg, quick
from vit_jax.data.sources import vtab
from vit_jax.tools.sweeps import recipes

ARGUMENTS = dict(
    model=("B/16", "B/32", "L/16", "L/32", "H/14"),
    task=tuple(vtab.TASKS),
    resolution=0,  # 0 is 384, or 518 for H/14.
    quick=False,
)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    recipe = recipes.find(f"vtab/{arg.task}")
    side = arg.resolution or (518 if arg.model == "H/14" else 384)
    size = (side, side)
    c = ConfigDict()
    c.seed = 0
    c.total_steps = recipe.steps
    c.batch_size = 512
    c.mesh = dict(data=-1)
    c.init = "?"

    c.data = dict(
        name=recipe.dataset,
        split=recipe.train,
        num_classes=recipe.num_classes,
        image_size=size,
        **recipe.transforms(size, "bilinear_plain"),
    )
    c.evals = dict(test=recipe.test)

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
        mu_dtype=recipe.mu_dtype,
        learning_rate=recipe.rates[0],
        warmup_steps=recipe.warmup,
        schedule="cosine",
        weight_decay=0.0,
        grad_clip_norm=1.0,
    )
    c.ema = dict(decay=0.0)

    c.log_every_steps = 50
    c.eval_every_steps = 0
    c.checkpoint_every_steps = 250
    return quick(c) if arg.quick else c
