"""What a GPT of Megatron is: its sizes, and its parameters with their names, shapes and cuts; arithmetic only.

Words:
    size: a number that the shape of a parameter follows from, such as the width between the layers.
    row: a parameter with all that is known of it, whatever the model and the layer.
    gated: of a feed-forward layer with a second input projection, which lies behind the first one.
    latent: of attention whose queries, keys and values are projected down first.
"""
