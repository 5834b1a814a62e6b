"""How a scenario acts on a model: casts, autocast, apex recipes and quantized weights."""
