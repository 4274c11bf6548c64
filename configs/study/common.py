"""Functions that studies share: data, network and lengths for each size.

`size=cpu` is for two cores, on scikit-learn's digits or (`data=cifar10`) on CIFAR-10;
`size=gpu` is for one GPU, on CIFAR-10; `size=paper` has the paper's sizes, on a data
set like JFT-300M (configs/jft.py) and, for fine-tuning, on ImageNet.

The last training images of the small data sets are held out: validation images choose
keys such as the learning rate, and few-shot evaluation and fine-tuning learn from the
pool. Test images are scored once per run, and choose nothing.
"""

from types import SimpleNamespace

from ml_collections import ConfigDict

from configs import jft, transfer
from vit_jax.errors import UserError

SIZES = ("cpu", "gpu", "paper")
ARGUMENTS = dict(size=SIZES, data=("", "digits", "cifar10"))
STAGES = ("pretrain", "finetune")
# Scores that most studies report, from a config of one stage.
SCORES = {"5-shot": "fewshot/5shot", "top-1": "test/top1"}
# Number of images to train on, and the end of the validation images that follow them;
# the pool comes after these.
PARTS = {"digits": (600, 750), "cifar10": (46_000, 48_000)}
# The test split of the 1,797 digits is small, so the last images of the pool are added
# to it.
TESTS = {"digits": "train[900:]+test", "cifar10": "test"}
POOL_ENDS = {"digits": 900, "cifar10": 50_000}

# Patch size, width, depth, heads and MLP of the network; steps, batch size and peak
# rate of pretraining; steps, batch size and rate of fine-tuning.
BUDGETS = {
    ("cpu", "digits"): ((2, 48, 4, 3, 96), (600, 64, 2e-3), (60, 32, 0.03)),
    ("cpu", "cifar10"): ((4, 64, 4, 4, 128), (600, 128, 2e-3), (100, 64, 0.03)),
    ("gpu", "cifar10"): (
        (4, 384, 8, 6, 1_536),
        (20_000, 512, 1e-3),
        (1_000, 128, 0.03),
    ),
}


def data_of(arg: SimpleNamespace) -> str:
    """Returns the data set of an argument."""
    fixed = {"gpu": "cifar10", "paper": "jft300m"}
    name = fixed.get(arg.size, arg.data or "digits")
    if arg.data not in ("", name):
        raise UserError(
            f"config argument data={arg.data!r}: size={arg.size} uses {name}; leave "
            "data out"
        )
    return name


def pool(arg: SimpleNamespace) -> str:
    """Returns the split that few-shot evaluation and fine-tuning learn from."""
    data = data_of(arg)
    return f"train[{PARTS[data][1]}:{POOL_ENDS[data]}]"


def pretraining(arg: SimpleNamespace) -> ConfigDict:
    """Returns a config that trains from scratch, with evals val, test and fewshot."""
    data = data_of(arg)
    if arg.size == "paper":
        c = jft.get_config()
        c.evals = dict(val="validation", test="test")
        c.evals.fewshot = dict(name="imagenet2012", train="train", test="validation")
        c.evals.fewshot.update(kind="fewshot", shots=(5,), seeds=5)
        return c
    (patch, width, depth, heads, mlp_dim), (steps, batch, rate), _ = BUDGETS[
        arg.size, data
    ]
    c = _small(arg, f"train[:{PARTS[data][0]}]")
    c.data.num_examples = PARTS[data][0]
    c.model = dict(variant=f"Ti/{patch}", width=width, depth=depth, num_heads=heads)
    c.model.mlp_dim = mlp_dim
    c.optim = dict(name="adam", learning_rate=rate, schedule="cosine")
    c.optim.update(warmup_fraction=0.05, weight_decay=0.1, grad_clip_norm=1.0)
    c.evals.fewshot = dict(kind="fewshot", train=pool(arg), test=TESTS[data])
    c.evals.fewshot.update(shots=(5,), seeds=5)
    _length(c, arg, steps, batch)
    return c


def finetuning(arg: SimpleNamespace) -> ConfigDict:
    """Returns a config that fine-tunes by SGD, with evaluations val and test."""
    data = data_of(arg)
    if arg.size == "paper":
        c = transfer.get_config("dataset=imagenet2012")
        c.data.split = "train[:99%]"
        c.evals = dict(val="train[99%:]", test="validation")
        return c
    _, _, (steps, batch, rate) = BUDGETS[arg.size, data]
    c = _small(arg, pool(arg))
    c.init = "?"  # The study sets it to the pretraining.
    c.model = pretraining(arg).model
    c.optim = dict(name="sgd", momentum=0.9, learning_rate=rate, schedule="cosine")
    c.optim.grad_clip_norm = 1.0
    _length(c, arg, steps, batch)
    return c


def drop(section: ConfigDict, *keys: str) -> None:
    """Deletes keys from a section, if it has them."""
    for key in keys:
        if key in section:
            del section[key]


def _small(arg: SimpleNamespace, split: str) -> ConfigDict:
    """Returns a config with the images of digits or CIFAR-10."""
    data, c = data_of(arg), ConfigDict()
    c.data = dict(name=data, split=split, num_classes=10)
    if data == "digits":
        c.data.update(image_size=(8, 8), channels=1)
        c.data.train_transform = "affine(shift=0.1, rotate=10, scale=(0.9, 1.1))"
    else:
        c.data.update(image_size=(32, 32), train_transform="flip | pad_crop(4)")
    first, end = PARTS[data]
    c.evals = dict(val=f"train[{first}:{end}]", test=TESTS[data])
    c.ema = dict(decay=0.0)
    return c


def _length(c: ConfigDict, arg: SimpleNamespace, steps: int, batch: int) -> None:
    c.total_steps, c.batch_size = steps, batch
    # A run that is killed loses at most a tenth.
    c.log_every_steps, c.checkpoint_every_steps = (
        max(1, steps // 50),
        max(1, steps // 10),
    )
    c.checkpoint = dict(max_to_keep=1)
    if arg.size == "gpu":
        c.model.dtype = "bfloat16"
