"""What lies on disk, read and checked without torch."""
