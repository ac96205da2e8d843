"""Models from Hugging Face: what their files hold, and where it lies in a checkpoint of Megatron.

Everything here is data and arithmetic on names, shapes and boxes. ``vtp_plugin/checkpoint/tools`` moves the elements.

Words:
    family: models that one class of transformers computes, such as llama.
    row: Hugging Face tensors and the Megatron tensor that they make, in every layer and for every expert.
    place: a module of Megatron's model that has sizes of its own: a language model, a vision tower.
    share: rows of a Hugging Face tensor, and the box of a Megatron tensor that they are.
    field: an entry of ``config.json``.
    note: the file beside an import that says which model it is.
"""
