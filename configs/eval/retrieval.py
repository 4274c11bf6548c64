"""Recall at 1, 5 and 10 of weights with a text tower, from images to captions and back.

Run:    python -m vit_jax.evaluate --model=hf://openai/clip-vit-base-patch32 \\
            --config=configs/eval/retrieval.py:data=FOLDER,captions=txt [--json]
        FOLDER has val/*.jpg and val/*.txt, or a metadata.jsonl with captions in the
        field captions=; for TFDS or Parquet data, captions= is the feature or column.
Result: not run by us (a data set with captions is not available here)
"""

from ml_collections import ConfigDict

from configs.eval.common import DATA, evaluation

MORE = dict(split="", captions="txt")
ARGUMENTS = DATA | MORE


def get_config(arg: str | None = None) -> ConfigDict:
    arg, c = evaluation(arg, **MORE)
    retrieval = dict(kind="retrieval", split=arg.split, caption_key=arg.captions)
    c.evals.test = retrieval
    return c
