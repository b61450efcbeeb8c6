"""Deterministic simulation: the real rollout classes on a virtual clock, among simulated engines and a trainer."""
