"""``python -m taas_magic.runner``: see :func:`taas_magic.runner.server.main`."""

from taas_magic.runner.server import main

main()
