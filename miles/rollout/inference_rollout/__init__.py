"""The class-based rollout: training batches and evaluation over an inference router."""
