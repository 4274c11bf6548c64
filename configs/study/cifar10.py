"""How much data which architecture needs (the question of figures 3 to 5), on CIFAR-10.

Data:   as configs/cifar10.py.
Run:    python -m vit_jax.study --config=configs/study/cifar10.py \
            --config.data.data_dir=DIR --workdir=runs/study
        about 2 hours on 2 idle CPU cores; :budget=gpu is for one GPU
Then:   python -m vit_jax.report runs/study --out=report/
Result: 25 shots after 48,000 images: resnet 55.19 %, hybrid 48.92 %, vit-s 45.26 %; all
        points in docs/benchmarks.md; budget=gpu has not been run by us

Three ViTs, a hybrid and a ResNet (the last two with the compute of vit-s) are pretrained
on nested parts of train, all with the same number of images seen, and judged on test: as
they are, by few-shot features, and fine-tuned. The last 2,000 images of train are in none
of these parts: they are what is fine-tuned on and drawn from. Any verb takes one run of
the study: `:model=vit-s,images=12000`, with `,part=finetune` its fine-tuning.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg
from configs.study.common import PARTS, fewshot, finetune, pretrain

BUDGETS = ("cpu", "gpu")
ARGUMENTS = dict(
    model=("vit-xs", "vit-s", "vit-m", "hybrid", "resnet"),
    images=(3_000, 12_000, 48_000),
    part=PARTS,
    budget=BUDGETS,
)

# Width, depth, heads and MLP of the encoder; patch in pixels.
ENCODERS = {
    "cpu": {
        "vit-xs": (64, 4, 2, 128),
        "vit-s": (128, 6, 4, 256),
        "vit-m": (256, 6, 4, 512),
        "hybrid": (128, 4, 4, 256),
    },
    "gpu": {
        "vit-xs": (192, 6, 3, 768),
        "vit-s": (384, 8, 6, 1_536),
        "vit-m": (512, 12, 8, 2_048),
        "hybrid": (384, 7, 6, 1_536),
    },
}
PATCH = {"cpu": 8, "gpu": 4}
# Units of each stage and features of the root.
STEMS = {
    "cpu": {"hybrid": ((1, 1), 32), "resnet": ((3, 4, 5), 32)},
    "gpu": {"hybrid": ((3,), 64), "resnet": ((3, 4, 6), 256)},
}
# Steps and batch of a pretraining, and of a fine-tuning.
LENGTHS = {"cpu": (1_600, 128, 160, 128), "gpu": (20_000, 512, 1_000, 128)}


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    steps, batch_size, tuning_steps, tuning_batch_size = LENGTHS[arg.budget]
    c = ConfigDict()
    c.name = f"study_{arg.model}_{arg.images}_{arg.part}"
    c.data = dict(name="cifar10", num_classes=10, image_size=(32, 32))
    c.data.train_transform = "flip | pad_crop(4)"
    variants = {"hybrid": "R50+Ti/16", "resnet": "R50x1"}
    c.model = dict(variant=variants.get(arg.model, f"Ti/{PATCH[arg.budget]}"))
    if encoder := ENCODERS[arg.budget].get(arg.model):
        names = ("width", "depth", "num_heads", "mlp_dim")
        c.model.update(dict(zip(names, encoder, strict=True)), pool="gap")
    if stem := STEMS[arg.budget].get(arg.model):
        c.model.stage_depths, c.model.stem_width = stem
    if arg.budget == "gpu":
        c.model.dtype = "bfloat16"

    if arg.part == "finetune":
        c.data.split, c.data.num_examples = "train[48000:]", 2_000
        finetune(c, steps=tuning_steps, batch_size=tuning_batch_size, rate=0.03)
    else:
        c.data.split, c.data.num_examples = f"train[:{arg.images}]", arg.images
        pretrain(c, steps=steps, batch_size=batch_size, rate=1e-3)
        c.evals.fewshot = fewshot("train[48000:]", shots=(5, 25), seeds=10)
    return c
