"""Registered ops over stacked tensors."""
