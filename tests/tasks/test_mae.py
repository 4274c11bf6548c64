"""MAE: masks, losses, gradients, tables and schedules of facebookresearch/mae."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import tiny_config, write_workdir

from vit_jax import models, weights
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.models.positions.sincos2d import sincos2d
from vit_jax.tasks import masking
from vit_jax.tasks.mae import MaeConfig
from vit_jax.training import optim
from vit_jax.training.schedules import CosineConfig
from vit_jax.weights.formats import tables, timm

# Of facebookresearch/mae efb2a80; tests/golden/README.md.
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
IO = np.load(GOLDEN / "mae.io.npz")
RUN = RunLength(4, 1.0)
DATA = DataConfig(image_size=(32, 32), num_classes=0)
BATCH = {
    "image": jnp.asarray(IO["image"].transpose(0, 2, 3, 1)),
    "noise": jnp.asarray(IO["noise"]),
}


@pytest.fixture(scope="module")
def original():
    """The golden network and decoder, as they are read from the published format."""
    return weights.open_pretrained(GOLDEN / "mae_facebook.safetensors", num_heads=4)


def task_of(original, **changes):
    keys = original.task | changes
    return MaeConfig(**keys).build(models.create(**original.options), DATA, RUN)


def params_of(original):
    return {"network": original.params, **original.task_params}


@pytest.mark.parametrize("ratio", [0.75, pytest.param(0.5, marks=pytest.mark.slow)])
def test_latents_masks_predictions_and_losses_are_the_originals(original, ratio):
    task, params = task_of(original, mask_ratio=ratio), params_of(original)
    plain = task_of(original, mask_ratio=ratio, normalize_targets=False)
    visible = jnp.argsort(BATCH["noise"], axis=1)[:, : task.num_visible]

    @jax.jit
    def compute(params):
        latent = task.model.encode(params["network"], BATCH["image"], visible=visible)
        losses = [t.loss(params, None, BATCH, jax.random.key(0)) for t in (plain, task)]
        return latent, task.predict(params, BATCH), losses

    latent, (predicted, mask), losses = compute(params)
    expected = {name: IO[f"ratio{ratio}/{name}"] for name in ("latent", "logits")}
    np.testing.assert_allclose(latent, expected["latent"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(predicted, expected["logits"], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(mask, IO[f"ratio{ratio}/mask"])
    restore = masking.ranks(BATCH["noise"])
    np.testing.assert_array_equal(restore, IO[f"ratio{ratio}/ids_restore"])
    for normalize, (loss, (metrics, stats)) in zip((False, True), losses, strict=True):
        expected = float(IO[f"ratio{ratio}/loss_norm_pix_{normalize}"])
        assert float(loss) == pytest.approx(expected, abs=1e-5)
        assert (metrics["loss"], stats) == (loss, None)


def test_gradients_are_the_originals(original):
    task = task_of(original)
    grads = jax.grad(lambda p: task.loss(p, None, BATCH, jax.random.key(0))[0])
    grads = jax.device_get(jax.jit(grads)(params_of(original)))
    found = by_timms_names(grads["network"], task.model.options | {"posemb": "none"})
    sizes = {"width": 16, "depth": 2, "num_heads": 4, "mlp_dim": 32}
    decoder = models.create("Ti/8", num_classes=0, posemb="none", **sizes).options
    blocks = {k: v for k, v in grads["decoder"].items() if k == "Transformer"}
    named = by_timms_names(blocks, decoder, only=("blocks.", "norm."))
    found |= {f"decoder_{name}": value for name, value in named.items()}
    found |= {
        "mask_token": grads["decoder"]["mask_token"],
        "decoder_embed.weight": grads["decoder"]["embedding"]["kernel"].T,
        "decoder_embed.bias": grads["decoder"]["embedding"]["bias"],
        "decoder_pred.bias": grads["decoder"]["head"]["bias"],
    }
    prefix = "grad_norm_pix_True/"
    names = [name.removeprefix(prefix) for name in IO if name.startswith(prefix)]
    assert len(names) > 50
    for name in names:
        expected = IO[prefix + name]
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-5)


def by_timms_names(tree, options, only=("",)):
    """Returns arrays of an encoder by timm's names."""
    table = timm.transformer_table({"stem_width": 0, **options})
    table = [entry for entry in table if entry.name.startswith(only)]
    return tables.to_their_arrays(flatten_dict(tree, sep="/"), table)


def test_patches_and_targets_are_the_originals(original):
    patches = masking.patchify(BATCH["image"], 8)
    np.testing.assert_array_equal(patches, IO["patches"])
    images = masking.unpatchify(patches, (4, 4), 8)
    np.testing.assert_array_equal(images, IO["unpatched"].transpose(0, 2, 3, 1))
    found = task_of(original).targets(BATCH["image"])
    np.testing.assert_allclose(found, IO["patches_normalised"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("width", "side"), [(32, 4), (16, 4), (768, 3)])
def test_tables_of_positions_are_the_originals_to_the_bit(width, side):
    found = sincos2d((side, side), width, "sincos2d_mae")
    expected = IO[f"sincos/{width}_{side}x{side}"]
    assert not expected[0].any()
    np.testing.assert_array_equal(found, expected[1:])


# Epochs to the rate of 800 epochs with 40 of warmup, and 2.4e-3 at most.
RATES = {
    0: 0.0,
    0.5: 2.9999999999999997e-05,
    20: 0.0012,
    39.5: 0.0023699999999999997,
    40: 0.0024,
    200: 0.0021469686112756724,
    420: 0.0012,
    799: 1.0252344543726366e-08,
}


def test_the_schedule_is_the_originals():
    """It counts fractions of epochs; here they are steps of half an epoch."""
    config = optim.AdamConfig(
        base_learning_rate=1.5e-4, warmup_epochs=40.0, schedule=CosineConfig()
    )
    peak = config.peak_learning_rate(4096)
    assert peak == pytest.approx(2.4e-3)
    rate = optim.learning_rate(config, peak, RunLength(1600, 2.0))
    for epoch, expected in RATES.items():
        # Half a cosine near its end loses digits of float32.
        found = float(rate(int(2 * epoch)))
        assert found == pytest.approx(expected, rel=1e-6, abs=2e-10)


def drawn(task, index, seed=7):
    rng = jax.random.key(seed)
    return jax.device_get(task.draw(jnp.asarray(index, jnp.uint32), rng))["noise"]


def test_an_images_mask_depends_on_its_position_alone(original):
    task = task_of(original)
    whole = drawn(task, range(6))
    np.testing.assert_array_equal(drawn(task, [4, 1]), whole[[4, 1]])
    assert len(np.unique(whole)) == whole.size
    assert not np.array_equal(drawn(task, range(6), 8), whole)
    # All patches are hidden as often, in the mean over many images.
    hidden = np.argsort(np.argsort(drawn(task, range(4_000)), 1), 1) >= 4
    np.testing.assert_allclose(hidden.mean(0), 0.75, atol=0.03)


@pytest.mark.slow
def test_the_first_parameters_are_drawn_as_the_originals(original):
    options = original.options | {"init": "mae"}
    task = task_of(dataclasses.replace(original, options=options))
    params, extra = jax.jit(task.init)(jax.random.key(0))
    assert extra is None and params.keys() == {"network", "decoder"}
    block = params["decoder"]["Transformer"]["encoderblock_0"]
    attention = block["MultiHeadDotProductAttention_1"]
    width = attention["out"]["kernel"].shape[-1]
    for kernel, sides in (
        (params["network"]["embedding"]["kernel"], (8 * 8 * 3, 32)),
        (attention["query"]["kernel"], (width, 3 * width)),  # One layer for all three.
    ):
        bound = np.sqrt(6 / sum(sides))
        assert 0.9 * bound < abs(kernel).max() <= bound
    for token in (params["network"]["cls"], params["decoder"]["mask_token"]):
        assert 0.01 < float(token.std()) < 0.04
    wanted = jax.tree.map(jnp.shape, params_of(original))
    assert jax.tree.map(jnp.shape, params) == wanted


def test_pictures_show_what_was_visible_and_the_rest_as_predicted(original):
    params, rng = params_of(original), jax.random.key(2)
    batch = {"image": BATCH["image"], "index": jnp.arange(3, dtype=jnp.uint32)}
    for normalize in (True, False):
        task = task_of(original, normalize_targets=normalize)

        @jax.jit
        def compute(params, task=task):
            drawn = batch | task.draw(batch["index"], rng)
            return (
                task.pictures(params, None, batch, rng)._asdict(),
                task.predict(params, drawn),
                task.held_out_metrics(params, None, batch, rng),
                task.loss(params, None, drawn, rng)[0],
            )

        found, (predicted, mask), metrics, loss = jax.device_get(compute(params))
        mask = mask.astype(bool)
        cut = {
            name: np.asarray(masking.patchify(jnp.asarray(images), 8))
            for name, images in found.items()
        }
        patches = cut["original"]
        np.testing.assert_array_equal(patches, IO["patches"])
        np.testing.assert_array_equal(cut["masked"][~mask], patches[~mask])
        assert not cut["masked"][mask].any()
        both = cut["reconstruction_and_visible"]
        np.testing.assert_array_equal(both[~mask], patches[~mask])
        np.testing.assert_array_equal(both[mask], cut["reconstruction"][mask])
        if normalize:
            mean = patches.mean(-1, keepdims=True)
            deviation = np.sqrt(patches.var(-1, keepdims=True, ddof=1) + 1e-6)
            predicted = predicted * deviation + mean
        np.testing.assert_allclose(cut["reconstruction"], predicted, atol=1e-5)
        assert metrics["loss"].shape == (3,)
        assert float(metrics["loss"].mean()) == pytest.approx(float(loss), rel=1e-6)


def test_flops_are_those_of_what_is_computed(original):
    """By hand: products of patches, projections, attention and MLPs."""
    task = task_of(original)

    def block(tokens, width, hidden):
        return tokens * (4 * width**2 + 2 * width * hidden) + 2 * tokens**2 * width

    macs = 16 * 192 * 32 + 2 * block(5, 32, 64)
    macs += 5 * 32 * 16 + 2 * block(17, 16, 32) + 16 * 16 * 192
    assert task.training_flops() == 6 * macs
    assert cost.macs_per_image(task.model) > 16 * 192 * 32 + 2 * block(5, 32, 64)


def test_a_workdir_is_the_start_of_a_classifier_that_learns_positions(tmp_path):
    task = {"name": "mae", "decoder_width": 8, "decoder_depth": 1}
    config = tiny_config(
        task=task | {"decoder_num_heads": 2, "mask_ratio": 0.5},
        model={"posemb": "sincos2d_mae", "activation": "gelu"},
        data={"num_classes": 0},
        total_steps=1,
        evals={},
    )
    write_workdir(config, tmp_path)
    found = weights.open_pretrained(tmp_path)
    assert "posembed_input" not in found.params["Transformer"]
    assert (found.task["name"], found.task_params) == ("mae", {})
    options = {"pool": "gap", "class_token": True, "activation": "gelu"}
    model = tiny_config(model=options).build_model()
    loaded = weights.load(tmp_path, model, head="new")
    positions = loaded.params["Transformer"]["posembed_input"]["pos_embedding"]
    fixed = sincos2d(model.grid, 12, "sincos2d_mae")
    np.testing.assert_array_equal(positions[0, 1:], fixed)
    assert not positions[0, 0].any()
    assert "sincos2d_mae written as values" in "\n".join(loaded.table())


@pytest.mark.parametrize(
    ("task", "model", "message"),
    [
        ({"mask_ratio": 0.99}, {}, r"task.mask_ratio=0.99 leaves none of the 16 patch"),
        (
            {},
            {"posemb": "relative", "posemb_placement": "every"},
            "model.posemb='relative' with task.name='mae'",
        ),
        (
            {},
            {"posemb": "learned", "posemb_placement": "every"},
            "model.posemb_placement='every' with task.name='mae'",
        ),
        (
            {},
            {"relative_bias": "shared"},
            "model.relative_bias='shared' with task.name='mae'",
        ),
        (
            {"decoder_width": 24, "decoder_num_heads": 16},
            {},
            "task.decoder_width=24 is not a multiple of 4 and of task.decoder_num_heads",
        ),
        (
            {"decoder_width": 18, "decoder_num_heads": 3},
            {},
            "task.decoder_width=18 is not a multiple of 4",
        ),
    ],
)
def test_what_cannot_be_is_refused(task, model, message):
    size = {"width": 12, "depth": 1, "num_heads": 3, "mlp_dim": 8}
    network = models.create("Ti/8", num_classes=0, image_size=(32, 32), **size, **model)
    with pytest.raises(UserError, match=message) as error:
        MaeConfig(**task).build(network, DATA, RUN)
    assert "\n" not in str(error.value)
