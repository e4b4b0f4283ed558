"""Faults placed at system calls, and what a power cut may leave of a disk."""
