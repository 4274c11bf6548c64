"""Settings of feature distillation for a user's images, teachers and network."""

import dataclasses
from collections.abc import Mapping

from vit_jax.tools.pretraining.method import Given, Length, optimizer

_RATE = 1e-3  # For batches of 64; in proportion to the batch.


@dataclasses.dataclass(frozen=True)
class DistillationMethod:
    """Features of other weights are learnt; see `Method`."""

    name: str = "distillation"
    what: str = "the features of the teacher are learnt"
    images: int = 1_000_000
    forwards: float = 4.0  # Three passes of the student and one of the teacher.
    best: str = "val/loss"

    def check(self, given: Given) -> None:
        """Any network has features to learn."""

    def sections(self, given: Given, length: Length) -> Mapping[str, dict]:
        return {
            "task": {"name": "feature_distillation", "teachers": given.teachers},
            "optim": optimizer(_RATE * length.batch / 64),
            "data": {
                "train_transform": "random_resized_crop(area=(0.3, 1.0)) | flip",
            },
        }


METHOD = DistillationMethod()
