import pytest

from vit_jax.data import device_ops, host_ops, ops
from vit_jax.errors import UserError

SIZE = (13, 17)


def test_a_line_of_operations_is_parsed_in_order():
    host, device = ops.parse_train(
        "resize_small(40)|random_crop( (24, 31) ) | flip | mixup(alpha=0.2)", SIZE
    )
    assert host == (host_ops.ResizeSmall(40), host_ops.RandomCrop((24, 31)))
    assert device == (device_ops.Flip(), device_ops.Mixup(0.2))


def test_the_size_is_the_images_unless_given():
    host, _ = ops.parse_train("inception_crop | resize(7) | central_crop(size=5)", SIZE)
    assert [op.size for op in host] == [SIZE, 7, 5]
    (op,), _ = ops.parse_train("inception_crop(area=(0.3, 1))", SIZE)
    assert (op.size, op.area) == (SIZE, (0.3, 1))


def test_an_empty_line_has_no_operations():
    assert ops.parse_train("", SIZE) == ops.parse_train("  ", SIZE) == ((), ())


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("fip", "unknown operation 'fip'; known here are inception_crop.* mixup"),
        ("mixup", r"missing a required argument: 'alpha'; it is mixup\(alpha"),
        ("flip(0.3)", r"too many positional arguments; it is flip\(\)"),
        ("resize(sise=3)", r"unexpected keyword argument 'sise'; it is resize\(size"),
        ("resize('a')", "size='a' is not a whole number"),
        ("resize(0)", "size=0 is not"),
        ("resize_small(2.5)", "size=2.5 is not a positive whole number"),
        ("inception_crop(area=(0, 1))", r"area=\(0, 1\) is not"),
        ("inception_crop(area=3)", "it is inception_crop"),
        ("mixup(0)", "alpha=0 is not positive"),
        ("pad_crop(-1)", "pad=-1 is not"),
        ("affine(scale=(2, 1))", r"scale=\(2, 1\) is not"),
        ("flip || mixup(1)", "cannot read ''"),
        ("resize(open('x'))", "cannot read"),
        ("__import__('os').system('x')", "cannot read"),
        ("resize(*[3])", "cannot read"),
        ("resize(", "cannot read"),
    ],
)
def test_a_mistake_names_the_line_and_what_there_is(spec, match):
    with pytest.raises(UserError, match=r"^data\.ops=.*" + match):
        ops.parse_train(spec, SIZE)


def test_a_host_operation_after_a_device_operation_is_a_user_error():
    with pytest.raises(UserError, match="resize runs in the loader.* before flip"):
        ops.parse_train("flip | resize", SIZE)


def test_evaluation_takes_only_operations_without_randomness():
    assert ops.parse_eval("resize_small(20) | central_crop", SIZE) == (
        host_ops.ResizeSmall(20),
        host_ops.CentralCrop(SIZE),
    )
    for spec in ("flip", "inception_crop", "random_crop"):
        with pytest.raises(
            UserError, match=r"data\.eval_ops.*here are resize, resize_s"
        ):
            ops.parse_eval(spec, SIZE)
