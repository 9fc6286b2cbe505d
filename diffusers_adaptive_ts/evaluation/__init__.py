"""How good a model is: stable validation losses."""
