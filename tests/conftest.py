"""Strict settings for every test: rank promotion raises, eight fake devices."""

import os

# Before JAX starts. Most tests use one of the devices.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from absl import flags

jax.config.update("jax_numpy_rank_promotion", "raise")
if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
