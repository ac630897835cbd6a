"""Published claims as commands: each module runs one experiment and ends with claims, nulls and verdicts."""
