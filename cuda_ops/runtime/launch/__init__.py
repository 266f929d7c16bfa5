"""What compiled kernels need, and the blocks that fit on a GPU at once."""
