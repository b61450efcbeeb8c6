"""miles: fully asynchronous reinforcement-learning post-training of language models."""
