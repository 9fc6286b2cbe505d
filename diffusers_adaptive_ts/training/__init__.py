"""One training loop for every model family and sampler, on accelerate."""
