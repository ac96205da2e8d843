#!/usr/bin/env bash
# Qwen 3 30B-A3B, with 128 experts, on two nodes with different numbers of GPUs. Yours to edit: flags in arrays, one
# torchrun at the end.
#
# NEVER RUN ON GPUS. What was done: `plan` takes these flags and says that the memory fits, Megatron 0.19 parses and
# checks them, and with SMALL=1 they train on CPUs (tests/unit/project/test_recipes.py).
#
#   on the node of 6 GPUs    NODE_RANK=0 MASTER_ADDR=10.0.0.1 examples/recipes/qwen-3-30b-a3b/train.sh
#   on the node of 8 GPUs    NODE_RANK=1 MASTER_ADDR=10.0.0.1 examples/recipes/qwen-3-30b-a3b/train.sh
#   on this machine's CPUs   SMALL=1 examples/recipes/qwen-3-30b-a3b/train.sh
#
# MASTER_ADDR is an address of node 0. With LAYOUT=old-and-new node 0 has four old GPUs, node 1 six new ones.
# Arguments of Megatron may follow; the later one of two values counts. What the planner says of these flags: ASK=plan
# before the script.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

SCRIPT="${SCRIPT:-$HERE/../../pretrain_gpt.py}"          # your training script
DATA="${DATA:-data/text_document}"                       # Megatron's dataset, without .bin and .idx
TOKENIZER="${TOKENIZER:-Qwen/Qwen3-30B-A3B}"             # of Hugging Face, or a folder
CHECKPOINTS="${CHECKPOINTS:-checkpoints/qwen-3-30b-a3b}" # a folder that all nodes reach

# RANKS: processes that every node starts, one for each GPU, in the order of NODE_RANK. STAGES: TP size of every
# pipeline stage, its replicas, its layers, and its EP size: the ranks that have different experts. Ranks are numbered
# stage after stage, so node 0 has the first stages.
case "${LAYOUT:-two-nodes}" in
two-nodes)
    # GPUs of one kind, with 80 GiB. TP 6 does not divide 32 heads, so the node of six has two stages. The answer to
    #   ASK="search --cluster examples/clusters/two-nodes.toml --vtp-stages 1:3 --expert-model-parallel-size 2
    #   --expert-tensor-parallel-size 1"
    # before this script: 5.56 s a step, from data sheets. Stock Megatron takes 6.26 s with three stages, 5.56 s with
    # seven.
    RANKS=(6 8)
    STAGES=(
        --vtp-size-list 1,2,4 --vtp-data-parallel-size 2 --vtp-schedule planned
        --expert-model-parallel-size 2 --expert-tensor-parallel-size 1
        --decoder-first-pipeline-num-layers 8 --decoder-last-pipeline-num-layers 25 # 8, 15, 25
    )
    ;;
old-and-new)
    # Four A100 of 40 GiB on node 0, six H100 of 80 GiB on node 1. `search` knows one EP size for all stages; with EP
    # 2 it finds only five stages of TP 2, which stock Megatron runs by itself (11.0 s a step), and which fill 77 of
    # 80 GiB. Here all ranks of a stage have different experts. Layers by hand, so that all stages take about as long
    # and ASK=plan says that they fit: the head costs as much as five layers. Which of the two is quicker nobody has
    # measured.
    RANKS=(4 6)
    STAGES=(
        --vtp-size-list 4,2,4 --vtp-ep-list 4,2,4 --vtp-etp-list 1,1,1
        --decoder-first-pipeline-num-layers 10 --decoder-last-pipeline-num-layers 25 # 10, 13, 25
    )
    ;;
*)
    echo "LAYOUT=$LAYOUT; there are two-nodes and old-and-new" >&2
    exit 2
    ;;
esac

# https://huggingface.co/Qwen/Qwen3-30B-A3B, config.json, as `python -m vtp_plugin checkpoint import` writes its
# flags.
MODEL=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
    --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128
    --position-embedding-type rope --rotary-base 1000000 --max-position-embeddings 40960
    --normalization RMSNorm --norm-epsilon 1e-6 --qk-layernorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --padded-vocab-size 151936
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
    --attention-dropout 0.0 --hidden-dropout 0.0
)
TRAINING=(
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 256 # a million tokens a step
    --train-iters 100000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.02
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --sequence-parallel --use-distributed-optimizer
    --log-interval 10 --eval-interval 1000 --eval-iters 10
)
DEVICE=(--bf16 --moe-grouped-gemm --no-create-attention-mask-in-dataloader)
INPUT=(--data-path "$DATA" --split 990,10,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
SAVING=(
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 # a later start resumes
    --dist-ckpt-optim-fully-reshardable                             # also in another layout
)

if [ -n "${SMALL:-}" ]; then # fewer ranks, all on this machine
    RANKS=(4)
    STAGES=(
        --vtp-size-list 2,1,1 --vtp-schedule planned --vtp-ep-list 2,1,1 --vtp-etp-list 1,1,1
        --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 1
    )
    source "$HERE/../small.sh"
    MODEL+=(--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32)
fi
FLAGS=("${MODEL[@]}" "${TRAINING[@]}" "${DEVICE[@]}" "${INPUT[@]}" "${SAVING[@]}" "$@")
source "$HERE/../ask.sh"

export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it with sequence parallelism, on GPUs before Blackwell
exec torchrun --nnodes "${#RANKS[@]}" --node-rank "${NODE_RANK:?0 on the first node}" \
    --nproc-per-node "${RANKS[$NODE_RANK]}" \
    --master-addr "${MASTER_ADDR:?an address of node 0}" --master-port "${MASTER_PORT:-29500}" \
    -m vtp_plugin run "$SCRIPT" "${STAGES[@]}" "${FLAGS[@]}"
