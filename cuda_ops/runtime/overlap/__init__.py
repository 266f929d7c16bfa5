"""Copies and stages on streams of their own, beside the work that needs them."""
