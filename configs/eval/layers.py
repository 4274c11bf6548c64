"""k-NN and a linear probe on frozen features, for comparing layers.

Run:    python -m vit_jax.evaluate --model=CHECKPOINT --layers --out=FOLDER \
            --config=configs/eval/layers.py:data=FOLDER_OR_TFDS_NAME
        FOLDER, train= and test=: see fewshot.py; --layers=2,5,-1 chooses layers.
Result: DeiT-Ti on tf_flowers: see docs/features.md

k-NN is that of DINO (k 20, temperature 0.07); the probe is that of probe.py.
"""

from ml_collections import ConfigDict

from configs.eval.common import DATA, evaluation

MORE = dict(train="", test="", held_out=0.1)
ARGUMENTS = DATA | MORE


def get_config(arg: str | None = None) -> ConfigDict:
    arg, c = evaluation(arg, **MORE)
    splits = dict(train=arg.train, test=arg.test)
    c.evals.knn = dict(kind="knn", k=20, temperature=0.07, **splits)
    c.evals.probe = dict(kind="probe", held_out=arg.held_out, **splits)
    return c
