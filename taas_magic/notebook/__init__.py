"""The extension: pragmas, magics, and what they show."""
