"""An encrypted link between two sites, with somebody on the wire between them."""
