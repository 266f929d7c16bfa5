"""What a schema and a signature line say: checks, shapes, gradients, batching, sharding."""
