"""Makes data sets as the TFDS reader wants them: ArrayRecord, without TensorFlow.

The way of the data: a job (`tfrecord.py`, `images.py`) names the records of each shard;
`making.py` runs the shards in one or several processes; `shards.py` writes, reads back
and checks each; `staging.py` keeps what is finished beside the final name until all is;
`manifest.py` records counts and checksums, and checks them later. `building.py` lets
TFDS itself write a set, with the same staging and manifest.
"""
