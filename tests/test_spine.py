"""The spine, what an ordinary run executes, names few features that it does not use.

The files are those of the contract "spine" in pyproject.toml, which forbids imports of such
features. Here their words are counted, docstrings and messages included. Where a count
falls, lower the number; a feature that needs a higher one has no seam yet.
"""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[1]

# Feature -> its words, and the lines of the spine that may have one.
WORDS = {
    "images of any size": (
        r"naflex|\bgrids\b|PatchSequences|_sequences\b|\bpacks\b",
        36,
    ),
    "bands and depth": (r"\bbands\b|PixelFormat|uint16", 10),
    "masks": (r"label_map|mask_key|sees_mask|moves_masks", 15),
    "captions and texts": (r"caption|tokenizer|text_tower|TextTower", 11),
    "token merging": (r"token_merging", 0),
    "groups of stochastic depth": (r"drop_path_group", 0),
    "SAM": (r"\bsam_|\bG?SAM\b", 0),
    "local disks": (r"[Ll]ocal_?[Cc]heckpoint", 5),
    "other networks": (r"(?i)resnet|swin|mixer|segmenter|flexivit", 7),
    "methods": (r"\b(mae|MAE|dino|DINO|simmim|SimMIM|contrastive|CLIP)\b", 13),
    "running means": (r"stateful|BatchNorm", 17),
    "stacked blocks": (r"\bstacked\b|unstack", 11),
}


def files():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    contracts = {each["id"]: each for each in settings["importlinter"]["contracts"]}
    for name in contracts["spine"]["source_modules"]:
        yield ROOT / f"{name.replace('.', '/')}.py"


def test_the_spine_names_no_more_features_than_it_did():
    found = {feature: [] for feature in WORDS}
    for path in files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for feature, (words, _) in WORDS.items():
                if re.search(words, line):
                    where = f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
                    found[feature].append(where)
    counts = {feature: len(lines) for feature, lines in found.items()}
    expected = {feature: most for feature, (_, most) in WORDS.items()}
    other = [
        line for name in WORDS if counts[name] != expected[name] for line in found[name]
    ]
    assert counts == expected, "\n".join(other)
