# Qwen 2.5 32B in a U: what both sites share; sourced by edge.sh and cloud.sh. Yours to edit, on both sites alike.
#
# NEVER RUN ON GPUS, NOR ON NPUS. What was done: `plan` takes these flags and says that the memory fits, Megatron 0.19
# parses and checks them, and with SMALL=1 they train on CPUs (tests/unit/project/test_recipes.py).
#
#   on the edge, two GPUs     MASTER_ADDR=10.8.0.1 examples/recipes/qwen-2.5-32b-u/edge.sh
#   in the cloud, eight GPUs  MASTER_ADDR=10.8.0.1 examples/recipes/qwen-2.5-32b-u/cloud.sh
#   on this machine's CPUs    SMALL=1 before both, in two terminals
#
# MASTER_ADDR is an address of the edge. docs/guides/edge-cloud.md says which ports must be open, and what crosses. This is
# the kind of run for which MindSpeed-LLM has --layerwise-disaggregated-training; Qwen 2.5 32B is one of its models.

RECIPES="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$RECIPES/../edge_cloud/launch.sh"

SCRIPT="${SCRIPT:-$RECIPES/../pretrain_gpt.py}"          # your training script, on both sites
DATA="${DATA:-data/text_document}"                       # on the edge: Megatron's dataset, without .bin and .idx
TOKENIZER="${TOKENIZER:-Qwen/Qwen2.5-32B}"               # on the edge: of Hugging Face, or a folder
CHECKPOINTS="${CHECKPOINTS:-checkpoints/qwen-2.5-32b-u}" # a folder of this site; no other site reads it

# RANKS: processes of the edge and of the cloud, one for each GPU. STAGES: TP size of both, and the layers of the
# edge's first part, of the cloud, and of the edge's last part. Six layers of the edge on each of its GPUs take about
# as long as seven of the cloud, which has no embedding and no head; the fewer the edge has, the more the cloud sees.
RANKS=(2 8)
STAGES=(
    --vtp-size-list 2,8 --vtp-sites edge,cloud
    --layerwise-disaggregated-training --num-layer-list 6,52,6
)
# https://huggingface.co/Qwen/Qwen2.5-32B, config.json, as `python -m vtp_plugin checkpoint import` writes its flags.
# That of Qwen2.5-32B-Instruct has --norm-epsilon 1e-6.
MODEL=(
    --num-layers 64 --hidden-size 5120 --ffn-hidden-size 27648
    --num-attention-heads 40 --group-query-attention --num-query-groups 8 --kv-channels 128
    --position-embedding-type rope --rotary-base 1000000 --max-position-embeddings 131072
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --add-qkv-bias
    --untie-embeddings-and-output-weights --padded-vocab-size 152064
    --attention-dropout 0.0 --hidden-dropout 0.0
)
TRAINING=(
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 64
    --train-iters 2000 --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-iters 100
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.02
    --sequence-parallel --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 # else 80 GiB are too few
    --log-interval 10 --eval-interval 1000 --eval-iters 10
)
DEVICE=(--bf16 --no-create-attention-mask-in-dataloader)
INPUT=(--data-path "$DATA" --split 990,10,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
SAVING=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 100 --ckpt-format torch_dist)

if [ -n "${SMALL:-}" ]; then # fewer ranks, both sites on this machine
    RANKS=(1 2)
    STAGES=(--vtp-size-list 1,2 --vtp-sites edge,cloud --layerwise-disaggregated-training --num-layer-list 1,4,1)
    source "$RECIPES/small.sh"
fi
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it with sequence parallelism, on GPUs before Blackwell
