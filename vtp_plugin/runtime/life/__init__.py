"""How ranks live together: they meet, compare what they were asked for, watch each other, and end with one line."""
