# Arguments that both sites must share; sourced by edge.sh and cloud.sh. Override by environment variables, on both sites.
#
# MASTER_ADDR, MASTER_PORT  where the edge listens
# SIZE_LIST, LAYERS         tensor-parallel size of every stage, the edge first; layers of the U's parts
# SITES                     site of every stage
# DEVICE                    auto, cuda, npu or cpu
# SCRIPT                    your training script, absolute

export MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}" MASTER_PORT="${MASTER_PORT:-29511}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
PYTHON="${PYTHON:-python}"
SIZE_LIST="${SIZE_LIST:-1,2}"
LAYERS="${LAYERS:-1,2,1}"
SITES="${SITES:-edge,cloud}"
DEVICE="${DEVICE:-cpu}"
STEPS="${STEPS:-20}"

MODEL=(
    --num-layers "$(($(tr ',' '+' <<<"$LAYERS")))" --hidden-size 64 --num-attention-heads 4
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --global-batch-size 32
    --attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization
    --optimizer adam --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-decay-iters 200 --lr-warmup-iters 10
    --override-opt-param-scheduler
    --train-iters "$STEPS" --log-interval 1 --eval-interval 10 --eval-iters 2
    --save-interval 10 --ckpt-format torch
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
)
PIPELINE=(
    --vtp-size-list "$SIZE_LIST" --layerwise-disaggregated-training --num-layer-list "$LAYERS"
    --vtp-sites "$SITES" --vtp-device "$DEVICE"
)

# The rank numbers follow --node-rank: the edge is node 0 and so holds rank 0. (torchrun's dynamic rendezvous, c10d,
# numbers the nodes by their names.)
launch() { # NODE_RANK PROCESSES SITE [arguments of this site...]
    local node="$1" processes="$2" site="$3"
    shift 3
    exec "$PYTHON" -m torch.distributed.run --nnodes "${NODES:-2}" --node-rank "$node" --nproc-per-node "$processes" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
        -m vtp_plugin run "$SCRIPT" "${MODEL[@]}" "${PIPELINE[@]}" --vtp-site "$site" "$@"
}
