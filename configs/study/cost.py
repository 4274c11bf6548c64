"""Images per second and largest batch by resolution (arXiv:2010.11929, D.5).

Run:    python -m vit_jax.study --config=configs/study/cost.py --workdir=runs/cost
Then:   python -m vit_jax.report runs/cost --out=report/
Result: with nine times the pixels, S/32 is 7 and S/16 15 times slower; the largest
        batch of R50x1 is about that of S/32, 3.6 to 4.8 times that of S/16
        (docs/benchmarks/studies.md)

Speeds are those of the forward pass on this machine's first device. The largest batch
is one whose training step fits one TPU v5e chip, according to its compiler (extra
`tpu`), which runs on a CPU. The paper's figure 12 shows both on TPUv3, for B and L with
patches of 16 and 32, and for ResNets.
"""

from ml_collections import ConfigDict

from configs import b16_i1k
from configs.common import parse_arg
from configs.study import common

MODELS = {
    "cpu": ("S/32", "S/16", "R50x1"),
    "gpu": ("B/32", "B/16", "R50+B/16", "R50x1"),
    "paper": ("B/32", "B/16", "L/32", "L/16", "R50x1", "R50x2", "R152x2", "R50+B/16"),
}
PIXELS = {
    "cpu": (128, 224, 384),
    "gpu": (64, 128, 224, 384, 512),
    "paper": (64, 128, 224, 384, 512),
}
BATCH = {"cpu": 8, "gpu": 256, "paper": 64}  # For timing forward passes.
ARGUMENTS = dict(size=common.SIZES, model="", pixels=0)


def get_study(arg: str | None = None) -> dict:
    arg = parse_arg(arg, **ARGUMENTS)
    figures = [
        dict(x="pixels", y=score, lines=("model",), log_x=True, log_y=True)
        for score in ("images/s", "largest batch")
    ]
    return dict(
        measure="cost",
        axes=dict(model=MODELS[arg.size], pixels=PIXELS[arg.size]),
        scores={
            "images/s": "cost/images_per_second",
            "largest batch": "cost/largest_batch",
            "GMACs": "cost/gmacs",
        },
        figures=figures,
    )


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = b16_i1k.get_config()
    c.model.variant = arg.model or MODELS[arg.size][0]
    if "/" in c.model.variant:
        c.model.scan = True
    else:
        common.drop(c.model, "pool", "representation_layer", "dropout")
    if arg.size == "cpu":
        c.model.dtype = "float32"
    side = arg.pixels or 224
    c.data.image_size = (side, side)
    c.data.train_transform = "inception_crop | flip"
    c.batch_size = BATCH[arg.size]
    c.evals = {}
    return c
