"""The only code that communicates: it carries out finished plans of the pure packages."""
