"""Runs stages of commands and tests, keeps what they do, and goes on from there: for ci/gpu and ci/nightly."""
