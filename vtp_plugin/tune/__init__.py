"""Which layout fits these machines: their description, the search, and the layout of a run that loses cards."""
