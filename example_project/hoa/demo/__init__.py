"""The demo: one interleaving of two replicas, played under three guards."""
