"""The same questions asked of many prompts, and the means over them."""
