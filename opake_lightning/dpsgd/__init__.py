"""DP-SGD: clipping, independent Gaussian noise, Poisson sampling and their accounting."""
