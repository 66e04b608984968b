"""Makers of base models and of training text."""
