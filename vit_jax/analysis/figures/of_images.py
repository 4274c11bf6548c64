"""Figures of single images: attention by layer and head, rollout, relevance."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from vit_jax.analysis import finite, overlay
from vit_jax.analysis import rollout as rolling
from vit_jax.analysis.batches import Batch
from vit_jax.analysis.figures import tiling
from vit_jax.analysis.figures.canvas import Picture
from vit_jax.analysis.figures.choices import Choice, Names, Query
from vit_jax.analysis.figures.parts import Kept, OfEach
from vit_jax.analysis.relevance import relevance
from vit_jax.analysis.subject import Subject, filled
from vit_jax.errors import UserError
from vit_jax.models.inside import Layer

_LAYERS, _HEADS = 12, 16  # Drawn of attention at most; the data has all.
# Arrays of attention's size on the way back: itself, what is added to it, its gradient,
# and one more while a softmax is taken back.
_BACKWARD = 4


class Attention(OfEach):
    """Where the query looks, by layer and head.

    Raises:
      UserError: a layer that is asked for is not there.
    """

    def __init__(self, subject: Subject, query: Query, names: Names, choice: Choice):
        self._subject, self._query, self._names = subject, query, names
        self._layers, self._seen = choice.layers, Kept()
        depth = subject.model.options["depth"]
        for layer in choice.layers:
            if layer >= depth:
                raise UserError(
                    f"--layers: layer {layer} is not one of the {depth} of "
                    f"{subject.name}: name some from 0 to {depth - 1}"
                )

    def see(self, layer: Layer, images: range) -> None:
        """Keeps the query's part."""
        asked = _asked(layer.attention, jnp.asarray(self._query.weights))
        self._seen.add(images, asked)

    def pictures(self, batch: Batch) -> Iterator[Picture]:
        """Draws a sheet an image: a row a layer, a column a head."""
        found = self._seen.take(len(batch.names)).swapaxes(0, 1)
        for name, pixels, maps in zip(batch.names, batch.pixels[0], found, strict=True):
            drawn = self._sheet(pixels, maps)
            grid = np.array(self._subject.model.grid)
            data = {"attention": maps, "grid": grid, "image": pixels}
            yield Picture(f"attention/{self._names.stem(name)}", drawn, data)

    def _sheet(self, pixels: np.ndarray, maps: Float[np.ndarray, "L H N"]):
        model, centre = self._subject.model, self._query.centre
        depth, count, _ = maps.shape
        layers, heads = self._layers or _some(depth, _LAYERS), _some(count, _HEADS)
        patches = maps[..., model.extra :].reshape(depth, count, *model.grid)
        tiles: list[np.ndarray | None] = []
        for layer in layers:
            tiles += [*(patches[layer, head] for head in heads), None]
        image = len(heads)  # The number of its tile, the last of the first row.
        tiles[image] = pixels if model.image_shape[-1] == 3 else pixels.repeat(3, -1)
        return tiling.sheet(
            tiles,
            1 + len(heads),
            title=f"{self._subject.name}: attention of the {self._query.name}",
            captions=[*(f"head {head + 1}" for head in heads), "image"],
            rows=[f"layer {layer + 1}" for layer in layers],
            side=0.8,
            marked={image: centre} if centre else {},
        )


class Rollout(OfEach):
    """Attention rolled out over all layers, on the image."""

    def __init__(self, subject: Subject, query: Query, names: Names, choice: Choice):
        rolling.check(choice.combine, choice.discard)
        self._subject, self._query, self._names = subject, query, names
        self._choice, self._rolled = choice, {}

    def see(self, layer: Layer, images: range) -> None:
        """Adds a layer to those before it."""
        self._rolled[images.start] = rolling.step(
            self._rolled.get(images.start),
            layer.attention,
            self._choice.combine,
            self._choice.discard,
        )

    def pictures(self, batch: Batch) -> Iterator[Picture]:
        """Draws each image and what the query has of it."""
        asked = [
            np.einsum("n,bnm->bm", self._query.weights, np.asarray(rolled))
            for rolled in self._rolled.values()
        ]
        self._rolled = {}
        found = np.concatenate(asked)[: len(batch.names)]
        subject = self._subject
        for name, image, tokens in zip(
            batch.names, batch.originals, found, strict=True
        ):
            laid = _laid(subject, image, tokens)
            drawn = tiling.sheet(
                [image, laid],
                2,
                title=f"{subject.name}: rollout, {self._query.name}",
                captions=["image", self._caption()],
                side=tiling.own_side(image),
            )
            data = {"rollout": tokens, "grid": np.array(subject.model.grid)}
            data["overlay"] = laid
            yield Picture(f"rollout/{self._names.stem(name)}", drawn, data)

    def _caption(self) -> str:
        discard = self._choice.discard
        left_out = f" without their least {discard:.0%}" if discard else ""
        return f"{self._choice.combine} of the heads{left_out}"


class Relevance(OfEach):
    """Which patches spoke for a class, on the image.

    Args:
      subject: the network.
      names: of files.
      choice: of classes.
      rows: images at once, at most.

    Raises:
      UserError: there is no classifier, or no such class.
    """

    def __init__(self, subject: Subject, names: Names, choice: Choice, rows: int):
        classes = subject.model.options["classes"]
        if not classes:
            raise UserError(f"{subject.name} has no classifier: leave relevance out")
        for label in choice.classes:
            if label >= classes:
                raise UserError(
                    f"--classes: class {label} is not one of the {classes} of "
                    f"{subject.name}: name some from 0 to {classes - 1}"
                )
        self._subject, self._names, self._choice = subject, names, choice
        self._most, self._rows = min(rows, subject.batch_size(_BACKWARD)), 0
        self._tokens = {}

    def see(self, layer: Layer, images: range) -> None:
        """Keeps the tokens, of which the last lead to the classes."""
        self._tokens[images.start] = layer.tokens

    def pictures(self, batch: Batch) -> Iterator[Picture]:
        """Draws each image with its relevance for some classes."""
        subject, count = self._subject, len(batch.names)
        logits = self._logits(batch.names)
        labels = np.argsort(-logits, axis=1, kind="stable")[:, : self._choice.topk]
        if self._choice.classes:
            labels = np.tile(self._choice.classes, (count, 1))
        found = self._relevance(batch.pixels[0], labels)
        for i, (name, image) in enumerate(
            zip(batch.names, batch.originals, strict=True)
        ):
            finite.check(found[i], f"{subject.name}'s gradient for {name}")
            laid = [_laid(subject, image, tokens) for tokens in found[i]]
            captions = [subject.class_name(int(label))[:34] for label in labels[i]]
            drawn = tiling.sheet(
                [image, *laid],
                1 + len(laid),
                title=f"{subject.name}: relevance",
                captions=["image", *captions],
                side=tiling.own_side(image),
            )
            data = {"relevance": found[i], "classes": labels[i], "logits": logits[i]}
            data["grid"] = np.array(subject.model.grid)
            yield Picture(f"relevance/{self._names.stem(name)}", drawn, data)

    def _logits(self, names: Sequence[str]) -> Float[np.ndarray, "B K"]:
        model, params = self._subject.model, self._subject.params
        ended = [model.finish(params, tokens) for tokens in self._tokens.values()]
        self._tokens = {}
        logits = np.concatenate([np.asarray(outputs["logits"]) for outputs in ended])
        for name, of_image in zip(names, logits, strict=False):
            finite.check(of_image, f"{self._subject.name}'s output for {name}")
        return logits[: len(names)]

    def _relevance(
        self, pixels: np.ndarray, labels: Int[np.ndarray, "B T"]
    ) -> Float[np.ndarray, "B T N"]:
        """Returns the relevance of all tokens to each image's classes."""
        subject, found = self._subject, []
        # Later batches are filled up to the first: one program serves all.
        rows = self._rows = self._rows or min(self._most, len(pixels))
        for start in range(0, len(pixels), rows):
            part = slice(start, start + rows)
            images = subject.images(filled(pixels[part], rows))
            of_part = np.zeros((rows, labels.shape[1]), np.int32)
            of_part[: len(labels[part])] = labels[part]
            of_class = [
                relevance(subject.model, subject.params, images, jnp.asarray(column))
                for column in of_part.T
            ]
            found.append(np.stack(list(map(np.asarray, of_class)), axis=1))
        return np.concatenate(found)[: len(pixels)]


@jax.jit
def _asked(attention, weights):
    return jnp.einsum("n,bhnm->bhm", weights, attention, precision="highest")


def _laid(subject: Subject, image: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    model = subject.model
    patches = tokens[model.extra :]
    return overlay.on_image(image, patches, model.grid, subject.preprocess)


def _some(count: int, most: int) -> list[int]:
    """Returns numbers from 0 on, `most` of them spread evenly if there are more."""
    places = np.linspace(0, count - 1, min(count, most))
    return [int(place) for place in np.unique(places.round())]
