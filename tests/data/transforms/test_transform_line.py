import pickle

import pytest
from helpers import tiny_config

from vit_jax.data.config import DataConfig
from vit_jax.data.transforms import geometric, mixing, parse, photometric
from vit_jax.data.transforms import host as host_transforms
from vit_jax.errors import UserError
from vit_jax.training import loop

SIZE = (13, 17)


def test_a_line_of_operations_is_parsed_in_order():
    host, device = parse.parse_train(
        "resize_small(40)|random_crop( (24, 31) ) | flip | mixup(alpha=0.2)", SIZE
    )
    assert host == (
        host_transforms.ResizeSmall(40),
        host_transforms.RandomCrop((24, 31)),
    )
    assert device == (geometric.Flip(), mixing.Mixup(0.2))


def test_the_size_is_the_images_unless_given():
    host, _ = parse.parse_train(
        "random_resized_crop | resize(7) | central_crop(size=5)", SIZE
    )
    assert [op.size for op in host] == [SIZE, 7, 5]
    (op,), _ = parse.parse_train("random_resized_crop(area=(0.3, 1))", SIZE)
    assert (op.size, op.area) == (SIZE, (0.3, 1))


def test_what_is_not_given_is_as_in_dino():
    ops = parse.parse_train("grayscale | gaussian_blur(0.1) | solarize(0.2)", SIZE)
    assert ops.device == (
        photometric.Grayscale(0.2),
        photometric.GaussianBlur(0.1, (0.1, 2.0)),
        photometric.Solarize(0.2, 128.0),
    )


def test_an_empty_line_has_no_operations():
    assert parse.parse_train("", SIZE) == parse.parse_train("  ", SIZE) == ((), ())


# RandAugment's layers and magnitude and mixup's alpha (arXiv:2106.10270, section 3.4).
AUGREG = {
    "none": (),
    "light1": (2, 0),
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5),
    "strong2": (2, 20, 0.8),
}


@pytest.mark.parametrize("level", AUGREG)
def test_a_level_of_augreg_stands_for_randaugment_and_mixup(level):
    found = parse.parse_train(f"random_resized_crop | augreg({level!r}) | flip", SIZE)
    augment, alpha = AUGREG[level][:2], AUGREG[level][2:]
    spec = "random_resized_crop"
    spec += " | randaugment({}, {})".format(*augment) if augment else ""
    spec += " | flip" + (" | mixup({})".format(*alpha) if alpha else "")
    assert found == parse.parse_train(spec, SIZE)
    assert len(found.host) + len(found.device) == 2 + bool(augment) + bool(alpha)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("augreg('light3')", r"level='light3' is not one of none, .*; it is augreg"),
        ("augreg", r"missing a required argument: 'level'"),
        ("randaugment(m=3)", r"it is randaugment\(layers=2, magnitude=10.0\)"),
        ("cutmix(0)", r"alpha=0 must be above 0; it is cutmix\(alpha=1.0\)"),
        ("mixup_or_cutmix(cutmix=0)", "cutmix=0 must be above 0"),
        ("mixup_or_cutmix(switch=2)", "switch=2 must be at most 1"),
        ("color_jitter(brightness=-0.1)", "brightness=-0.1 must be at least 0"),
        ("color_jitter(hue=0.6)", "hue=0.6 must be at most 0.5"),
        ("color_jitter(p=-1)", "p=-1 must be at least 0"),
        ("grayscale(p=1.5)", "p=1.5 must be at most 1"),
        ("gaussian_blur(radius=(0, 2))", r"radius=\(0, 2\) is not 0 < least <= most"),
        ("three_augment(radius=(0, 2))", r"radius=\(0, 2\) is not 0 < least <= most"),
        ("solarize(threshold=300)", "threshold=300 must be at most 255"),
        ("random_erasing('x')", "it is random_erasing"),
        ("random_erasing(p=1.1)", "p=1.1 must be at most 1"),
        ("random_erasing(area=(0, 1))", r"area=\(0, 1\) is not 0 < least"),
        ("random_erasing(ratio=(2, 1))", r"ratio=\(2, 1\) is not 0 < least"),
        ("random_erasing(fill='x')", "fill='x' is not 'pixel', 'normal' or a number"),
        ("random_erasing(fill=256)", "fill=256 is not"),
        ("multi_crop(num_small=-1)", "num_small=-1 must be at least 0"),
        ("multi_crop(area=(0, 1))", r"area=\(0, 1\) is not 0 < least"),
        ("multi_crop(small_size=0)", "size=0 is not a whole number"),
        ("multi_crop(sizes=((8, 4),), small_size=96)", "small_size=96 beside sizes"),
        ("multi_crop(8, sizes=((8, 4),))", "size=8 or .* beside sizes"),
        ("multi_crop(interpolation='box')", "interpolation='box' is not one of fast"),
        (
            "random_resized_crop(interpolation='no')",
            "='no' is not one of fast, bilinear, bicubic",
        ),
        (
            "random_resized_crop(antialias=False, interpolation='bicubic')",
            "antialias=False needs interpolation='fast'",
        ),
        ("random_resized_crop(antialias=3)", "antialias=3 is not True or False"),
        ("randaugment(1.5)", "layers=1.5 is not a whole number"),
        ("randaugment(2, 31)", "magnitude=31 must be at most 30"),
        ("flip | resize", "resize runs in the loader.* before flip"),
        ("augreg('light2') | mixup(0.1)", "mixes examples twice: keep one of"),
        ("cutmix | mixup_or_cutmix", "mixes examples twice: keep one of"),
        ("upsample(32)", r"to \(32, 32\), but data\.image_size is \(13, 17\)"),
        ("upsample('a')", "size='a' is not a whole number"),
        ("flip | augreg('light1')", "augreg runs in the loader.* before flip"),
        ("fip", "unknown operation 'fip'; known are inception_crop.* mixup"),
        ("mixup", r"missing a required argument: 'alpha'; it is mixup\(alpha"),
        ("flip(0.3)", r"too many positional arguments; it is flip\(\)"),
        ("resize(sise=3)", r"unexpected keyword argument 'sise'; it is resize\(size"),
        ("resize('a')", "size='a' is not a whole number"),
        ("resize(0)", "size=0 is not"),
        ("resize_small(2.5)", "size=2.5 is not a whole number"),
        ("random_resized_crop(area=(0, 1))", r"area=\(0, 1\) is not"),
        ("random_resized_crop(area=3)", "it is random_resized_crop"),
        ("mixup(0)", "alpha=0 must be above 0"),
        ("affine(scale=(2, 1))", r"scale=\(2, 1\) is not"),
        ("flip || mixup(1)", "cannot read ''"),
        ("resize(open('x'))", "cannot read"),
        ("__import__('os').system('x')", "cannot read"),
        ("resize(*[3])", "cannot read"),
        ("resize(", "cannot read"),
    ],
)
def test_a_mistake_names_the_line_and_what_there_is(spec, match):
    with pytest.raises(UserError, match=r"^data\.train_transform=.*" + match):
        parse.parse_train(spec, SIZE)


def test_evaluation_takes_only_operations_without_randomness():
    assert parse.parse_eval("resize_small(20) | central_crop", SIZE) == (
        host_transforms.ResizeSmall(20),
        host_transforms.CentralCrop(SIZE),
    )
    for spec in ("flip", "random_resized_crop", "randaugment", "multi_crop"):
        with pytest.raises(
            UserError,
            match=r"data\.eval_transform.*transforms without random choices are resize, resize_s",
        ):
            parse.parse_eval(spec, SIZE)


@pytest.mark.slow
def test_a_run_parses_the_line_once(monkeypatch, tmp_path):
    lines, parse_train = [], parse.parse_train

    def counted(spec, image_size):
        lines.append(spec)
        return parse_train(spec, image_size)

    monkeypatch.setattr(parse, "parse_train", counted)
    data = {"train_transform": "flip | mixup(0.2)", "num_workers": 1}
    loop.train(tiny_config(total_steps=2, data=data), tmp_path / "run")
    assert lines == ["flip | mixup(0.2)"]


def test_loader_processes_get_no_parsed_lines():
    data = DataConfig(train_transform="flip")
    assert data.transforms.device == (geometric.Flip(),)
    assert "transforms" not in vars(pickle.loads(pickle.dumps(data)))
