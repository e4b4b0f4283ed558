"""Layers that stand for a part of a larger layer."""
