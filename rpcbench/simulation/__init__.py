"""Simulated worlds: a program as one of many ranks, without data."""
