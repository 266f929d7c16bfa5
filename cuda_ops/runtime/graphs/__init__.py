"""CUDA graphs of functions: when a capture holds, and what it reads and writes."""
