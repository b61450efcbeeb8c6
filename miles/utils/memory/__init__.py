"""How much GPU memory a run needs, from its flags and the model's config.json: `python -m miles.tools.memory`."""
