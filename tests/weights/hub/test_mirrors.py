import re

import pytest

from vit_jax.models import variants
from vit_jax.weights.hub import mirrors

NAMES = [name for family in mirrors.families() for name in mirrors.names(family)]


PUBLISHED = """
augreg:B/16
gs://vit_models/augreg/B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz
hf://timm/vit_base_patch16_224.augreg_in21k

augreg:R26+S/32-i1k-384
gs://vit_models/augreg/R26_S_32-i21k-300ep-lr_0.001-aug_medium2-wd_0.03-do_0.0-sd_0.0\
--imagenet2012-steps_20k-lr_0.03-res_384.npz
hf://timm/vit_small_r26_s32_384.augreg_in21k_ft_in1k

augreg-i1k:B/32-384
gs://vit_models/augreg/B_32-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.1-sd_0.1\
--imagenet2012-steps_20k-lr_0.01-res_384.npz
hf://timm/vit_base_patch32_384.augreg_in1k

deit:B/16-distilled-384
hf://facebook/deit-base-distilled-patch16-384
hf://timm/deit_base_distilled_patch16_384.fb_in1k
https://dl.fbaipublicfiles.com/deit/deit_base_distilled_patch16_384-d0272ac0.pth\
#sha256=d0272ac0

bit:R152x4-i1k
gs://bit_models/BiT-M-R152x4-ILSVRC2012.npz
hf://timm/resnetv2_152x4_bit.goog_in21k_ft_in1k
"""


@pytest.mark.parametrize("entry", PUBLISHED.strip().split("\n\n"))
def test_places_are_those_that_were_published(entry):
    name, *places = entry.split("\n")
    assert mirrors.sources(name) == tuple(places)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_of_a_model_that_there_is(name):
    variant = re.sub(r"-(i21k|i1k|distilled|\d+).*$", "", name.partition(":")[2])
    variants.parse(variant)
    for place in mirrors.sources(name):
        assert re.match("(hf|gs|https)://[^/]+/[^/]+", place)


def test_no_place_stands_for_two_models():
    places = [place for name in NAMES for place in mirrors.sources(name)]
    assert len(set(places)) == len(places)


def test_copies_are_the_other_places():
    first, *others = mirrors.sources("paper:L/16-i21k")
    assert len(others) == 4
    assert mirrors.copies(first) == tuple(others)
    assert mirrors.copies("gs://vit_models/unknown.npz") == ()


def test_unknown_names_have_no_place():
    assert mirrors.sources("paper:B/17") == ()
