"""Makes adapter states durable: checkpoints, published weights, snapshots."""
