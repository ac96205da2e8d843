"""Models as they are published on Hugging Face: what their files hold, and how it lies in a checkpoint of Megatron.

Everything here is data and arithmetic on names, shapes and boxes. ``vtp_plugin/checkpoint/tools`` moves the elements.

Words:
    family: models that one class of transformers computes, such as llama.
    row: which of their tensors make which of ours, in every layer and for every expert.
    share: rows of one of their tensors, and the box of one of ours that they are.
    field: an entry of ``config.json``.
    note: the file beside an import that says which model it is.
"""
