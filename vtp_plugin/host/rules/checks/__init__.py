"""Checks that compute: model sizes, batches, the layers of a U, and the arguments that ranks and sites must share."""
