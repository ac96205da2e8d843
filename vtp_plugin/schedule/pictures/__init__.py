"""What does an order look like? A simulated step as text, as a picture, and as a trace."""
