"""How long does an order take? Costs as data and as text, the simulated step, and the time that no order can beat."""
