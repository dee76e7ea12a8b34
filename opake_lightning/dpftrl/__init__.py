"""DP-FTRL: noise that is correlated over the steps of a run."""
