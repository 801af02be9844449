"""``python -m packer`` is the ``packer`` command."""

from packer.cli.main import main

if __name__ == "__main__":
    main()
