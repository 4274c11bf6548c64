"""Relevance of the patches to certain classes, over the image (arXiv:2103.15679)."""

import dataclasses

import numpy as np

from vit_jax import analysis
from vit_jax.analysis.figures.figure import Figure, Picture, numbers, option
from vit_jax.errors import UserError

# Arrays of the size of the attention in a backward pass: itself, two gradients, a
# temporary.
_BACKWARD_ARRAYS = 4


@dataclasses.dataclass
class Relevance(Figure):
    """One figure per image: the image, and the relevance to each class over it."""

    help = "relevance of the patches to the most probable classes, or to --classes"
    reads = "images"
    reads_layers = True
    reads_originals = True

    classes: tuple[int, ...] = option(
        (), "classes of the relevance figure: 3,7; default: the most probable", numbers
    )
    topk: int = option(2, "number of most probable classes; default: 2", int)

    def missing(self, loaded):
        if not loaded.model.config.has_encoder or loaded.model.options["num_classes"]:
            return super().missing(loaded)
        return "no classifier"

    def start(self, loaded, batch_size=0, other=None):
        num_classes = loaded.model.options["num_classes"]
        for label in self.classes:
            if label >= num_classes:
                raise UserError(
                    f"--classes={label}: {loaded.name} has {num_classes} classes; "
                    f"choose from 0 to {num_classes - 1}"
                )
        if self.topk < 1:
            raise UserError(f"--topk={self.topk}: choose a number from 1 on")
        self.loaded, self._tokens = loaded, {}  # By a chunk's first image.
        size = loaded.max_chunk_size(_BACKWARD_ARRAYS)
        self._max_chunk_size, self._chunk_size = min(batch_size or size, size), 0

    def update(self, layer, images):
        self._tokens[images.start] = layer.tokens  # The last layer's tokens remain.

    def draw_batch(self, batch):
        loaded, num_images = self.loaded, len(batch.names)
        logits = self._logits(batch.names)
        labels = np.argsort(-logits, axis=1, kind="stable")[:, : self.topk]
        if self.classes:
            labels = np.tile(self.classes, (num_images, 1))
        relevances = self._relevance(batch.pixels[0], labels)
        for i, image in enumerate(batch.originals):
            analysis.loaded_model.check_finite(
                relevances[i], f"{loaded.name}'s gradient for {batch.names[i]}"
            )
            overlays = [
                analysis.overlay.overlay_tokens(loaded, image, tokens)
                for tokens in relevances[i]
            ]
            captions = [loaded.class_name(int(label))[:34] for label in labels[i]]
            drawing = analysis.charts.draw_tiles(
                [image, *overlays],
                1 + len(overlays),
                title=f"{loaded.name}: relevance",
                captions=["image", *captions],
                tile_width=analysis.charts.native_tile_width(image),
            )
            data = {
                "relevance": relevances[i],
                "classes": labels[i],
                "logits": logits[i],
                "grid": np.array(loaded.model.grid),
            }
            yield Picture(drawing, data, batch.stems[i])

    def _logits(self, image_names) -> np.ndarray:
        """Returns the logits (images, classes) of the tokens of all chunks."""
        chunks = [
            np.asarray(self.loaded.classify(tokens)["logits"])
            for tokens in self._tokens.values()
        ]
        self._tokens = {}
        logits = np.concatenate(chunks)[: len(image_names)]
        for name, of_image in zip(image_names, logits, strict=True):
            analysis.loaded_model.check_finite(
                of_image, f"{self.loaded.name}'s output for {name}"
            )
        return logits

    def _relevance(self, pixels: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Returns the relevance (images, labels, tokens) to the labels of each image."""
        loaded, chunks = self.loaded, []
        # Later batches are padded to the first one's chunk size, for a single program.
        size = self._chunk_size = self._chunk_size or min(
            self._max_chunk_size, len(pixels)
        )
        for chunk, images in loaded.iter_chunks(pixels, size):
            chunk_labels = np.zeros((size, labels.shape[1]), np.int32)
            chunk_labels[: len(chunk)] = labels[chunk.start : chunk.stop]
            relevances = [
                analysis.attention.relevance(
                    loaded.model, loaded.params, images, column
                )
                for column in chunk_labels.T
            ]
            chunks.append(np.stack(relevances, axis=1))
        return np.concatenate(chunks)[: len(pixels)]
