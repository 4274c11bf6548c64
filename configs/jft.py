"""ViTs, hybrids and ResNets on JFT-300M or a similar set (arXiv:2010.11929, table 3).

Run:    python -m vit_jax.train --config=configs/jft.py:model=L/16 --workdir=gs://... \\
            --config.data.name=YOURS --config.data.num_classes=...
Try:    the same with --config=configs/jft.py:model=L/16,quick (3 steps, any machine)
Result: not run by us; the paper reports results after transfer only (its table 6)

JFT-300M is not public: give the name of your data set, and set `--config.data.split=`
and `--config.evals.val=` if its splits have other names. The paper does not give the
loss and the last rate on JFT: here they are those of ImageNet-21k, see b16_i21k.py.
`:schedule=rsqrt` is the schedule of Scaling Vision Transformers (arXiv:2106.04560) in
big_vision's train_vit_g.py: a run can be extended from any step before its cooldown.
"""

from ml_collections import ConfigDict

from configs.common import big_vision_crop, parse_arg, quick

# Epochs and peak rate. Table 3 lists L/16 and R50+L/16 with 7 and with 14 epochs.
ROWS = {
    "B/16": (7, 8e-4),
    "B/32": (7, 8e-4),
    "L/32": (7, 6e-4),
    "L/16": (7, 4e-4),
    "L/16-14ep": (14, 4e-4),
    "H/14": (14, 3e-4),
    "R50x1": (7, 1e-3),
    "R50x2": (7, 1e-3),
    "R101x1": (7, 8e-4),
    "R152x1": (7, 6e-4),
    "R152x2": (7, 6e-4),
    "R50+B/16": (7, 8e-4),
    "R50+B/32": (7, 8e-4),
    "R50+L/32": (7, 2e-4),
    "R50+L/16": (7, 4e-4),
    "R50+L/16-14ep": (14, 4e-4),
}
ARGUMENTS = dict(model=tuple(ROWS), schedule=("linear", "rsqrt"), quick=False)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    epochs, learning_rate = ROWS[arg.model]
    c = ConfigDict()
    c.seed = 0
    c.epochs = epochs
    c.batch_size = 4096
    c.mesh = dict(data=-1)

    c.data = dict(
        name="jft300m",
        split="train",
        num_classes=18_291,  # arXiv:1707.02968.
        image_size=(224, 224),
        train_transform="inception_crop | flip",
        eval_transform=big_vision_crop(256),
    )
    c.evals = dict(val="validation")

    c.model = dict(
        variant=arg.model.removesuffix("-14ep"),
        head_bias_init=-10.0,
        dtype="bfloat16",
    )
    if "/" in c.model.variant:  # The head of ResNets is one linear layer.
        c.model.update(
            pool="token",
            representation_layer=True,
            dropout=0.0,
            scan=None,
            remat_policy="full" if arg.model == "H/14" else "none",
        )
    c.task = dict(loss="sigmoid", label_smoothing=0.0)
    c.optim = dict(
        name="adam",
        b1=0.9,
        b2=0.999,
        learning_rate=learning_rate,
        warmup_steps=10_000,
        schedule=dict(name="linear", end_learning_rate=1e-5),
        weight_decay=0.1,
    )
    if arg.schedule == "rsqrt":
        c.optim.schedule = dict(name="rsqrt", timescale=10_000, cooldown_steps=50_000)
    c.ema = dict(decay=0.0)

    c.log_every_steps = 50
    c.eval_every_steps = 5_000
    c.checkpoint_every_steps = 1_000
    return quick(c) if arg.quick else c
