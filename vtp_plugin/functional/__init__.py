"""Send and receive functions for training steps written by hand, with the interface of the Ascend implementation.

Names, arguments and returns follow ``layerwise_disaggregated_training/p2p_communication_patch.py`` of MindSpeed-MM, the
queries ``parallel_state_patch.py`` beside it: code written for it only changes its import or, after :func:`install`,
not even that. Below run the same channels as in every other step, so any transport, any sizes, sequence parallelism and
variable lengths work.

All tensor-parallel ranks of a stage must call the same function at the same program point, and must wait for the
receives of a channel in the order of their calls. A call that has nothing to send or receive, by the rules of each
function, does not communicate.

``group``, ``next_rank`` and ``prev_rank``, each one or a list, only choose replicas of the pipeline, since every
direction of every boundary has its channel. A group is one of :func:`pipeline_groups`; a rank is the leader of the next
or previous stage in such a replica. Given together they must name the same replicas, in the same order. All may be left
out where there is only one replica. Several send one tensor to each, and receive the mean of what each sends.

With variable lengths every receive waits for the sender's header, even if it does not wait for the tensor. These
functions do not coalesce messages, whatever ``batch_p2p_comm`` says.

Words:
    handle: what a call returns that did not wait; wait for it once.
    implementation: the Ascend one, whose interface this is.
    joint: a handle of what several replicas send, of which it gives the mean (``_Joint``).
"""

from __future__ import annotations

from vtp_plugin.functional import handles, p2p
from vtp_plugin.functional.handles import *  # noqa: F403 - each lists what it exports
from vtp_plugin.functional.p2p import *  # noqa: F403
from vtp_plugin.functional.stand_in import install

__all__ = ["install"]
__all__ += handles.__all__
__all__ += p2p.__all__
