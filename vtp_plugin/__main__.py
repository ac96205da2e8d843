"""``python -m vtp_plugin``."""

from vtp_plugin.cli import main

if __name__ == "__main__":
    main()
