"""What a format writes is read back to the bit, and written again the same."""

import pytest
from flax.traverse_util import flatten_dict
from helpers import slow_but
from trees import assert_same, checkpoint, network

from vit_jax import models, weights
from vit_jax.weights import Preprocess, export
from vit_jax.weights.formats import files
from vit_jax.weights.formats.registry import WRITERS

NAMES = tuple("abcdefg")
BIT = {"variant": "R50x1", "stem_width": 32, "zero_pool": True}
# Options of networks that a format holds as they are, of Ti/4 with three heads.
SAME = {
    "timm": [
        {},
        {"channels": 1},
        {"distillation": True},
        {"pool": "gap"},
        {"pool": "gap", "fc_norm": True, "class_token": True},
        {"pool": "map", "class_token": True},
        {"pool": "none"},
        {"activation": "gelu", "layer_norm_eps": 1e-5},
        {"posemb": "none"},
        {"num_register_tokens": 2, "layer_scale_init": 0.1},
        {"activation": "swiglu", "pool": "gap"},
        {"activation": "swiglu", "num_register_tokens": 1, "posemb": "none"},
        {"num_classes": 0},
        {"variant": "R26+S/32", "image_size": (64, 96)},
        {"variant": "R+Ti/16", "image_size": (32, 96)},
        BIT,
        BIT | {"variant": "R152x2", "num_classes": 0},
    ],
    "hf": [
        {"activation": "gelu", "channels": 1, "layer_norm_eps": 1e-12},
        {"image_size": (20, 20)},
        {"num_classes": 0},
        {"num_classes": 0, "representation_layer": True},
        {"distillation": True},
        {"distillation": True, "num_classes": 0},
    ],
    "safetensors": [{}, BIT | {"stage_depths": (1, 1)}],
}
CASES = [(to, options) for to, networks in SAME.items() for options in networks]


FAST = [(to, options) for to, networks in SAME.items() for options in networks[:3]]
FAST += [case for case in CASES if case[1].get("variant") == "R26+S/32"]


@pytest.mark.parametrize(
    ("to", "options"),
    slow_but(FAST, CASES),
    ids=str,
)
def test_a_network_comes_back_to_the_bit_and_is_written_again(tmp_path, to, options):
    model = network(**options)
    channels, classes = model.image_shape[2], model.options["num_classes"]
    given = checkpoint(
        model,
        preprocess=Preprocess(
            model.image_shape[:2],
            (0.1, 0.2, 0.3)[:channels],
            (0.4, 0.5, 0.6)[:channels],
            "bicubic",
            squash=True,
        ),
        class_names=NAMES[:classes],
        loss="sigmoid" if channels == 1 and to == "hf" else "softmax",
    )
    out = [tmp_path / f"{name}{WRITERS[to].suffix}" for name in "ab"]
    told = ["stem"] if "+" in options.get("variant", "") else []
    found = given
    for path in out:
        _, notes = export.export(found, to, path)
        found = weights.open_pretrained(path)
        for lines in (notes, found.notes):
            assert [line.split(":")[0] for line in lines] == told
        assert_same(found.params, flatten_dict(given.params, sep="/"))
        again = models.create(**found.options).options
        # Sizes have more than one name.
        assert again | {"variant": ""} == model.options | {"variant": ""}
        assert (found.preprocess, found.class_names, found.loss) == (
            given.preprocess,
            given.class_names,
            given.loss,
        )
    first, second = map(files.read, out)
    assert_same(second.flat, first.flat)
    assert second.sidecars == first.sidecars
