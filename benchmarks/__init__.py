"""How fast the locks are, next to others, as ratios of one run: `make bench`."""
