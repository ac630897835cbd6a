"""Benchmarks: ratios measured in one process, interleaved, with the noise beside them. Not tests: nothing here fails."""
