"""The one place that holds the version; the build, the handshake and the docs read it here."""

__version__ = "0.1.0"
