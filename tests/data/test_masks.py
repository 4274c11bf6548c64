"""Masks: decoded to class numbers, and moved as their images are."""

import dataclasses
import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from vit_jax.data import fields, imagenet, masks, pipeline
from vit_jax.data.decode import DamagedImage
from vit_jax.data.loader import Loader
from vit_jax.data.masks import IGNORED
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.open import open_source
from vit_jax.data.transforms import KNOWN, device, parse
from vit_jax.errors import UserError

CLASSES, H, W = 5, 41, 67
SIZE = (13, 17)  # `image_size` of `data_config`.
LARGE = (37, 53)  # In which the borders of the classes are few pixels.
KEY = jax.random.key(3)
LEVELS = 50  # Grey levels from one class to the next.


def encoded(picture, kind="PNG", **options):
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def saved(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def of_palette(classes):
    picture = Image.fromarray(classes.astype(np.uint8))
    picture = picture.convert("P")
    picture.putdata(classes.ravel().tolist())
    picture.putpalette(np.random.default_rng(0).integers(0, 256, 768).tolist())
    return picture


def regions(seed=0):
    """Returns classes in rectangles that are large enough to survive interpolation."""
    cells = np.random.default_rng(seed).integers(0, CLASSES, (4, 6))
    return np.kron(cells, np.ones((11, 12), int))[:H, :W]


def picture_of(classes):
    """Returns an image whose grey levels are its classes, from 10 on: no class is black."""
    return np.repeat((10 + LEVELS * classes)[..., None], 3, axis=-1).astype(np.uint8)


def inside(maps):
    """Returns where a pixel and its eight neighbours have one class."""
    around = {"size": (1, 3, 3), "mode": "constant", "cval": IGNORED - 1}
    return ndimage.maximum_filter(maps, **around) == ndimage.minimum_filter(
        maps, **around
    )


@dataclasses.dataclass(frozen=True)
class Pairs(Source):
    """Images that show their own classes."""

    records: tuple
    class_names, images, labels = (), None, None

    def __len__(self):
        return len(self.records)

    def __getitem__(self, i):
        image, mask = self.records[i]
        return {"image": image, "mask": mask}

    def describe(self, i):
        return f"pairs/{i}.png"

    record_id = describe


def pairs(count=7):
    seen = [regions(i) for i in range(count)]
    return Pairs(tuple((picture_of(c), c.astype(np.uint8)) for c in seen))


@pytest.fixture
def with_masks(data_config):
    return lambda **keys: data_config(
        **{"mask_key": "mask", "num_classes": CLASSES, **keys}
    )


def first(source, data, count=1, **keys):
    keys = {"batch_size": 6, "seed": 1, "start": 0, "stop": count} | keys
    with pipeline.train_batches(source, data, **keys) as batches:
        return list(batches)


GREY = regions().astype(np.uint8)
FILES = {
    "grey": encoded(Image.fromarray(GREY)),
    "16 bits": encoded(Image.fromarray(GREY.astype(np.uint16))),
    "palette": encoded(of_palette(GREY)),
    "palette of 4 bits": encoded(of_palette(GREY), bits=4),
    "transparent palette": encoded(of_palette(GREY), transparency=0),
    "tiff": encoded(Image.fromarray(GREY), "TIFF", compression="tiff_lzw"),
    "tiff of 16 bits": encoded(Image.fromarray(GREY.astype(np.uint16)), "TIFF"),
    "gif": encoded(of_palette(GREY), "GIF"),
    "npy": saved(GREY.astype(np.int64)),
    "npy with bands": saved(GREY[..., None]),
    "equal colours": encoded(Image.fromarray(np.repeat(GREY[..., None], 3, -1))),
    "array": GREY,
}


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_of_file_gives_its_numbers(with_masks, kind):
    data = with_masks()
    label_map = masks.read(FILES[kind], data, (H, W))
    assert label_map.dtype == np.int16
    np.testing.assert_array_equal(label_map[..., 0], GREY)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_grey_of_few_bits_is_not_stretched(with_masks, bits):
    import cv2

    values = np.random.default_rng(0).integers(0, 2**bits, (H, W))
    data = with_masks(num_classes=2**bits)
    if bits == 1:
        file = encoded(Image.fromarray(values.astype(bool)))
    else:
        file = few_bits(values, bits)
        assert cv2.imdecode(np.frombuffer(file, np.uint8), 0).max() == 255
    np.testing.assert_array_equal(masks.read(file, data, (H, W))[..., 0], values)


def few_bits(values, bits):
    """Encodes a grey PNG file of 2 or 4 bits, which Pillow does not write."""
    import struct
    import zlib

    digits = np.unpackbits(values.astype(np.uint8)[..., None], axis=-1)[..., -bits:]
    rows = np.packbits(digits.reshape(len(values), -1), axis=-1)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", values.shape[1], len(values), bits, 0, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def test_ignored_values_and_a_reduced_zero(with_masks):
    mask = np.array([[0, 1, 5], [255, 5, 3]], np.uint8)
    data = with_masks(reduce_zero_label=True)
    expected = [[IGNORED, 0, 4], [IGNORED, 4, 2]]
    assert masks.read(mask, data, (2, 3))[..., 0].tolist() == expected
    data = with_masks(ignore_label=5)
    mask[1, 0] = 2
    expected = [[0, 1, IGNORED], [2, IGNORED, 3]]
    assert masks.read(mask, data, (2, 3))[..., 0].tolist() == expected
    floor = masks.read(np.array([[-1, 4]]), with_masks(ignore_label=-1), (1, 2))
    assert floor.ravel().tolist() == [IGNORED, 4]


COLOURS = np.zeros((H, W, 3), np.uint8)
COLOURS[3, 4] = 128, 0, 7


@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        (encoded(Image.fromarray(COLOURS)), UserError, ["(128, 0, 7)", "grey PNG"]),
        (encoded(Image.fromarray(GREY), "JPEG"), UserError, ["JPEG", "grey PNG"]),
        (GREY / 2, UserError, ["float64", "integers"]),
        (GREY[:-1], DamagedImage, ["40x67", "41x67"]),
        (GREY.T, DamagedImage, ["67x41", "data.exif"]),
        (FILES["palette"][:90], DamagedImage, ["mask"]),
        (b"", DamagedImage, ["mask", "empty"]),
        (b"text", DamagedImage, ["mask", "decoded"]),
        (saved(GREY)[:50], DamagedImage, ["mask", "decoded"]),
        (GREY + 1, UserError, ["mask has 5", "num_classes=5", "reduce_zero_label"]),
        (GREY + 9, UserError, ["num_classes=5", "ignore_label="]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_a_mask_that_cannot_be_used_says_why(with_masks, mask, error, words):
    image = encoded(Image.fromarray(picture_of(regions())))
    source = Pairs(((image, mask),))
    with pytest.raises(error) as raised:
        masks.read_pair(source, with_masks(), 0)
    for word in words:
        assert word in str(raised.value)
    with pytest.raises(UserError, match=r"pairs/0.png") as raised:
        first(source, with_masks(train_transform="resize"))
    for word in words:
        assert word in str(raised.value)


def test_masks_of_any_values_are_read_by_them(with_masks):
    black_and_white = np.where(GREY > 1, 255, 0).astype(np.uint8)
    data = with_masks(num_classes=2, mask_values=(0, 255))
    for mask in (black_and_white, saved(black_and_white), black_and_white.astype(int)):
        found = masks.read(mask, data, (H, W))[..., 0]
        np.testing.assert_array_equal(found, GREY > 1)
    data = with_masks(num_classes=3, mask_values=(7, 0, 300), ignore_label=9)
    mask = np.choose(GREY % 4, [0, 300, 7, 9]).astype(np.uint16)
    expected = np.choose(GREY % 4, [1, 2, 0, masks.IGNORED])
    np.testing.assert_array_equal(masks.read(mask, data, (H, W))[..., 0], expected)
    mask[3, 4] = 8
    with pytest.raises(UserError, match=r"has 8 in row 3, column 4.*mask_values"):
        masks.read(mask, data, (H, W))
    for keys, match in (
        ({"num_classes": 3, "mask_values": (0, 255)}, r"data.mask_values=\(0, 255\)"),
        ({"num_classes": 3, "mask_values": (0, 1, 1)}, r"data.mask_values=\(0, 1, 1\)"),
        (
            {"num_classes": 2, "mask_values": (0, 7), "ignore_label": 7},
            "ignore_label=7",
        ),
    ):
        with pytest.raises(UserError, match=match):
            with_masks(**keys)


def test_what_is_ignored_is_no_class(with_masks):
    for keys in (
        {"ignore_label": 0},
        {"ignore_label": CLASSES, "reduce_zero_label": True},
        {"num_classes": 256},  # 255 counts for no class without a word.
    ):
        with pytest.raises(UserError, match=r"data.ignore_label=\d+ is also a class"):
            with_masks(**keys)
    data = with_masks(ignore_label=0, reduce_zero_label=True)
    assert masks.read(np.array([[0, 1, 5]]), data, None).ravel().tolist() == [-1, 0, 4]


def test_masks_have_as_many_classes_as_their_numbers_hold(with_masks):
    data = with_masks(num_classes=32_768, ignore_label=-1)
    found = masks.read(np.array([[0, 32_767]]), data, None)
    assert found.ravel().tolist() == [0, 32_767]
    with pytest.raises(UserError, match=r"data.num_classes=32769.*32,768"):
        with_masks(num_classes=32_769, ignore_label=-1)


def test_a_mask_fits_its_image_as_it_is_read(with_masks):
    tagged = Image.new("RGB", (W, H))
    exif = tagged.getexif()
    exif[0x0112] = 6  # A quarter turn.
    image = encoded(tagged, "JPEG", exif=exif)
    for mask, turned in ((GREY, False), (np.ascontiguousarray(GREY.T), True)):
        source = Pairs(((image, mask),))
        shown, label_map = masks.read_pair(source, with_masks(exif=turned), 0)
        assert shown.shape[:2] == label_map.shape == mask.shape
        with pytest.raises(DamagedImage, match=f"exif.*{not turned}"):
            masks.read_pair(source, with_masks(exif=not turned), 0)


def test_a_record_with_a_damaged_mask_is_skipped(with_masks):
    good, (image, _) = pairs(2).records[0], pairs(2).records[1]
    source = Pairs((good, (image, b"")))
    data = with_masks(train_transform="resize", on_error="skip")
    (batch,) = first(source, data)
    assert batch["skipped"].sum() == 3
    assert (batch["label_map"] >= 0).all()


GEOMETRY = [
    "resize",
    "inception_crop",
    "random_resized_crop",
    "random_resized_crop(interpolation='bicubic')",
    "clipped_crop(interpolation='bilinear')",
    "resize_small(59) | random_crop",
    "resize_small((39, 83)) | central_crop",
    "scale_crop(scale=(0.7, 4))",
    "scale_crop((37, 53), (1, 1))",
    "resize((29, 40)) | upsample",
    "random_resized_crop | flip | pad_crop(3)",
    "random_resized_crop | affine(shift=0.2, rotate=40, scale=(0.7, 1.6))",
    "scale_crop | flip | color_jitter(0.2, 0, 0)",
    "scale_crop(scale=(0.5, 1.5), pad=False) | pad(fill=0) | flip",
    "resize_long(80) | crop_or_pad(fill=(9, 9, 9))",
]


@pytest.mark.parametrize("line", GEOMETRY)
def test_image_and_mask_are_moved_equally(with_masks, line):
    data = with_masks(train_transform=line, image_size=LARGE)
    (batch,) = first(pairs(), data)
    ops = [op for op in parse.parse_train(line, LARGE).device if op.moves_pixels]
    index, labels = jnp.asarray(batch["index"]), jnp.zeros((6, 1))
    images, _ = device.apply(ops, jnp.asarray(batch["image"]), labels, index, KEY)
    maps = device.apply_to_maps(ops, jnp.asarray(batch["label_map"]), index, KEY)
    assert maps.dtype == jnp.int16
    assert maps.shape == images.shape[:3] == (6, *LARGE)
    maps, levels = np.asarray(maps), np.asarray(images).mean(-1)
    within = inside(maps)
    assert within.mean() > 0.4
    off = lambda maps: abs(levels - np.where(maps == IGNORED, 0, 10 + LEVELS * maps))
    assert (off(maps) < LEVELS / 2)[within].mean() > 0.98
    assert np.median(off(maps)[within]) < 1
    # By one pixel to any side the two would fit worse.
    for axis, shift in itertools.product((1, 2), (-1, 1)):
        assert off(np.roll(maps, shift, axis)).mean() > off(maps).mean()
    assert len(np.unique(maps[within])) > 2


@pytest.mark.parametrize("size", [(13, 17), (41, 30), (97, 131)])
def test_the_nearest_pixels_are_those_of_pillow(size):
    classes = np.random.default_rng(0).integers(-1, 900, (H, W)).astype(np.int16)
    expected = Image.fromarray(classes.astype(np.int32)).resize(
        size[::-1], Image.Resampling.NEAREST
    )
    (op,) = parse.parse_train("resize", size).host
    np.testing.assert_array_equal(op(classes[..., None], None)[..., 0], expected)
    if size > (H, W):
        enlarged = parse.parse_train("upsample", size).device
        index = jnp.zeros(1, jnp.uint32)
        found = device.apply_to_maps(enlarged, jnp.asarray(classes[None]), index, KEY)
        np.testing.assert_array_equal(found[0], expected)


@pytest.mark.slow
def test_device_transforms_keep_label_maps_exactly():
    maps = np.stack([regions(i) for i in range(9)])
    images = jnp.asarray(maps[..., None] + 1, jnp.float32)
    index = jnp.arange(9, dtype=jnp.uint32)
    ops = parse.parse_train("flip | color_jitter | pad_crop(5)", (H, W)).device
    moved = device.apply_to_maps(ops, jnp.asarray(maps, jnp.int16), index, KEY)
    # `apply` numbers the keys with the transforms of colours counted.
    plain = [op for op in ops if op.moves_pixels]
    by_flip, _ = device.apply([ops[0]], images, jnp.eye(9), index, KEY)
    key = jax.random.fold_in(KEY, 2)
    expected, _ = plain[1](by_flip, jnp.eye(9), index, key)
    np.testing.assert_array_equal(moved, expected[..., 0] - 1)
    assert (np.asarray(moved) == IGNORED).any()


COLOURS = [
    *("color_jitter", "grayscale(1)", "solarize(1)", "three_augment"),
    "photometric_distortion",
]
REFUSED = [
    *("augreg('light1')", "randaugment(2, 15)", "timm_randaugment", "multi_crop"),
    "naflex",
    *("cutmix", "mixup(0.2)", "mixup_or_cutmix", "random_erasing", "gaussian_blur"),
]


def test_every_transform_moves_masks_leaves_them_or_is_refused():
    lines = " | ".join([*GEOMETRY, *COLOURS, *REFUSED])
    assert {part.strip().split("(")[0] for part in lines.split("|")} == {*KNOWN}


@pytest.mark.parametrize("line", COLOURS)
def test_colours_leave_pixels_where_they_are(with_masks, line):
    data = with_masks(train_transform=f"resize | {line}", image_size=LARGE)
    (batch,) = first(pairs(), data)
    ops, labels = parse.parse_train(line, LARGE).device, jnp.zeros((6, 1))
    images, _ = device.apply(
        ops, jnp.asarray(batch["image"]), labels, jnp.asarray(batch["index"]), KEY
    )
    maps, images = batch["label_map"], np.asarray(images).mean(-1)
    within, off = inside(maps), []
    for image, label_map, kept in zip(images, maps, within, strict=True):
        # Images show their classes, so each class still has one grey level.
        for label in np.unique(label_map[kept]):
            levels = image[kept & (label_map == label)]
            off.extend(abs(levels - np.median(levels)))
    assert np.mean(np.array(off) < LEVELS / 4) > 0.9


@pytest.mark.parametrize("line", REFUSED)
def test_transforms_that_would_spoil_masks_are_refused_by_name(with_masks, line):
    name = "randaugment" if line.startswith("augreg") else line.split("(")[0]
    data = with_masks(train_transform=f"resize | {line}")
    with pytest.raises(UserError, match=f"{name} .*data.mask_key='mask'"):
        first(pairs(), data)
    with pytest.raises(UserError, match=f"{name} .*data.mask_key='mask'"):
        parse.check_batch({}, data)
    assert any(with_masks(train_transform=line, mask_key="").transforms)


OWN = """
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Turn:
    runs_on, moves_pixels = "host", True

    def __call__(self, image, rng):
        return np.ascontiguousarray(np.rot90(image, int(4 * rng.random())))


@dataclasses.dataclass(frozen=True)
class Only(Turn):
    on_colors, moves_masks = True, False


@dataclasses.dataclass(frozen=True)
class Invert:
    runs_on, on_colors = "host", True

    def __call__(self, image, rng):
        return 255 - image


@dataclasses.dataclass(frozen=True)
class Unmarked(Invert):
    on_colors = False


class Mine:
    class_names, class_colors = (), ((1, 2, 3),)
    labels = None
    images = np.arange(4 * 9 * 9 * 3).reshape(4, 9, 9, 3).astype(np.uint8)

    def __init__(self, key):
        self.key = key

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return {"image": self.images[i], self.key: self.images[i, ..., 0] % 5}

    def describe(self, i):
        return f"mine/{i}"

    record_id = describe


def open_source(data, split):
    return Mine(data.mask_key)
"""


def test_a_users_transforms_and_source_take_part(with_masks, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_masks.py").write_text(OWN)
    keys = {"name": "own_masks:open_source", "image_size": (9, 9)}
    line = "own_masks:Turn | own_masks:Invert"
    data = with_masks(train_transform=line, **keys)
    source = open_source(data, "train")
    assert source.class_colors == ((1, 2, 3),)
    (batch,) = first(source, data)
    expected = (255 - batch["image"][..., 0]) % 5
    np.testing.assert_array_equal(batch["label_map"], expected)
    assert (
        batch["image"][..., 0] != 255 - np.array(source.source.images[0, ..., 0])
    ).any()
    for name in ("own_masks:Unmarked", "own_masks:Only"):
        with pytest.raises(UserError, match=f"{name}.*data.mask_key"):
            first(source, with_masks(train_transform=name, **keys))
    with pytest.raises(UserError, match="own_masks:Invert.*data.channels=4"):
        parse.parsed(with_masks(train_transform="own_masks:Invert", channels=4))
    wrong = with_masks(train_transform=line, mask_key="truth", **keys)
    with pytest.raises(UserError, match="record [0-3].*mask"):
        first(open_source(wrong, "train"), wrong)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"num_workers": 1}, marks=pytest.mark.slow),
        {"num_threads": 1},
        {"hosts": 2},
    ],
)
def test_the_stream_is_the_same_however_it_is_loaded(with_masks, keys):
    line = "scale_crop(scale=(0.3, 2.0))"
    expected = first(pairs(), with_masks(train_transform=line), 4)
    hosts = keys.pop("hosts", 1)
    data = with_masks(train_transform=line, **keys)
    parts = [
        first(pairs(), data, 4, start=2, data_shard=i, num_data_shards=hosts)
        for i in range(hosts)
    ]
    for batch, *shards in zip(expected[2:], *parts, strict=True):
        for key in batch:
            found = np.concatenate([shard[key] for shard in shards])
            np.testing.assert_array_equal(found, batch[key])


def test_scale_crop_reaches_its_scales_and_pads_with_what_counts_for_nothing():
    op = parse.parse_train("scale_crop((20, 30), (0.5, 2.0))", SIZE).host[0]
    image = picture_of(regions())
    shapes, padded = [], 0
    for i in range(60):
        rng = np.random.Generator(np.random.Philox(i))
        same = np.random.Generator(np.random.Philox(i))
        cut = op(image, rng)
        label_map = op(regions().astype(np.int16)[..., None], same)[..., 0]
        assert cut.shape == (20, 30, 3)
        outside = cut.max(-1) == 0
        np.testing.assert_array_equal(label_map == IGNORED, outside)
        shapes.append((~outside).sum(0).max())
        padded += outside.any()
    # A third of the factors is below 1, and 20 rows of 41x67 are 33 columns wide.
    assert min(shapes) in (10, 11, 12)
    assert max(shapes) == 20
    assert 10 < padded < 35


def test_padding_is_the_mean_after_changes_of_colour(with_masks):
    line = (
        "scale_crop(scale=(0.3, 0.9), pad=False) | photometric_distortion | pad | flip"
    )
    data = with_masks(train_transform=line, image_size=LARGE)
    (batch,) = first(pairs(), data)
    outside = batch["label_map"] == IGNORED
    assert outside.any((1, 2)).all()
    fill = np.array([124, 116, 104])
    np.testing.assert_array_equal(
        batch["image"][outside], fill[None].repeat(outside.sum(), 0)
    )
    # Within half a grey level of 0.
    mean, std = np.array(imagenet.MEAN), np.array(imagenet.STD)
    assert (abs(fill / 255 - mean) / std < 0.01).all()
    # The picture is at the top left, and is not of one colour.
    assert not outside[:, 0, 0].any()
    assert batch["image"][~outside].std() > 5


@pytest.mark.parametrize(
    ("dtype", "channels", "fill", "expected"),
    [
        ("uint8", 1, (124, 116, 104), [115]),
        ("uint8", 5, 7, [7] * 5),
        ("uint16", 3, (1, 2, 3), [257, 514, 771]),
        ("float32", 3, (1, 2, 3), [1, 2, 3]),
    ],
)
def test_padding_has_the_depth_of_the_image(dtype, channels, fill, expected):
    image = np.ones((5, 40, channels), dtype)
    (op,) = parse.parse_train(f"pad(11, {fill})", SIZE).host
    found = op(image, None)
    assert found.shape == (11, 40, channels) and found.dtype == dtype
    np.testing.assert_array_equal(found[:5], image)
    np.testing.assert_array_equal(found[5:], np.broadcast_to(expected, found[5:].shape))


def test_scale_crop_avoids_parts_of_one_class(with_masks):
    # A third of the parts of this mask has no class that is three quarters of it.
    classes = np.zeros((H, W), int)
    classes[:, -24:] = 3
    source = Pairs(((picture_of(classes), classes.astype(np.uint8)),))
    shares = {}
    for most in (1.0, 0.75):
        line = f"scale_crop(scale=(2.0, 2.2), most_of_one={most})"
        (batch,) = first(source, with_masks(train_transform=line), batch_size=60)
        part = (batch["label_map"] == 0).mean((1, 2))
        shares[most] = (np.maximum(part, 1 - part) < 0.75).mean()
        seen = (batch["image"][..., 0] > 85) == (batch["label_map"] == 3)
        assert seen.mean() > 0.99
    assert shares[1.0] < 0.5
    assert shares[0.75] > 0.9
    # An image of one class is cut all the same.
    one = np.full((H, W), 2, np.uint8)
    (batch,) = first(Pairs(((picture_of(one), one),)), with_masks(train_transform=line))
    assert batch["label_map"].max() == 2


def test_scale_crop_of_one_factor_is_a_resize_and_a_crop():
    op = parse.parse_train("scale_crop(41, (1, 1))", SIZE).host[0]
    image = picture_of(regions())
    rng = np.random.Generator(np.random.Philox(4))
    cut = op(image, rng)
    starts = [s for s in range(W - 40) if (image[:, s : s + 41] == cut).all()]
    assert len(starts) == 1


def test_labels_and_masks_exclude_each_other(with_masks, data_config):
    assert not with_masks().has_labels
    assert data_config().has_labels
    assert not data_config(num_classes=0).has_labels
    wrong = {"class_balance": "inverse", "multi_label": True, "num_classes": 0}
    for key, value in wrong.items():
        with pytest.raises(UserError, match=f"data.mask_key='mask'.*{key}"):
            with_masks(**{key: value})
    with pytest.raises(UserError, match="mask_key='mask'.*label"):
        parse.check_batch({"label": None}, with_masks())
    with pytest.raises(UserError, match="mask_key=''.*masks"):
        parse.check_batch({"label_map": None}, data_config())


def test_masks_of_0_and_255_are_doubted(with_masks, caplog):
    data = with_masks(train_transform="resize", num_classes=2)
    mask = (regions() == 1).astype(np.uint8)
    image = picture_of(regions())
    pipeline.try_training(Pairs(((image, mask),)), data)
    assert not caplog.messages
    pipeline.try_training(Pairs(((image, 255 * mask),)), data)
    assert "ignore_label=255" in caplog.text


def test_pairs_are_read_whole(with_masks):
    source = pairs(3)
    for i in range(3):
        image, label_map = masks.read_pair(source, with_masks(), i)
        assert image.shape == (H, W, 3)
        np.testing.assert_array_equal(label_map, regions(i))
        assert label_map.dtype == np.int16


def test_a_batch_without_readable_rows_counts_for_nothing(with_masks):
    data = with_masks(train_transform="resize")
    specs = {"image": ((*SIZE, 3), "uint8")}
    made = fields.of(data, pairs())
    loader = Loader(pairs(), data, "", data.transforms.host, specs, fields=made)
    assert (loader.empty(2)["label_map"] == IGNORED).all()
    assert list(itertools.chain(loader.empty(2)["label_map"].shape)) == [2, *SIZE]
