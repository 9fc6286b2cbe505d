"""Speed, memory and quality, measured as ratios in one run; results are kept as JSON under `results/`."""
