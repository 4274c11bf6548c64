"""Figures of single images: attention by layer and head, rollout, relevance."""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.analysis import overlay
from vit_jax.analysis import rollout as rolling
from vit_jax.analysis.figures import sheets
from vit_jax.analysis.figures.canvas import Picture
from vit_jax.analysis.figures.choices import Choice, Names, Query
from vit_jax.analysis.relevance import relevance
from vit_jax.analysis.subject import Batch, Subject
from vit_jax.errors import UserError
from vit_jax.models.inside import Layer

_LAYERS, _HEADS = 12, 16  # Drawn of attention at most; the data has all.


class Part:
    """A figure of each image, fed as batches pass the network."""

    def see(self, layer: Layer) -> None:
        """Takes what it needs of a layer; they come in order."""
        raise NotImplementedError

    def pictures(self, batch: Batch) -> Iterator[Picture]:
        """Draws the images of a batch whose layers were all seen."""
        raise NotImplementedError


class Attention(Part):
    """Where the query looks, by layer and head."""

    def __init__(self, subject: Subject, query: Query, names: Names):
        self._subject, self._query, self._names = subject, query, names
        self._seen: list[np.ndarray] = []

    def see(self, layer: Layer) -> None:
        """Keeps the query's part."""
        asked = _asked(layer.attention, jnp.asarray(self._query.weights))
        self._seen.append(np.asarray(asked))

    def pictures(self, batch: Batch) -> Iterator[Picture]:
        """Draws a sheet an image: a row a layer, a column a head."""
        found, self._seen = np.stack(self._seen, axis=1), []
        model = self._subject.model
        layers, heads = (
            np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))
            for count, most in zip(found.shape[1:3], (_LAYERS, _HEADS), strict=True)
        )
        marked = self._query.place and self._query.place[::-1]
        for name, pixels, maps in zip(batch.names, batch.pixels[0], found, strict=True):
            patches = maps[..., model.extra :].reshape(*maps.shape[:2], *model.grid)
            tiles: list[np.ndarray | None] = []
            for layer in layers:
                tiles += [_sized(patches[layer, head], pixels) for head in heads]
                tiles.append(None)
            tiles[len(heads)] = _rgb(pixels)
            marks = {len(heads): _centre(marked, model.patch)} if marked else {}
            drawn = sheets.sheet(
                tiles,
                1 + len(heads),
                title=f"{self._subject.name}: attention of the {self._query.name}",
                captions=[*(f"head {head + 1}" for head in heads), "image"],
                rows=[f"layer {layer + 1}" for layer in layers],
                side=0.8,
                marked=marks,
            )
            data = {"attention": maps, "grid": np.array(model.grid), "image": pixels}
            yield Picture(f"attention/{self._names.stem(name)}", drawn, data)


class Rollout(Part):
    """Attention rolled out over all layers, on the image."""

    def __init__(self, subject: Subject, query: Query, names: Names, choice: Choice):
        rolling.check(choice.combine, choice.discard)
        self._subject, self._query, self._names = subject, query, names
        self._choice, self._rolled = choice, None

    def see(self, layer: Layer) -> None:
        """Adds a layer to those before it."""
        self._rolled = rolling.step(
            self._rolled, layer.attention, self._choice.combine, self._choice.discard
        )

    def pictures(self, batch: Batch) -> Iterator[Picture]:
        """Draws each image and what the query has of it."""
        found = np.einsum("n,bnm->bm", self._query.weights, np.asarray(self._rolled))
        self._rolled = None
        subject = self._subject
        for name, image, tokens in zip(
            batch.names, batch.originals, found, strict=True
        ):
            laid = _laid(subject, image, tokens)
            drawn = sheets.sheet(
                [image, laid],
                2,
                title=f"{subject.name}: rollout, {self._query.name}",
                captions=["image", self._caption()],
                side=2.4,
            )
            data = {"rollout": tokens, "grid": np.array(subject.model.grid)}
            data["overlay"] = laid
            yield Picture(f"rollout/{self._names.stem(name)}", drawn, data)

    def _caption(self) -> str:
        discard = self._choice.discard
        left_out = f" without their least {discard:.0%}" if discard else ""
        return f"{self._choice.combine} of the heads{left_out}"


class Relevance(Part):
    """Which patches spoke for a class, on the image."""

    def __init__(self, subject: Subject, names: Names, choice: Choice):
        self._subject, self._names, self._choice = subject, names, choice
        self._tokens = None

    def see(self, layer: Layer) -> None:
        """Keeps the tokens, of which the last lead to the classes."""
        self._tokens = layer.tokens

    def pictures(self, batch: Batch) -> Iterator[Picture]:
        """Draws each image with its relevance for some classes."""
        subject, tokens, self._tokens = self._subject, self._tokens, None
        model = subject.model
        if "logits" not in (outputs := model.finish(subject.params, tokens)):
            raise UserError(f"{subject.name} has no classifier: leave relevance out")
        logits = np.asarray(outputs["logits"])
        labels = np.argsort(-logits, axis=1, kind="stable")[:, : self._choice.topk]
        if self._choice.classes:
            labels = np.tile(self._choice.classes, (len(logits), 1))
        images = subject.images(batch.pixels[0])
        found = np.stack(
            [
                np.asarray(
                    relevance(model, subject.params, images, jnp.asarray(column))
                )
                for column in labels.T
            ],
            axis=1,
        )
        for i, (name, image) in enumerate(
            zip(batch.names, batch.originals, strict=True)
        ):
            laid = [_laid(subject, image, tokens) for tokens in found[i]]
            captions = [subject.class_name(int(label))[:34] for label in labels[i]]
            drawn = sheets.sheet(
                [image, *laid],
                1 + len(laid),
                title=f"{subject.name}: relevance",
                captions=["image", *captions],
                side=2.4,
            )
            data = {"relevance": found[i], "classes": labels[i], "logits": logits[i]}
            data["grid"] = np.array(model.grid)
            yield Picture(f"relevance/{self._names.stem(name)}", drawn, data)


@jax.jit
def _asked(attention, weights):
    return jnp.einsum("n,bhnm->bhm", weights, attention)


def _laid(subject: Subject, image: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    model = subject.model
    patches = tokens[model.extra :]
    return overlay.on_image(image, patches, model.grid, subject.preprocess)


def _rgb(pixels: np.ndarray) -> np.ndarray:
    return pixels if pixels.shape[-1] == 3 else pixels.repeat(3, axis=-1)


def _sized(patches: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """Repeats values so that a sheet's tiles are of one aspect ratio."""
    rows, columns = (
        math.ceil(side / count)
        for side, count in zip(pixels.shape[:2], patches.shape, strict=True)
    )
    return patches.repeat(rows, axis=0).repeat(columns, axis=1)


def _centre(place: tuple[int, int], patch: int) -> tuple[float, float]:
    return tuple((index + 0.5) * patch - 0.5 for index in place)
