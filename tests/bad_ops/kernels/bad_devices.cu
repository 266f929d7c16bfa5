// No kernel of its own, but without a .cu there would be no CUDA entry.
