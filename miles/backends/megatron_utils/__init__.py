"""The megatron-core trainer. Importing this package imports nothing; `trainer.MegatronTrainer` is the entry."""
