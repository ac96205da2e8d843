# An adapter (LoRA) for Llama 3.1 8B, or with BASE_MODEL=qwen-2.5-32b for Qwen 2.5 32B, in a U: what both sites share; sourced
# by edge.sh and cloud.sh. Yours to edit, on both sites alike.
#
# NEVER RUN ON GPUS, NOR ON NPUS. What was done: `plan` takes these flags and says that the edge fits into a GPU of 24 GiB,
# Megatron 0.19 parses and checks them, and with SMALL=1 they train on CPUs (tests/unit/project/test_recipes.py).
#
#   on the edge, one GPU      MASTER_ADDR=10.8.0.1 examples/recipes/lora-u/edge.sh
#   in the cloud, eight GPUs  MASTER_ADDR=10.8.0.1 examples/recipes/lora-u/cloud.sh
#   on this machine's CPUs    SMALL=1 before both, in two terminals
#
# MASTER_ADDR is an address of the edge. docs/guides/edge-cloud.md says which ports must be open, and what crosses;
# docs/guides/fine-tuning.md what adapters are. Import the published model first, to a folder that both sites reach:
#
#   vtp checkpoint import --hf models/Llama-3.1-8B --to base

RECIPES="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$RECIPES/../edge_cloud/launch.sh"

BASE_MODEL="${BASE_MODEL:-llama-3.1-8b}"                 # or qwen-2.5-32b
SCRIPT="${SCRIPT:-$RECIPES/../pretrain_gpt.py}"          # your training script, on both sites
DATA="${DATA:-data/text_document}"                       # on the edge: Megatron's dataset, without .bin and .idx
TOKENIZER="${TOKENIZER:-models/$BASE_MODEL}"             # on the edge: of Hugging Face, or a folder
BASE="${BASE:-base}"                                     # the imported model; both sites read it
CHECKPOINTS="${CHECKPOINTS:-checkpoints/adapter}"        # of the adapter; both sites write to it

# RANKS: processes of the edge and of the cloud, one for each GPU. STAGES: TP size of both, and the layers of the
# edge's first part, of the cloud, and of the edge's last part; the fewer the edge has, the more the cloud sees.
RANKS=(1 8)
case "$BASE_MODEL" in
llama-3.1-8b) # https://huggingface.co/meta-llama/Llama-3.1-8B, config.json
    LAYERS=2,28,2
    MODEL=(
        --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
        --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
        --position-embedding-type rope --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8.0
        --max-position-embeddings 131072 --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
        --untie-embeddings-and-output-weights --padded-vocab-size 128256
        --attention-dropout 0.0 --hidden-dropout 0.0
    )
    ;;
qwen-2.5-32b) # https://huggingface.co/Qwen/Qwen2.5-32B, config.json
    LAYERS=2,60,2
    MODEL=(
        --num-layers 64 --hidden-size 5120 --ffn-hidden-size 27648
        --num-attention-heads 40 --group-query-attention --num-query-groups 8 --kv-channels 128
        --position-embedding-type rope --rotary-base 1000000 --max-position-embeddings 131072
        --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --add-qkv-bias
        --untie-embeddings-and-output-weights --padded-vocab-size 152064
        --attention-dropout 0.0 --hidden-dropout 0.0
    )
    ;;
*)
    echo "BASE_MODEL=$BASE_MODEL; there are llama-3.1-8b and qwen-2.5-32b" >&2
    exit 2
    ;;
esac
STAGES=(
    --vtp-size-list 1,8 --vtp-sites edge,cloud
    --layerwise-disaggregated-training --num-layer-list "$LAYERS"
)
TRAINING=(
    --vtp-lora-rank 16 --vtp-lora-alpha 32
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 32
    --train-iters 500 --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-iters 20
    --weight-decay 0.0 --clip-grad 1.0
    --recompute-granularity selective --recompute-modules core_attn mlp
    --log-interval 10 --eval-interval 100 --eval-iters 10
)
# Adapters lie beside Megatron's own linear layers, not beside those of Transformer Engine.
DEVICE=(--bf16 --transformer-impl local --no-create-attention-mask-in-dataloader)
INPUT=(--data-path "$DATA" --split 990,10,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
SAVING=(--pretrained-checkpoint "$BASE" --load "$CHECKPOINTS" --save "$CHECKPOINTS" --save-interval 100)

if [ -n "${SMALL:-}" ]; then # fewer ranks, both sites on this machine, a random base
    RANKS=(1 2)
    STAGES=(--vtp-size-list 1,2 --vtp-sites edge,cloud --layerwise-disaggregated-training --num-layer-list 1,4,1)
    source "$RECIPES/small.sh"
fi
