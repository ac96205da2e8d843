"""What is an order? Actions, the workers that run them, the messages between these, and what each action promises."""
