import pathlib

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.weights import surgery

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("side", [24, 7])
def test_position_embeddings_resize_as_in_the_original_code(side):
    case = np.load(GOLDEN / "google_posemb_interp.npz")
    resized = surgery.resize_position_embedding(
        case["posemb_14"], (14, 14), (side, side), tokens=1
    )
    np.testing.assert_allclose(resized, case[f"posemb_{side}"], atol=1e-6)
    assert resized.dtype == np.float32


def test_resize_is_exact_on_a_plane_over_a_non_square_grid():
    def plane(rows, columns):
        y, x = np.meshgrid(
            np.linspace(0, 1, rows), np.linspace(0, 1, columns), indexing="ij"
        )
        return np.stack([y, x, 2 * y - 3 * x], axis=-1).reshape(1, -1, 3)

    resized = surgery.resize_position_embedding(plane(3, 5), (3, 5), (7, 4), tokens=0)
    np.testing.assert_allclose(resized, plane(7, 4), atol=1e-12)


def test_resize_to_the_same_grid_changes_nothing():
    embedding = np.random.default_rng(0).normal(size=(1, 2 + 15, 6))
    same = surgery.resize_position_embedding(embedding, (3, 5), (3, 5), tokens=2)
    np.testing.assert_allclose(same, embedding, atol=1e-12)


def params(positions=10, classes=4, extra=None):
    tree = {
        "Transformer": {
            "posembed_input": {"pos_embedding": np.ones((1, positions, 6))}
        },
        "head": {"kernel": np.ones((6, classes)), "bias": np.ones(classes)},
    }
    return tree | (extra or {})


def test_fit_replaces_the_whole_head_and_resizes():
    given = params(extra={"pre_logits": {"kernel": np.ones((6, 6))}})
    expected = params(positions=1 + 20, classes=7)
    fitted, notes = surgery.fit(given, expected, grid=(4, 5))
    assert set(fitted) == {"Transformer", "head"}
    np.testing.assert_array_equal(fitted["head"]["kernel"], np.zeros((6, 7)))
    assert fitted["Transformer"]["posembed_input"]["pos_embedding"].shape == (1, 21, 6)
    assert notes == [
        "head: replaced by a linear layer of zeros",
        "position embeddings: resized from (3, 3) to (4, 5)",
    ]


def test_fit_keeps_the_head_when_asked():
    given = params()
    fitted, notes = surgery.fit(given, params(), grid=(3, 3), head="keep")
    np.testing.assert_array_equal(fitted["head"]["kernel"], given["head"]["kernel"])
    assert notes == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (params(classes=5), r"head/kernel is \(6, 5\) in the checkpoint but \(6, 4\)"),
        (params(extra={"cls": np.ones(3)}), "cls is left over"),
        ({k: v for k, v in params().items() if k != "head"}, "head/bias is missing"),
    ],
)
def test_what_does_not_fit_is_named(given, message):
    with pytest.raises(UserError, match=message):
        surgery.fit(given, params(), grid=(3, 3), head="keep")


def test_a_grid_that_cannot_be_guessed_is_refused():
    with pytest.raises(UserError, match="12 patches are not a square grid"):
        surgery.fit(params(positions=13), params(), grid=(3, 3))


def test_rows_that_do_not_fit_the_grid_are_refused():
    with pytest.raises(UserError, match="has 10 rows, but 1 extra tokens and a grid"):
        surgery.resize_position_embedding(np.ones((1, 10, 2)), (4, 4), (2, 2), tokens=1)
