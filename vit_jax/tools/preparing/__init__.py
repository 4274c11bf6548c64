"""Prepares data sets for the TFDS reader: as ArrayRecord, without TensorFlow.

A job (tfrecord.py, images.py, tar_shards.py) yields the records of each shard. For sets
made from files, request.py describes the requested set and examples.py the features of
a record. build.py makes the shards, in one or several processes, in a folder next to
the set's final one. shards.py writes and reads back a shard. metadata.py writes TFDS's
description, and the manifest of counts and checksums that verify the set later.
tfds_builder.py runs TFDS's builders.
"""
