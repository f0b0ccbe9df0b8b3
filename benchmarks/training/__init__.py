"""Training steps and their parts: optimizer, matmul, routing, garbage collection."""
