"""The basis laboratory: kurtosis, outlier features, quantisers and rotations of one model, as a session asks."""
