"""Top-1, top-5, loss, calibration and confusion matrix of a classifier.

Run:    python -m vit_jax.evaluate --model=CHECKPOINT --out=DIR \
            --config=configs/eval/classification.py:data=FOLDER_OR_TFDS_NAME
        split= chooses a split; the default is the data set's test split, or all images
        of a folder that has only class folders.
Result: digits.py's weights on digits: see docs/benchmarks/from_scratch.md
"""

from ml_collections import ConfigDict

from configs.eval.common import DATA, evaluation

MORE = dict(split="")
ARGUMENTS = DATA | MORE


def get_config(arg: str | None = None) -> ConfigDict:
    arg, c = evaluation(arg, **MORE)
    c.evals.test = dict(kind="classification", split=arg.split)
    return c
