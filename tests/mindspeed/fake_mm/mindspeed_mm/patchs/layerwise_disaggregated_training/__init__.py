"""As in MindSpeed-MM, a package."""
