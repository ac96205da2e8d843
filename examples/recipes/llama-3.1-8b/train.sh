#!/usr/bin/env bash
# Llama 3.1 8B on two nodes with different numbers of GPUs. Yours to edit: flags in arrays, one torchrun at the end.
#
# NEVER RUN ON GPUS. What was done: `plan` takes these flags and says that the memory fits, Megatron 0.19 parses and
# checks them, and with SMALL=1 they train on CPUs (tests/unit/project/test_recipes.py).
#
#   on the node of 6 GPUs    NODE_RANK=0 MASTER_ADDR=10.0.0.1 examples/recipes/llama-3.1-8b/train.sh
#   on the node of 8 GPUs    NODE_RANK=1 MASTER_ADDR=10.0.0.1 examples/recipes/llama-3.1-8b/train.sh
#   on this machine's CPUs   SMALL=1 examples/recipes/llama-3.1-8b/train.sh
#
# MASTER_ADDR is an address of node 0. With LAYOUT=old-and-new node 0 has six new GPUs, node 1 four old ones.
# Arguments of Megatron may follow; the later one of two values counts. What the planner says of these flags: ASK=plan
# before the script.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

SCRIPT="${SCRIPT:-$HERE/../../pretrain_gpt.py}"        # your training script
DATA="${DATA:-data/text_document}"                     # Megatron's dataset, without .bin and .idx
TOKENIZER="${TOKENIZER:-meta-llama/Llama-3.1-8B}"      # of Hugging Face, or a folder
CHECKPOINTS="${CHECKPOINTS:-checkpoints/llama-3.1-8b}" # a folder that all nodes reach

# RANKS: processes that every node starts, one for each GPU, in the order of NODE_RANK. STAGES: TP size of every
# pipeline stage, its replicas, and its layers. Ranks are numbered stage after stage, so node 0 has the first stages.
case "${LAYOUT:-two-nodes}" in
two-nodes)
    # GPUs of one kind, with 80 GiB. TP 6 does not divide 32 heads, so the node of six has two stages. The answer to
    #   ASK="search --cluster examples/clusters/two-nodes.toml --vtp-stages 1:3"
    # before this script: 11.0 s a step, from data sheets. Stock Megatron takes 12.7 s with three stages, 11.1 s with
    # seven.
    RANKS=(6 8)
    STAGES=(
        --vtp-size-list 2,1,4 --vtp-data-parallel-size 2 --vtp-schedule planned
        --decoder-first-pipeline-num-layers 10 --decoder-last-pipeline-num-layers 17 # 10, 5, 17
    )
    ;;
old-and-new)
    # Six H100 of 80 GiB on node 0, four A100 of 40 GiB on node 1. The answer to
    #   ASK="search --cluster examples/clusters/old-and-new.toml"
    # 20.3 s a step. Stock Megatron takes 21.1 s, with five stages. `search` says to stay with it: a gain below 5 %.
    RANKS=(6 4)
    STAGES=(
        --vtp-size-list 2,1,2 --vtp-data-parallel-size 2 --vtp-schedule planned
        --decoder-first-pipeline-num-layers 19 --decoder-last-pipeline-num-layers 4 # 19, 9, 4
    )
    ;;
*)
    echo "LAYOUT=$LAYOUT; there are two-nodes and old-and-new" >&2
    exit 2
    ;;
esac

# https://huggingface.co/meta-llama/Llama-3.1-8B, config.json, as `python -m vtp_plugin checkpoint import` writes its
# flags.
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --position-embedding-type rope --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8.0
    --max-position-embeddings 131072 --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --padded-vocab-size 128256
    --attention-dropout 0.0 --hidden-dropout 0.0
)
TRAINING=(
    --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 # a million tokens a step
    --train-iters 100000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.02
    --sequence-parallel --use-distributed-optimizer
    --log-interval 10 --eval-interval 1000 --eval-iters 10
)
DEVICE=(--bf16 --no-create-attention-mask-in-dataloader)
INPUT=(--data-path "$DATA" --split 990,10,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
SAVING=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500) # a later start resumes

if [ -n "${SMALL:-}" ]; then # fewer ranks, all on this machine
    RANKS=(4)
    STAGES=(
        --vtp-size-list 2,1,1 --vtp-schedule planned
        --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 1
    )
    source "$HERE/../small.sh"
fi
FLAGS=("${MODEL[@]}" "${TRAINING[@]}" "${DEVICE[@]}" "${INPUT[@]}" "${SAVING[@]}" "$@")
source "$HERE/../ask.sh"

export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it with sequence parallelism, on GPUs before Blackwell
exec torchrun --nnodes "${#RANKS[@]}" --node-rank "${NODE_RANK:?0 on the first node}" \
    --nproc-per-node "${RANKS[$NODE_RANK]}" \
    --master-addr "${MASTER_ADDR:?an address of node 0}" --master-port "${MASTER_PORT:-29500}" \
    -m vtp_plugin run "$SCRIPT" "${STAGES[@]}" "${FLAGS[@]}"
