"""What is run, as data, and how results are compared: models, lists of sizes, flags of scripts, runs that are kept."""
