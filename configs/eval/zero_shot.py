"""Zero-shot accuracy of weights with a text tower on a labelled data set (CLIP, SigLIP).

Run:    python -m vit_jax.evaluate --model=hf://openai/clip-vit-base-patch32 \\
            --config=configs/eval/zero_shot.py:data=FOLDER_OR_TFDS_NAME [--json]
        The class names are those of the data set; split= chooses a split.
        --config.evals.test.prompts="('a photo of a {}.',)" sets other prompts.
Result: digits_names.py's weights on digits: see docs/evaluation.md

prompts=80 uses the 80 prompts of CLIP's paper for ImageNet; prompts=7 the seven of them
that its authors selected later on ImageNet's training images, which are slightly better
(openai/CLIP d05afc4, notebooks/Prompt_Engineering_for_ImageNet.ipynb).
"""

from ml_collections import ConfigDict

from configs.eval.common import DATA, evaluation

MORE = dict(split="", prompts=(7, 80))
ARGUMENTS = DATA | MORE
SEVEN = ("itap of a {}.", "a bad photo of the {}.", "a origami {}.")
SEVEN += ("a photo of the large {}.", "a {} in a video game.", "art of the {}.")
SEVEN += ("a photo of the small {}.",)

# Forms of the eighty prompts, each with "a" and with "the" for ARTICLE.
_PICTURES = (
    "bad photo, black and white photo, blurry photo, bright photo, close-up photo"
)
_PICTURES += ", cropped photo, dark photo, doodle, drawing, good photo"
_PICTURES += ", jpeg corrupted photo, low resolution photo, painting, photo"
_PICTURES += ", pixelated photo, rendering, rendition, sculpture, sketch, tattoo"
_SEEN = "clean, cool, dirty, hard to see, large, nice, small, weird"
_MADE = "cartoon, embroidered, origami, plastic, plushie, toy"
_FORMS = (
    *(f"a {picture} of ARTICLE {{}}." for picture in _PICTURES.split(", ")),
    *(f"a photo of ARTICLE {seen} {{}}." for seen in _SEEN.split(", ")),
    *(f"ARTICLE {made} {{}}." for made in _MADE.split(", ")),
    *(f"{short} of ARTICLE {{}}." for short in ("art", "graffiti", "itap")),
    "ARTICLE {} in a video game.",
)
EIGHTY = tuple(
    form.replace("ARTICLE", article) for form in _FORMS for article in ("a", "the")
)
EIGHTY += ("a photo of many {}.", "a photo of my {}.", "a photo of one {}.")
EIGHTY += ("itap of my {}.",)


def get_config(arg: str | None = None) -> ConfigDict:
    arg, c = evaluation(arg, **MORE)
    prompts = {7: SEVEN, 80: EIGHTY}[arg.prompts]
    c.evals.test = dict(kind="zero_shot", split=arg.split, prompts=prompts)
    c.evals.test.update(imagenet_names="clip", canonicalize=False)
    return c
