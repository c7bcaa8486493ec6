"""Delivery of data: what registered loaders yield is made by producers and handed to the ranks."""
