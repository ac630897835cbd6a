"""Results as plain data: what commands and the page show, and what `--format json` prints."""
