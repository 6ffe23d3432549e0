"""What takes too long for each commit: ``ci/nightly.sh`` runs it in parts, and keeps what came of each."""
