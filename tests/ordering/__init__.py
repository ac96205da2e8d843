"""Whether the order in which ranks issue communication is safe on every backend.

* ``recorder`` records what a rank really issues, as a ``trace``.
* ``models`` says what gloo, NCCL and HCCL promise about order, as data.
* ``check`` proves that the traces of all ranks fit together under every model: ``match`` pairs the operations,
  ``replay`` looks for ranks that wait for ever.
* ``overlap`` tells which messages are hidden behind compute.

Only ``recorder`` needs torch. None of this shares code with the plugin but its loop over orders and its errors.
"""
