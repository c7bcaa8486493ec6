"""Conversations with other machines: encrypted, in order, and whole though a connection breaks in between."""
