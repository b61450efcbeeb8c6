"""Generate functions: how one sample is answered. Each module has a `generate(input: GenerateFnInput)`."""
