"""Data that each architecture needs (arXiv:2010.11929, 4.3 and 4.4, figures 3 to 5).

Run:    python -m vit_jax.study --config=configs/study/scaling.py --workdir=runs/scaling
Then:   python -m vit_jax.report runs/scaling --out=report/
Result: on digits the mean accuracies of hybrid and ResNet are above those of all ViTs
        at every size (docs/benchmarks/studies.md)

Three ViTs, a hybrid and a ResNet (the last two with about the compute of vit-s) are
pretrained on nested parts of the training images, with the same number of images seen.
Rate and weight decay are chosen for each model and part, as in the paper. All are
evaluated on test images: without change, by few-shot classification, and fine-tuned on
images outside of all parts.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg
from configs.study import common

MODELS = ("vit-xs", "vit-s", "vit-m", "hybrid", "resnet")
# Width, depth, heads and MLP of the encoder.
ENCODERS = {
    ("cpu", "digits"): {
        "vit-xs": (24, 3, 3, 48),
        "vit-s": (48, 4, 3, 96),
        "vit-m": (96, 6, 6, 192),
        "hybrid": (48, 2, 3, 96),
    },
    ("cpu", "cifar10"): {
        "vit-xs": (64, 4, 2, 128),
        "vit-s": (128, 6, 4, 256),
        "vit-m": (256, 6, 4, 512),
        "hybrid": (128, 4, 4, 256),
    },
    ("gpu", "cifar10"): {
        "vit-xs": (192, 6, 3, 768),
        "vit-s": (384, 8, 6, 1_536),
        "vit-m": (512, 12, 8, 2_048),
        "hybrid": (384, 7, 6, 1_536),
    },
}
PATCH = {("cpu", "digits"): 2, ("cpu", "cifar10"): 8, ("gpu", "cifar10"): 4}
# Units per stage, and width of the stem.
STEMS = {
    ("cpu", "digits"): {"hybrid": ((2,), 96), "resnet": ((2, 2), 64)},
    ("cpu", "cifar10"): {"hybrid": ((1, 1), 32), "resnet": ((3, 4, 5), 32)},
    ("gpu", "cifar10"): {"hybrid": ((3,), 64), "resnet": ((3, 4, 6), 256)},
}
PAPER = {
    "vit-xs": "B/32",
    "vit-s": "B/16",
    "vit-m": "L/16",
    "hybrid": "R50+B/32",
    "resnet": "R50x1",
}
IMAGES = {
    "digits": (37, 75, 150, 300, 600),
    "cifar10": (2_875, 5_750, 11_500, 23_000, 46_000),
    "jft300m": (9_000_000, 30_000_000, 90_000_000, 303_000_000),
}
RATES = {"cpu": (1e-3, 4e-3), "gpu": (3e-4, 1e-3), "paper": (4e-4, 8e-4)}
DECAYS = {"cpu": (0.03, 0.3), "gpu": (0.03, 0.3), "paper": (0.03, 0.1)}
ARGUMENTS = common.ARGUMENTS | dict(images=0, model=MODELS, stage=common.STAGES)


def get_study(arg: str | None = None) -> dict:
    arg = parse_arg(arg, **ARGUMENTS)
    scores = {
        "5-shot": "pretrain:fewshot/5shot",
        "fine-tuned": "test/top1",
        "upstream": "pretrain:test/top1",
        "loss": "pretrain:test/loss",
    }
    charts = [
        dict(x="images", y=score, lines=("model",), log_x=True)
        for score in list(scores)[:3]
    ]
    by_compute = dict(x="exaflops", y="5-shot", lines=("model",))
    return dict(
        # All models on the smallest part first, so that an unfinished study compares
        # them.
        axes=dict(images=IMAGES[common.data_of(arg)], model=MODELS),
        stages=common.STAGES,
        scores=scores,
        tune=dict(
            pretrain={
                "optim.weight_decay": DECAYS[arg.size],
                "optim.learning_rate": RATES[arg.size],
            }
        ),
        seeds=3,
        figures=[*charts, by_compute],
        laws=[
            dict(x="exaflops", y="loss", lines=("images",)),
            dict(x="images", y="loss", lines=("model",)),
        ],
    )


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    data = common.data_of(arg)
    pretrain = arg.stage == "pretrain"
    c = common.pretraining(arg) if pretrain else common.finetuning(arg)
    if pretrain:
        count = arg.images or IMAGES[data][-1]
        c.data.split, c.data.num_examples = f"train[:{count}]", count
    if arg.size == "paper":
        _paper(c, PAPER[arg.model], pretrain)
        return c
    key, dtype = (arg.size, data), c.model.get("dtype", "float32")
    variants = {"hybrid": "R50+Ti/16", "resnet": "R50x1"}
    c.model = dict(variant=variants.get(arg.model, f"Ti/{PATCH[key]}"), dtype=dtype)
    if encoder := ENCODERS[key].get(arg.model):
        names = ("width", "depth", "num_heads", "mlp_dim")
        c.model.update(dict(zip(names, encoder, strict=True)), pool="gap")
    if stem := STEMS[key].get(arg.model):
        c.model.stage_depths, c.model.stem_width = stem
    return c


def _paper(c: ConfigDict, variant: str, pretrain: bool) -> None:
    c.model.variant = variant
    if "/" not in variant:  # The head of ResNets is one linear layer.
        of_encoders = "pool", "representation_layer", "dropout", "scan", "remat_policy"
        common.drop(c.model, *of_encoders)
    if pretrain:  # The same number of images for every part: 7 epochs of all.
        c.epochs, c.total_steps = 0, 7 * IMAGES["jft300m"][-1] // c.batch_size
