"""k-NN accuracy of frozen features, weighted as in DINO (arXiv:2104.14294).

Run:    python -m vit_jax.evaluate --model=CHECKPOINT \
            --config=configs/eval/knn.py:data=FOLDER_OR_TFDS_NAME [--json]
        FOLDER, train= and test=: see fewshot.py, which has these numbers beside its own.
        k=10 lets fewer neighbours vote.
Result: digits.py's weights on digits: see docs/benchmarks/from_scratch.md
"""

from ml_collections import ConfigDict

from configs.eval.common import DATA, evaluation

MORE = dict(train="", test="", k=20, temperature=0.07)
ARGUMENTS = DATA | MORE


def get_config(arg: str | None = None) -> ConfigDict:
    arg, c = evaluation(arg, **MORE)
    c.evals.knn = dict(kind="knn", train=arg.train, test=arg.test)
    c.evals.knn.update(k=arg.k, temperature=arg.temperature)
    return c
