import ml_dtypes
import numpy as np
import pytest
from trees import assert_same, counted_by_kind, encoder, random_flat, save

from vit_jax import models
from vit_jax.data.preprocess import Preprocess
from vit_jax.weights import open_pretrained

POSITIONS = "Transformer/posembed_input/pos_embedding"


def theirs(name):
    return "params/" + counted_by_kind(name.replace(POSITIONS, "pos_embedding"))


@pytest.mark.parametrize(
    "options",
    [
        {"pool": "gap"},
        {"pool": "map"},
        {"pool": "gap", "representation_layer": True, "posemb": "sincos2d"},
        {"pool": "map", "num_classes": 0},
    ],
    ids=str,
)
def test_tree_and_options_are_ours(tmp_path, options):
    side = 224 if "posemb" in options else 12  # Without positions, nothing tells.
    model = encoder(**options, image_size=(side, side))
    flat = random_flat(model)
    found = open_pretrained(save(tmp_path / "a.npz", flat, theirs))
    assert found.format == "big_vision"
    assert_same(found.params, flat)
    assert models.create(**found.options).options == model.options
    assert found.preprocess == Preprocess(
        (side, side), interpolation="area", crop_fraction=0.875, crop_down=True
    )


@pytest.mark.parametrize(
    "place", ["pos_embedding", "Transformer/pos_embedding", POSITIONS]
)
@pytest.mark.parametrize("prefix", ["", "params/"])
def test_positions_may_stand_in_three_places(tmp_path, place, prefix):
    flat = random_flat(encoder(pool="gap"))

    def rename(name):
        return prefix + counted_by_kind(place if name == POSITIONS else name)

    found = open_pretrained(save(tmp_path / "a.npz", flat, rename))
    assert_same(found.params, flat)


def test_class_token_without_a_slot_gets_a_row_of_zeros(tmp_path):
    flat = random_flat(encoder())
    slotless = flat | {POSITIONS: flat[POSITIONS][:, 1:]}
    found = open_pretrained(save(tmp_path / "a.npz", slotless, theirs))
    positions = flat[POSITIONS].copy()
    positions[:, 0] = 0
    assert_same(found.params, flat | {POSITIONS: positions})
    assert found.options["image_size"] == (12, 12)
    assert "position of the class token: not in the file" in found.notes[0]


def test_slot_of_a_class_token_that_is_not_there_is_dropped(tmp_path):
    flat = random_flat(encoder(pool="map"))
    extra = np.concatenate([np.ones((1, 1, 12), np.float32), flat[POSITIONS]], axis=1)
    found = open_pretrained(save(tmp_path / "a.npz", flat | {POSITIONS: extra}, theirs))
    assert_same(found.params, flat)
    assert "position embedding of a missing class token: dropped" in found.notes[0]


def test_scanned_layers_are_taken_apart(tmp_path):
    flat = random_flat(encoder(pool="map"))
    scanned = {}
    for name, value in flat.items():
        if "encoderblock_0" in name:
            layers = [value, flat[name.replace("block_0", "block_1")]]
            scanned[name.replace("block_0", "block")] = np.stack(layers)
        elif "encoderblock_1" not in name:
            scanned[name] = value
    assert len(scanned) < len(flat)
    found = open_pretrained(save(tmp_path / "a.npz", scanned, theirs))
    assert_same(found.params, flat)


@pytest.mark.parametrize("mlp", ["MlpBlock_0", "MlpBlock_2"])
def test_inlined_map_head_moves_into_its_place(tmp_path, mlp):
    flat = random_flat(encoder(pool="map"))

    def rename(name):
        name = theirs(name).replace("MAPHead_0/MlpBlock_0", f"MAPHead_0/{mlp}")
        return name.replace("MAPHead_0/", "")

    found = open_pretrained(save(tmp_path / "a.npz", flat, rename))
    assert_same(found.params, flat)
    assert found.options["pool"] == "map"


def test_image_tower_is_taken_out_of_two_towers(tmp_path):
    flat = random_flat(encoder(pool="map", num_classes=0))
    text = {
        "params/t": np.ones(1),
        "params/b": np.ones(1),
        "params/txt/Embed_0/embedding": np.ones((3, 2)),
        "params/txt/Encoder_0/encoder_norm/bias": np.ones(2),
    }
    renamed = {theirs(n).replace("params/", "params/img/"): v for n, v in flat.items()}
    found = open_pretrained(save(tmp_path / "a.npz", renamed | text))
    assert_same(found.params, flat)
    assert found.preprocess == Preprocess(
        (12, 12), interpolation="bilinear_plain", squash=True
    )
    assert found.notes == (
        "ignored 4 arrays outside the network: params/b, params/t, params/txt",
    )


def test_state_of_the_optimiser_is_ignored_and_bfloat16_is_read(tmp_path):
    flat = random_flat(encoder(pool="gap"))
    short = {k: v.astype(ml_dtypes.bfloat16) for k, v in flat.items()}
    opt = {f"opt/0/mu/{k}": v for k, v in short.items()}
    found = open_pretrained(
        save(tmp_path / "a.npz", {theirs(k): v for k, v in short.items()} | opt)
    )
    assert_same(found.params, {k: v.astype(np.float32) for k, v in short.items()})
    assert found.notes == (f"ignored {len(flat)} arrays outside the network: opt/0",)
