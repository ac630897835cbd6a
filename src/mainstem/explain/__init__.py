"""Explaining a prediction: target, ranking, account, certificates, verdict."""
