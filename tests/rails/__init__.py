"""What a node is, and its rails: read from trees of files that look like real nodes."""
