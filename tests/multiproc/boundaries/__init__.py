"""What crosses between stages: transports, order of messages, and what must not leave the edge."""
