"""Small data sets, prepared by TFDS as any user's are."""

import contextlib
import io

from PIL import Image


def png(pixels):
    """Returns an image as TFDS takes it."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    stream.seek(0)
    return stream


def builder_class(
    set_name, version, features, splits, code, *, config="", registered=False
):
    """Makes a TFDS builder.

    Args:
      set_name: name of the set, also that of a real one.
      version: as "1.2.0".
      features: name to TFDS feature.
      splits: split name to a function that returns the examples.
      code: folder that TFDS may take for that of the builder's code.
      config: name of its one configuration, if it has any.
      registered: whether TFDS finds it by its name. Then no other may have that name,
        and the real sets may have been imported by another test.
    """
    import tensorflow_datasets as tfds

    skip = tfds.core.registered.skip_registration
    with contextlib.nullcontext() if registered else skip():

        class Builder(tfds.core.GeneratorBasedBuilder):
            name = set_name
            VERSION = tfds.core.Version(version)
            BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []
            pkg_dir_path = code

            def _info(self):
                return tfds.core.DatasetInfo(
                    builder=self, features=tfds.features.FeaturesDict(features)
                )

            def _split_generators(self, dl_manager):
                return {name: self._generate_examples(name) for name in splits}

            def _generate_examples(self, split):
                yield from enumerate(splits[split]())

    return Builder
