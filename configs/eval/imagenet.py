"""ImageNet classifiers on the validation images, ReaL, ImageNet-v2 and ObjectNet.

Data:   imagenet2012_real has the validation images with both kinds of labels;
        python -m vit_jax.datasets prints how to get each data set. DIR is the folder in
        which TFDS prepared them.
Run:    python -m vit_jax.evaluate --model=CHECKPOINT \
            --config=configs/eval/imagenet.py:data_dir=DIR,objectnet=FOLDER
        v2=False leaves out ImageNet-v2, and without objectnet= ObjectNet is left out.
        variants=True adds ImageNet-A and -R (arXiv:1907.07174, 2006.16241), scored over
        their 200 classes as by their authors. real=FILE reads imagenet2012, and the
        labels of ReaL from the authors' real.json.
Result: not run by us (images not available here); published: the paper's table 2

Validation and ReaL share one pass over the images.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg

ARGUMENTS = dict(data_dir="", real="", v2=True, variants=False, objectnet="")


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = ConfigDict()
    c.batch_size = 256
    name, key = "imagenet2012_real", "original_label"
    if arg.real:
        name, key = "imagenet2012", "label"
    c.data = dict(name=name, data_dir=arg.data_dir)
    c.evals = {}
    same = dict(name=name, label_key=key)
    c.evals.imagenet = dict(kind="classification", split="validation", **same)
    c.evals.real = dict(kind="real", split="validation", **same)
    c.evals.real.labels = arg.real
    if arg.variants:
        for name in ("imagenet_a", "imagenet_r"):
            c.evals[name] = dict(kind="classification", name=name, split="test")
            c.evals[name].only_present_classes = True
    if arg.v2:
        c.evals.v2 = dict(kind="classification", name="imagenet_v2/matched-frequency")
        c.evals.v2.split = "test"
    if arg.objectnet:
        c.evals.objectnet = dict(kind="objectnet", data_dir=arg.objectnet)
    return c
