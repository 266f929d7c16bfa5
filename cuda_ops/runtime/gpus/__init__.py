"""Several GPUs: how they are linked, and copies between them."""
