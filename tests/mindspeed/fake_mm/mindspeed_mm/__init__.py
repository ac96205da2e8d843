"""A stand-in for MindSpeed-MM as far as its exchange functions go: packages, and modules with other names, too."""
