"""Prepares data sets for the TFDS reader: as ArrayRecord, without TensorFlow.

A job (tfrecord.py, images.py, tar_shards.py) yields the records of each shard; where they
are made of files, request.py is what is asked for and examples.py what a record holds.
build.py makes the shards, in one or several processes, beside the set's final name.
shards.py writes and reads back a shard. metadata.py writes TFDS's description, and the
manifest of counts and checksums that verifies the set later. tfds_builder.py lets TFDS
itself write a set.
"""
