"""What the tests of several evaluators share."""

import pytest

from vit_jax.evaluators import splits


@pytest.fixture
def passed(monkeypatch):
    """Notes the size of every split that is passed over."""
    sizes, batches = [], splits.pipeline.eval_batches

    def noting(source, *args, **keys):
        sizes.append(len(source))
        return batches(source, *args, **keys)

    monkeypatch.setattr(splits.pipeline, "eval_batches", noting)
    return sizes
