"""Times of functions, and what it costs to measure them."""
