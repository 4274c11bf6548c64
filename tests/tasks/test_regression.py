"""Regression: losses against references, missing targets, mixing, microbatches, devices."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_config
from scipy import stats

from vit_jax.data.config import DataConfig
from vit_jax.data.fields import target
from vit_jax.data.sources.arrays import open_arrays
from vit_jax.data.sources.open import opened_by
from vit_jax.errors import UserError
from vit_jax.models.targets import Targets
from vit_jax.tasks import regression
from vit_jax.training import loop
