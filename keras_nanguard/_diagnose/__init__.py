"""Diagnosis: replay a refused step on its unchanged state, find the origin of NaN and Inf, and
decide the cause from the evidence.
"""
