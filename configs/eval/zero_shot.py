"""Zero-shot accuracy of weights with a text tower on a labelled data set (CLIP, SigLIP).

Run:    python -m vit_jax.evaluate --model=hf://openai/clip-vit-base-patch32 \\
            --config=configs/eval/zero_shot.py:data=FOLDER_OR_TFDS_NAME [--json]
        The names of classes are those of the data set; split= names another split.
        --config.evals.test.prompts="('a photo of a {}.',)" are other prompts.
Result: digits_names.py's weights on digits: see docs/evaluation.md
"""

from ml_collections import ConfigDict

from configs.eval.common import DATA, evaluation

MORE = dict(split="")
ARGUMENTS = DATA | MORE
# Seven of CLIP's eighty prompts for ImageNet (Prompt_Engineering_for_ImageNet.ipynb).
PROMPTS = ("itap of a {}.", "a bad photo of the {}.", "a origami {}.")
PROMPTS += ("a photo of the large {}.", "a {} in a video game.", "art of the {}.")
PROMPTS += ("a photo of the small {}.",)


def get_config(arg: str | None = None) -> ConfigDict:
    arg, c = evaluation(arg, **MORE)
    c.evals.test = dict(kind="zero_shot", split=arg.split, prompts=PROMPTS)
    return c
