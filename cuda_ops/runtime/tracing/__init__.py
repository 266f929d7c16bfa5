"""Traces with the names of operators, and the tables made of them."""
