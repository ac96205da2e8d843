"""What jobs put into a run: layers, delays, faults in a save, and notes of what a rank holds, sends or computes."""
