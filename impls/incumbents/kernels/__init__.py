"""Kernels of incumbent libraries, compiled beforehand: recording what a library launches, and launching it again."""
