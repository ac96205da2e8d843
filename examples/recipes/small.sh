# Sourced by the recipes where SMALL is set: the same kind of model and layout, small enough for the CPUs of this
# machine. Few narrow layers in fp32, made-up data, gloo, no checkpoint. Later flags win, so what stays here is of the
# recipe.

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
NODE_RANK=0 MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"

MODEL+=(
    --num-layers 6 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 8 --num-query-groups 4 --kv-channels 8
    --max-position-embeddings 64 --padded-vocab-size 512
)
TRAINING+=(
    --seq-length 64 --micro-batch-size 1 --global-batch-size 8
    --train-iters 3 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 0 --log-interval 1 --eval-interval 100 --eval-iters 0 --use-cpu-initialization
)
# In place of what is for GPUs.
DEVICE=(
    --vtp-device cpu --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-rope-fusion --no-bias-swiglu-fusion --no-masked-softmax-fusion
)
INPUT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 256 --num-workers 0)
SAVING=()
