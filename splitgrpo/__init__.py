"""The machinery of a GRPO/GSPO trainer split into a sampler and a learner. Start at sampling_worker.py."""

SCHEMA_VERSION = 3  # of the record on the wire and of every file a run folder holds
