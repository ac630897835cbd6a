"""Benchmarks: ratios measured in one process, interleaved, with the noise beside them; nothing here can fail."""
