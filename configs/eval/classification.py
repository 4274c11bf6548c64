"""Top-1, top-5, loss, calibration and confusion of a classifier on its own classes.

Run:    python -m vit_jax.evaluate --model=CHECKPOINT --out=DIR \
            --config=configs/eval/classification.py:data=FOLDER_OR_TFDS_NAME
        split= names another split than the one that the data set is tested on; of a
        folder of class folders alone that is all of it.
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
