"""Mean corruption error of an ImageNet classifier on ImageNet-C (arXiv:1903.12261).

Data:   unpack noise.tar, blur.tar, weather.tar and digital.tar (and with extra=True
        extra.tar) of zenodo.org/record/2235448 into one folder.
Run:    python -m vit_jax.evaluate --model=CHECKPOINT --out=DIR \
            --config=configs/eval/corruptions.py:data=FOLDER,clean=imagenet2012@DIR
        data=imagenet2012_corrupted@DIR reads the data sets of TFDS. clean= is the data
        set of the clean images, for the relative mCE, and split= its split; both are
        optional.
Result: not run by us (images not available here); published: 76.7 % for a ResNet-50

The images have 224x224 pixels and are not cropped, as in the authors' evaluation
(hendrycks/robustness 8190fe3, ImageNet-C/test.py).
"""

from ml_collections import ConfigDict

from configs.eval.common import DATA, data_set, evaluation

MORE = dict(clean="", split="validation", extra=False)
ARGUMENTS = DATA | MORE


def get_config(arg: str | None = None) -> ConfigDict:
    arg, c = evaluation(arg, **MORE)
    corrupted = c.data
    c.evals.corruptions = dict(
        kind="corruptions", name=corrupted.name, data_dir=corrupted.data_dir
    )
    c.evals.corruptions.update(eval_transform="resize", extra=arg.extra)
    if arg.clean:
        c.data = data_set(arg.clean)
        c.data.num_threads = corrupted.num_threads
        c.evals.corruptions.clean = arg.split
        c.evals.clean = dict(kind="classification", split=arg.split)
    return c
