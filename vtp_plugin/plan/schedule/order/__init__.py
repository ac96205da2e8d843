"""What is an order? Actions, the workers that run them, the messages between these, and what each action promises.

Where the pieces of the model lie, and so what a worker is, stands in ``placement``.
"""
