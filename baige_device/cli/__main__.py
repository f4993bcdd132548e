"""`python -m baige_device.cli`."""

from baige_device.cli import main

main()
