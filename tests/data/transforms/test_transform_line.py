import pytest

from vit_jax.data.transforms import device as device_transforms
from vit_jax.data.transforms import host as host_transforms
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError

SIZE = (13, 17)


def test_a_line_of_operations_is_parsed_in_order():
    host, device = parse.parse_train(
        "resize_small(40)|random_crop( (24, 31) ) | flip | mixup(alpha=0.2)", SIZE
    )
    assert host == (
        host_transforms.ResizeSmall(40),
        host_transforms.RandomCrop((24, 31)),
    )
    assert device == (device_transforms.Flip(), device_transforms.Mixup(0.2))


def test_the_size_is_the_images_unless_given():
    host, _ = parse.parse_train(
        "inception_crop | resize(7) | central_crop(size=5)", SIZE
    )
    assert [op.size for op in host] == [SIZE, 7, 5]
    (op,), _ = parse.parse_train("inception_crop(area=(0.3, 1))", SIZE)
    assert (op.size, op.area) == (SIZE, (0.3, 1))


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
    found = parse.parse_train(f"inception_crop | augreg({level!r}) | flip", SIZE)
    augment, alpha = AUGREG[level][:2], AUGREG[level][2:]
    spec = "inception_crop"
    spec += " | randaugment({}, {})".format(*augment) if augment else ""
    spec += " | flip" + (" | mixup({})".format(*alpha) if alpha else "")
    assert found == parse.parse_train(spec, SIZE)
    assert len(found.host) + len(found.device) == 2 + bool(augment) + bool(alpha)


def test_examples_are_mixed_once():
    for spec in ("augreg('light2') | mixup(0.1)", "cutmix | mixup_or_cutmix"):
        with pytest.raises(UserError, match="mixes examples twice: keep one of"):
            parse.parse_train(spec, SIZE)
    assert parse.parse_train("augreg('light1') | cutmix", SIZE).device == (
        device_transforms.Cutmix(),
    )


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (
            "augreg('light3')",
            r"level='light3' is not one of none, .*strong2; it is augreg",
        ),
        ("augreg", r"missing a required argument: 'level'"),
        ("randaugment(m=3)", r"it is randaugment\(layers=2, magnitude=10.0\)"),
        ("cutmix(0)", r"alpha=0 must be above 0; it is cutmix\(alpha=1.0\)"),
        ("color_jitter(hue=1)", "hue=1 must be at most 0.5"),
        ("random_erasing('x')", "it is random_erasing"),
        ("upsample('a')", "size='a' is not a whole number"),
        ("flip | augreg('light1')", "augreg runs in the loader.* before flip"),
        ("fip", "unknown operation 'fip'; known here are inception_crop.* mixup"),
        ("mixup", r"missing a required argument: 'alpha'; it is mixup\(alpha"),
        ("flip(0.3)", r"too many positional arguments; it is flip\(\)"),
        ("resize(sise=3)", r"unexpected keyword argument 'sise'; it is resize\(size"),
        ("resize('a')", "size='a' is not a whole number"),
        ("resize(0)", "size=0 is not"),
        ("resize_small(2.5)", "size=2.5 is not a whole number"),
        ("inception_crop(area=(0, 1))", r"area=\(0, 1\) is not"),
        ("inception_crop(area=3)", "it is inception_crop"),
        ("mixup(0)", "alpha=0 must be above 0"),
        ("pad_crop(-1)", "pad=-1 must be at least 0"),
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


def test_a_host_operation_after_a_device_operation_is_a_user_error():
    with pytest.raises(UserError, match="resize runs in the loader.* before flip"):
        parse.parse_train("flip | resize", SIZE)


def test_evaluation_takes_only_operations_without_randomness():
    assert parse.parse_eval("resize_small(20) | central_crop", SIZE) == (
        host_transforms.ResizeSmall(20),
        host_transforms.CentralCrop(SIZE),
    )
    for spec in ("flip", "inception_crop", "random_crop", "randaugment", "augreg"):
        with pytest.raises(
            UserError, match=r"data\.eval_transform.*here are resize, resize_s"
        ):
            parse.parse_eval(spec, SIZE)
