# Arguments that both sites must share; sourced by edge.sh and cloud.sh. Override by environment variables, on both sites.
#
# SIZE_LIST, LAYERS  tensor-parallel size of every stage, the edge first; layers of the U's parts
# SITES              site of every stage
# DEVICE             auto, cuda, npu or cpu
# SCRIPT             your training script, absolute

source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
SIZE_LIST="${SIZE_LIST:-1,2}"
LAYERS="${LAYERS:-1,2,1}"
SITES="${SITES:-edge,cloud}"
DEVICE="${DEVICE:-cpu}"
STEPS="${STEPS:-20}"

SHARED=(
    --num-layers "$(($(tr ',' '+' <<<"$LAYERS")))" --hidden-size 64 --num-attention-heads 4
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --global-batch-size 32
    --attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization
    --optimizer adam --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-decay-iters 200 --lr-warmup-iters 10
    --override-opt-param-scheduler
    --train-iters "$STEPS" --log-interval 1 --eval-interval 10 --eval-iters 2
    --save-interval 10 --ckpt-format torch_dist
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
    --vtp-size-list "$SIZE_LIST" --layerwise-disaggregated-training --num-layer-list "$LAYERS"
    --vtp-sites "$SITES" --vtp-device "$DEVICE"
)
